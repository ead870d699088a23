"""Slices of trajectories that the server draws, in the place of TorchRL's ``SliceSampler``."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torchrl.data.replay_buffers.samplers.slice import SliceSampler

from tdserve.base.errors import DeadlineExceededError
from tdserve.rules.replay.samplers.sampler import Sampler as TableRule
from tdserve.rules.replay.samplers.slices import Slices
from tdserve.structure.trees.tree import Path
from tdserve.torchrl.table_draws import draw_rows, has_rule, may_draw, raise_empty
from tdserve.torchrl.table_rows import to_path

_AUTOMATIC_KEYS: tuple[Path, ...] = (("collector", "traj_ids"), ("episode",))
"""Where TorchRL looks for the number of a trajectory if no key is given, in this order."""


class TableSliceSampler(SliceSampler):
    """Stands for ``SliceSampler`` with ``strict_length``. Of all places where a slice begins each has the same
    probability; TorchRL first chooses a trajectory, however long it is. What the server cannot do (``span``,
    ``fragmented``, ``pad_output``, several ``end_keys``, shorter slices) is drawn in this process."""

    def choose_rule(self, keys: Collection[Path]) -> TableRule | None:
        """Returns the sampler for a new table whose rows have these keys; None if slices are drawn in this process."""
        is_plain = not (self.fragmented or any(self.span) or self.pad_output or self.end_keys or self.compile)
        if not is_plain or not self.strict_length or "static-stop-and-length" in self._cache:
            return None
        trajectory = _find_automatic_key(keys) if self._traj_key_auto else self.traj_key
        trajectory = None if trajectory is None else to_path(trajectory)
        trajectory = trajectory if trajectory in keys else None
        end = None if trajectory is not None or self.end_key is None else to_path(self.end_key)
        if (trajectory or end) not in keys:
            return None
        return Slices(self.slice_len, self.num_slices, end_key=end, trajectory_key=trajectory)

    def sample(self, storage: Any, batch_size: int) -> tuple[tuple[torch.Tensor, ...], dict[Any, Any]]:
        """Draws slices, one after the other."""
        if not may_draw(storage):
            raise_empty(storage, batch_size)
        if self._traj_key_auto:
            self._choose_traj_key(storage.list_keys())
        if not has_rule(storage, self):
            return super().sample(storage, batch_size)
        length, num_slices = self._adjusted_batch_size(batch_size)
        try:
            index, rows = draw_rows(storage, batch_size, timeout_s=None if storage.waits else 0.0)[::2]
        except DeadlineExceededError:  # there is no slice of this length, for which TorchRL has an error of its own
            return super().sample(storage, batch_size)
        info = self._mark_ends(rows, length)
        self._maybe_emit_init_marker(info, rows, num_slices, length, None)
        return (index,), info

    def _choose_traj_key(self, keys: Collection[Path]) -> None:
        """Chooses the key by which trajectories are told apart, as TorchRL does when it first draws."""
        found = _find_automatic_key(keys)
        self._traj_key_auto, self._fetch_traj = False, found is not None
        if found is not None:
            self.traj_key = found[0] if len(found) == 1 else found

    def _mark_ends(self, rows: Any, length: int) -> dict[Any, Any]:
        """Returns the flags that TorchRL adds: the last row of each slice is truncated."""
        if self.truncated_key is None:
            return {}
        truncated = torch.zeros((len(rows), 1), dtype=torch.bool)
        truncated[length - 1 :: length] = True
        *parents, _ = to_path(self.truncated_key)
        done = rows.get((*parents, "done"), None)
        terminated = rows.get((*parents, "terminated"), None)
        return {
            self.truncated_key: truncated,
            (*parents, "done"): truncated.clone() if done is None else done | truncated,
            (*parents, "terminated"): torch.zeros_like(truncated) if terminated is None else terminated,
        }


def _find_automatic_key(keys: Collection[Path]) -> Path | None:
    return next((key for key in _AUTOMATIC_KEYS if key in keys), None)
