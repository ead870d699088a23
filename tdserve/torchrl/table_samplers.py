"""Samplers of a buffer whose rows are in a table: the server draws by the table's own sampler.

Each class stands for one of TorchRL's and has its attributes, so that TorchRL's checks of classes hold and what a user
sets on his sampler counts. Where the table has another sampler, rows are drawn in this process as TorchRL does it.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torchrl.data.replay_buffers.samplers.base import Sampler
from torchrl.data.replay_buffers.samplers.prioritized import PrioritizedSampler
from torchrl.data.replay_buffers.samplers.random import RandomSampler, SamplerWithoutReplacement
from torchrl.data.replay_buffers.samplers.slice import SliceSampler

from tdserve.base.errors import NotSupportedError, WrongStateError
from tdserve.client.tables.conditional_update import NOT_LIVE
from tdserve.messages.content import GENERATION_KEY
from tdserve.rules.replay.samplers.prioritized import Prioritized
from tdserve.rules.replay.samplers.sampler import Sampler as TableRule, Uniform
from tdserve.rules.replay.samplers.without_replacement import WithoutReplacement
from tdserve.structure.tensors.plain_tensors import to_host
from tdserve.structure.trees.tree import Path
from tdserve.torchrl.slice_draws import TableSliceSampler
from tdserve.torchrl.table_draws import draw_rows, has_rule, hold_local_draw, may_draw, raise_empty
from tdserve.torchrl.torchrl_private import share_state

UNCHANGED = float("-inf")
"""Priority of rows that keep theirs; no priority is negative. A row that was just written has the highest so far."""

_NOT_DRAWN = -1
"""In the place of the generation of a row that a sampler has not drawn."""

_MAX_TRIES = 4


def to_table_sampler(sampler: Any, *, own_rule: TableRule | None) -> Any:
    """Returns the sampler that draws from a table in the place of one of TorchRL's, or of a function that makes one.

    Args:
        sampler: None stands for TorchRL's default, or for the table's own sampler if one was chosen.
        own_rule: The sampler that was chosen for the table, if any.
    """
    if sampler is not None and not isinstance(sampler, Sampler) and callable(sampler):
        sampler = sampler()
    if sampler is None:
        made = TableRandomSampler()
        made.own_rule = own_rule
        return made
    kind = _KINDS.get(type(sampler))
    return sampler if kind is None else share_state(sampler, kind)


class _DrawnRows:
    """Which rows a sampler has drawn, by their numbers: an update of priorities names no more than these.

    Args:
        num_rows: Capacity of the table.
    """

    def __init__(self, num_rows: int) -> None:
        self._generations = torch.full((num_rows,), _NOT_DRAWN, dtype=torch.int64)
        self._is_due = torch.zeros(num_rows, dtype=torch.bool)
        self._is_doubtful = torch.zeros(num_rows, dtype=torch.bool)

    def note_draw(self, index: torch.Tensor, generations: torch.Tensor) -> None:
        """Notes rows that were drawn. One that had another generation at an earlier draw, whose update has not come
        yet, is doubtful: the next update may be of that draw."""
        self._is_doubtful[index] |= self._is_due[index] & (self._generations[index] != generations)
        self._generations[index] = generations
        self._is_due[index] = True

    def note_update(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the generation of each row at its last draw, ``_NOT_DRAWN`` of others; and which rows are doubtful.
        None of them is afterwards."""
        is_doubtful = self._is_doubtful[index]
        self._is_due[index] = self._is_doubtful[index] = False
        return self._generations[index], is_doubtful

    def forget(self, index: torch.Tensor) -> None:
        """Forgets the draws of rows."""
        self._generations[index] = _NOT_DRAWN
        self._is_due[index] = self._is_doubtful[index] = False


class TableRandomSampler(RandomSampler):
    """Stands for ``RandomSampler``: each row has the same probability.

    Attributes:
        own_rule: The sampler that was chosen for the table, for a buffer without a sampler.
    """

    own_rule: TableRule | None = None

    def choose_rule(self, keys: Collection[Path]) -> TableRule:
        """Returns the sampler for a new table."""
        return self.own_rule or Uniform()

    def sample(self, storage: Any, batch_size: int) -> tuple[torch.Tensor, dict[str, Any]]:
        """Draws rows: by the server if the table draws in this way, else in this process."""
        if not may_draw(storage):
            raise_empty(storage, batch_size)
        if has_rule(storage, self):
            index, added, _ = draw_rows(storage, batch_size)
            weights = {key: added[key] for key in ("priority_weight",) if key in added}
            return index, weights
        for _ in range(_MAX_TRIES):
            index, info = super().sample(storage, batch_size)
            if hold_local_draw(storage, index):
                return index, info
        rows = storage.get(slice(None))  # the live rows are not those with the lowest numbers
        index = torch.randint(len(rows), (batch_size,), generator=self._rng)
        storage.hold(index, rows[index], torch.full_like(index, NOT_LIVE))
        return index, {}


class TablePrioritizedSampler(PrioritizedSampler):
    """Stands for ``PrioritizedSampler``. The server has the priorities; ``beta`` may differ between processes, and
    change."""

    _drawn: _DrawnRows | None = None

    def choose_rule(self, keys: Collection[Path]) -> Prioritized:
        """Returns the sampler for a new table. A beta of 0 would leave no weights to compute others from."""
        return Prioritized(alpha=float(self._alpha), beta=float(self._beta) or 1.0, eps=float(self._eps))

    @property
    def alpha(self) -> float:
        """Exponent of the priorities."""
        return float(self._alpha)

    @alpha.setter
    def alpha(self, value: float) -> None:
        if value != self._alpha:
            reason = f"it is fixed when a table is created (here {self._alpha}); create another table for {value}"
            raise NotSupportedError(feature="changing the alpha of a table's priorities", reason=reason)

    @property
    def device(self) -> torch.device:
        """Where rows are drawn, for TorchRL."""
        return torch.device("cpu")

    @property
    def default_priority(self) -> float:
        """Priority of rows without one: that with which the server has stored them."""
        return UNCHANGED

    def sample(self, storage: Any, batch_size: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Draws rows; their weights are those of this sampler's beta.

        Raises:
            WrongStateError: The table draws in another way, or with another alpha.
        """
        if not may_draw(storage):
            raise_empty(storage, batch_size)
        beta = self._require_same(storage)
        index, added, _ = draw_rows(storage, batch_size)
        self._drawn = self._drawn or _DrawnRows(storage.max_size)
        self._drawn.note_draw(index, added[GENERATION_KEY])
        weight = added["priority_weight"]
        if beta != self._beta:
            weight = weight ** (float(self._beta) / beta)
        return index, {"priority_weight": weight}

    def update_priority(self, index: Any, priority: Any, *, storage: Any = None) -> None:
        """Changes priorities of rows; those that are ``UNCHANGED`` stay.

        Rows that others have overwritten since this sampler drew them are skipped, also if it has drawn the new ones
        meanwhile: the first update of such a number may be of either row.

        Raises:
            WrongStateError: The table has no priorities.
            SelectionError: A row that it has not drawn is not live. Of the rows that it has drawn, priorities may have
                changed.
        """
        self._require_same(storage)
        index = to_host(torch.as_tensor(index)).reshape(-1)
        priority = to_host(torch.as_tensor(priority)).float().reshape(-1).expand(len(index))
        table, changes = storage.require_table(), priority != UNCHANGED
        generation = torch.full_like(index, _NOT_DRAWN)
        if self._drawn is not None:
            generation, is_doubtful = self._drawn.note_update(index)
            changes = changes & ~is_doubtful
        for part in (changes & (generation != _NOT_DRAWN), changes & (generation == _NOT_DRAWN)):
            if part.any():
                given = generation[part] if generation[part][0] != _NOT_DRAWN else None
                table.update_priority(index[part], priority[part], generation=given)

    def mark_update(self, index: Any, *, storage: Any = None) -> None:
        """Does nothing: rows that were written have the highest priority so far."""

    def add(self, index: Any) -> None:
        """Forgets an earlier draw of the row, which has been written now."""
        self.extend(index)

    def extend(self, index: Any) -> None:
        """Forgets earlier draws of the rows, which have been written now."""
        if self._drawn is not None:
            self._drawn.forget(torch.as_tensor(index).cpu())

    def _empty(self) -> None:
        return None

    def state_dict(self) -> dict[str, Any]:
        """Returns the exponents; priorities are the table's."""
        return {"_alpha": self._alpha, "_beta": self._beta, "_eps": self._eps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Sets beta; priorities were loaded with their rows."""
        self.alpha, self._beta = state_dict["_alpha"], state_dict["_beta"]

    def dumps(self, path: Any) -> None:
        """Writes the exponents into a folder."""
        pathlib.Path(path).mkdir(exist_ok=True)
        (pathlib.Path(path) / "sampler_metadata.json").write_text(json.dumps(self.state_dict()))

    def loads(self, path: Any) -> None:
        """Reads the exponents from a folder."""
        self.load_state_dict(json.loads((pathlib.Path(path) / "sampler_metadata.json").read_text()))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_rng": None, "_sum_tree": None, "_min_tree": None, "_drawn": None}

    def _require_same(self, storage: Any) -> float:
        """Returns the beta of the table's sampler."""
        table = storage.require_table()
        found: Any = table.settings.sampler
        rule = self.choose_rule(())
        beta = getattr(found, "beta", 0.0)
        if not beta or replace(rule, beta=beta) != found:
            state = f"the table {table.name!r} has the sampler {found}"
            raise WrongStateError(state=state, event=f"drawing by {rule}")
        return float(beta)


class TableSamplerWithoutReplacement(SamplerWithoutReplacement):
    """Stands for ``SamplerWithoutReplacement``. All processes share the epoch of the table; where it ends is counted in
    each."""

    _num_due = 0
    len_storage: int

    def choose_rule(self, keys: Collection[Path]) -> TableRule | None:
        """Returns the sampler for a new table; None: rows in their order are drawn in this process."""
        return WithoutReplacement() if self.shuffle else None

    def sample(self, storage: Any, batch_size: int) -> tuple[torch.Tensor, dict[str, Any]]:
        """Draws rows that this epoch has not had yet; its last sample is shorter."""
        if not may_draw(storage):
            raise_empty(storage, batch_size)
        if not has_rule(storage, self):
            return super().sample(storage, batch_size)
        length = len(storage)
        if length < batch_size and self.drop_last:
            return super().sample(storage, batch_size)  # raises
        due = self._num_due if self.len_storage == length else 0
        due = due or length
        self.len_storage = length
        index, _, _ = draw_rows(storage, min(batch_size, due))
        due -= len(index)
        self._ran_out = due == 0 or (self.drop_last and due < batch_size)
        if self._ran_out and due:
            draw_rows(storage, due)  # what is dropped ends the epoch of the table, too
            due = 0
        self._num_due = due
        left = due or length
        self._remaining_batches = left // batch_size if self.drop_last else -(left // -batch_size)
        return index, {}

    def _empty(self) -> None:
        super()._empty()
        self._num_due = 0

    def state_dict(self) -> dict[str, Any]:
        """Returns what TorchRL's has, without an order: that is the table's."""
        return {**super().state_dict(), "_sample_list": None}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Begins an epoch."""
        super().load_state_dict({**state_dict, "_sample_list": None})
        self._num_due = 0


_KINDS: dict[type[Any], type[Any]] = {
    RandomSampler: TableRandomSampler,
    PrioritizedSampler: TablePrioritizedSampler,
    SamplerWithoutReplacement: TableSamplerWithoutReplacement,
    SliceSampler: TableSliceSampler,
}
