"""``TDServeStorage``: a storage of TorchRL whose rows, cursor and length are those of a table on a server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import TensorDictReplayBuffer
from torchrl.data.replay_buffers.storages.base import Storage

from tdserve.base.errors import InvalidRequestError, SelectionError, WrongStateError
from tdserve.client.client import Client
from tdserve.client.tables.conditional_update import NOT_LIVE
from tdserve.client.tables.replay import ReplayHandle
from tdserve.rules.replay.samplers.sampler import Sampler as TableRule
from tdserve.structure.trees.tree import Path
from tdserve.torchrl.conditional_updates import ConditionalUpdates, to_names
from tdserve.torchrl.local_slices import Division, DrawnSlices, NarrowStorage
from tdserve.torchrl.shared_table import SharedTable
from tdserve.torchrl.table_checkpointer import TableCheckpointer
from tdserve.torchrl.table_edits import TableEdits
from tdserve.torchrl.table_rows import (
    complete_rows,
    from_table,
    iter_parts,
    pair_rows,
    to_path,
    to_stored_key,
)
from tdserve.torchrl.table_samplers import to_table_sampler
from tdserve.torchrl.table_writer import to_table_writer
from tdserve.torchrl.torchrl_private import (
    allow_missing_trees,
    divide_by_columns,
    get_pending_parts,
    route_key_writes,
    set_pending_parts,
)

allow_missing_trees()

PRIORITY_KEY = "_priority"
"""Where the state of a storage has priorities."""

MAX_TRIES = 10
"""Reads of all rows and their priorities, or draws of slices, while others write."""


class TDServeStorage(Storage):
    """The rows of a replay buffer in a table of a tdserve server, which all processes share by its name.

    It stands where ``LazyMemmapStorage`` stood, in ``ReplayBuffer``, ``TensorDictReplayBuffer`` and
    ``TensorDictPrioritizedReplayBuffer``. The buffer's sampler and writer are replaced when it is made: the server
    draws the rows, numbers them and has their priorities. Samplers that the server does not have draw in this process,
    and the storage reads the rows that they name. Transforms, prefetching and the batch size stay TorchRL's.

    Pickled by address and name. Threads: safe.

    Args:
        max_size: Rows.
        address: ``host:port`` of the server, or a client of it. None takes the server that the environment names, as
            ``tdserve.connect`` does; nothing is started.
        name: Name of the table. An existing one is joined.
        like: One row, or the environment, collector or spec whose rows are written, see ``Client.row_like``; None: the
            first rows that are written define the keys.
        missing: What later rows have at keys that they lack: ``"zeros"``, or ``"late"``: nothing yet. Such a row is
            drawn once it has all keys, see ``ReplayHandle.set_at_``. At keys that only later rows have brought,
            ``ReplayHandle.add_leaves``, all others have zeros.
        **table: Further arguments of ``Client.create_replay``, for a table that does not exist yet. With ``sampler=``
            a buffer without a sampler draws by this one.

    Raises:
        InvalidRequestError: There is no address, an argument is invalid, or the table has another size.
    """

    supports_conditional_update = True
    _default_checkpointer = TableCheckpointer

    def __init__(
        self,
        max_size: int,
        *,
        address: str | Client | None = None,
        name: str,
        like: Any = None,
        missing: str = "zeros",
        **table: Any,
    ) -> None:
        super().__init__(max_size)
        if missing not in ("zeros", "late"):
            raise InvalidRequestError(argument="missing", reason=f"{missing!r} is neither 'zeros' nor 'late'")
        self.device = torch.device("cpu")
        self._own_rule: TableRule | None = table.get("sampler")
        self._fills = missing == "zeros"
        self._table = SharedTable(address, name, self.max_size, like=like, fills=self._fills, options=table)
        self._held = threading.local()
        self._narrowed: dict[tuple[tuple[Path, ...], ...], NarrowStorage] = {}
        self._num_written = 0

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.max_size}, name={self._table.name!r}, rows={len(self)})"

    # ------------------------------------------------------------ the table

    @property
    def table(self) -> ReplayHandle | None:
        """The handle of the table; None as long as there is none."""
        return self._table.find()

    @property
    def table_name(self) -> str:
        """Name of the table."""
        return self._table.name

    @property
    def waits(self) -> bool:
        """Whether samples of an empty table wait for rows, since a limiter was chosen."""
        return self._table.waits

    @property
    def initialized(self) -> bool:
        """Whether the table exists."""
        return self.table is not None

    def require_table(self) -> ReplayHandle:
        """Returns the handle of the table.

        Raises:
            WrongStateError: It does not exist yet.
        """
        table = self.table
        if table is None:
            raise WrongStateError(state=f"the table {self.table_name!r} has never had a row", event="reading rows")
        return table

    def attach(self, buffer: Any) -> None:
        """Called by a buffer before it makes its parts: replaces its sampler and its writer."""
        super().attach(buffer)
        if isinstance(buffer, TensorDictReplayBuffer):
            self._table.keeps_index = False
        sampler, writer = get_pending_parts(buffer)
        sampler = to_table_sampler(sampler, own_rule=self._own_rule)
        set_pending_parts(buffer, sampler, to_table_writer(writer))
        edits = TableEdits(buffer, self)
        buffer.set_at_, buffer.set_, buffer.update_ = edits.set_at_, edits.set_, edits.update_
        buffer.update_if_present = ConditionalUpdates(self, buffer).update_if_present
        choose = getattr(sampler, "choose_rule", None)
        if choose is not None and self._own_rule is None:
            self._table.choose_rule = choose
        self._table.open()

    def list_keys(self) -> list[Path]:
        """Lists the keys of the table's rows."""
        spec = self.require_table().spec
        return [path for path, _ in (*spec.tensors, *spec.values)]

    def has_key(self, key: Any) -> bool:
        """Returns whether the table's rows have this key of a leaf; False before the first row."""
        return self.initialized and to_path(to_stored_key(key)) in self.list_keys()

    def narrow(self, keys: Iterable[Any], ends: Iterable[Any] = ()) -> Any:
        """Returns this storage, as it is read for some of TorchRL's keys; itself if the rows have none of them. The
        same keys give the same object: TorchRL keeps what it has found by the storage.

        Args:
            keys: Those that have numbers; None is ignored.
            ends: Those that have flags of the ends of trajectories.
        """
        numbers, flags = (
            tuple(to_path(to_stored_key(key)) for key in each if key is not None and self.has_key(key))
            for each in (keys, ends)
        )
        found = numbers, flags
        return self._narrowed.setdefault(found, NarrowStorage(self, *found)) if any(found) else self

    def note_division(self, division: Division) -> None:
        """Notes by which rows a sampler is going to draw slices in this thread."""
        self._held.division = division

    def read_drawn(self, division: Division | None) -> DrawnSlices:
        """Returns this storage, as the rows of slices that were drawn in this thread are read.

        Args:
            division: By which they were drawn, if that is older than the draw.
        """
        return DrawnSlices(self, self._held.__dict__.get("division") or division)

    def draw_whole(self, draw: Callable[[], Any]) -> Any:
        """Returns what ``draw`` returns: slices of rows that are still those that were divided when they are read.

        While others write rows, it draws again, up to ``MAX_TRIES`` times.
        """
        num_left = MAX_TRIES
        while True:
            num_left -= 1
            try:
                return draw()
            except Exception as error:
                if not num_left or not self._has_changed(error):
                    raise
            finally:
                self._held.division = None

    def _has_changed(self, error: Exception) -> bool:
        """Returns whether an error of a draw may come from rows that were written since they were divided."""
        division = self._held.__dict__.get("division")
        is_older = division is not None and self.count_inserts() != division.num_inserts
        return is_older or isinstance(error, SelectionError)

    def list_buffers(self) -> list[Any]:
        """Lists the buffers of this process that were made with this storage."""
        return list(self._attached_entities)

    def count_inserts(self) -> int:
        """Returns how many rows were ever written, by all processes."""
        table = self.table
        if table is None:
            return 0
        len(table)  # asks for the counts
        return table.counts().inserts

    # ------------------------------------------------------------ rows

    def __len__(self) -> int:
        table = self.table
        return 0 if table is None else table.measure_length()

    def extend(self, data: Any, priority: torch.Tensor | None = None) -> torch.Tensor:
        """Writes rows behind the newest; returns their numbers. Without priorities they have the highest so far."""
        index = self._table.extend(data, priority)
        self._num_written += len(index)
        self._set_last_cursor(index)
        self._bump_mutation_revision()
        return index

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Writes rows over live ones; those with a number from the length on are written behind the newest.

        Live rows keep what they have at keys that ``data`` lacks.

        Args:
            cursor: Row numbers, a slice or a mask.
            data: Rows, or one row for one number.
            set_cursor: Whether rows may be new. Otherwise all of them must be live.

        Raises:
            SelectionError: A row that must be live is not. Others may have been written.
            InvalidRequestError: There are more or fewer rows than numbers. Nothing was written.
        """
        num_rows = len(self)
        index, batch = pair_rows(
            cursor, data, num_rows=num_rows, capacity=self.max_size, keeps_index=self._table.keeps_index
        )
        is_new = index >= num_rows if set_cursor else torch.zeros_like(index, dtype=torch.bool)
        if is_new.any():
            order = index[is_new].argsort()
            self.extend(batch[is_new][order])
        if not is_new.all():
            self._overwrite(index[~is_new], batch[~is_new])
        self._bump_mutation_revision()

    def overwrite(self, key: Any, value: Any, numbers: torch.Tensor) -> None:
        """Writes a key of live rows, in one write; the value is broadcast.

        Raises:
            SelectionError: A row is not live. Nothing was written.
        """
        if len(numbers):
            self.require_table().set_at_(to_stored_key(key), value, numbers)
            self._bump_mutation_revision()

    def _overwrite(self, index: torch.Tensor, batch: Any) -> None:
        table = self.require_table()
        rows = complete_rows(batch, table, fills=False)
        for path, value in iter_parts(rows, table.spec):
            table.set_at_(path, value, index)

    def hold(self, index: torch.Tensor, rows: Any, generations: torch.Tensor) -> None:
        """Keeps the rows that a sampler has drawn, and their generations, for the ``get`` that follows in this
        thread."""
        self._held.drawn = (index, rows, generations)

    def find_generations(self, index: torch.Tensor) -> torch.Tensor:
        """Returns what identifies rows as long as they are the same rows: numbers, -1 for rows that are not live."""
        drawn = self._held.__dict__.get("drawn")
        if drawn is not None and drawn[0] is index:
            return to_names(drawn[2])
        table = self.table
        if table is None:
            return torch.full(index.shape, NOT_LIVE)
        is_number = (index >= 0) & (index < self.max_size)
        found = torch.full(index.shape, NOT_LIVE)
        found[is_number] = to_names(table.find_generations(index[is_number]))
        return found

    def note_written(self) -> None:
        """Notes that leaves of rows were written."""
        self._bump_mutation_revision()

    def get(self, index: Any) -> Any:
        """Reads rows by number, or a slice of the live rows."""
        index = index[0] if isinstance(index, tuple) and len(index) == 1 else index
        drawn = self._held.__dict__.pop("drawn", None)
        if drawn is not None and drawn[0] is index:
            return drawn[1]
        index = torch.tensor(list(index)) if isinstance(index, range) else index
        return from_table(self.require_table()[index])

    def list_numbers(self, among: slice = slice(None)) -> torch.Tensor:
        """Lists the numbers of the live rows that ``storage[among]`` has."""
        table, num_rows = self.table, len(self)  # asks for the counts
        if table is None or self._has_kept_all(table, num_rows):
            return torch.arange(num_rows)[among]
        leaf = min(table.spec.tensors, key=lambda each: each[1].nbytes, default=None)
        path = table.spec.leaf_paths[0] if leaf is None else leaf[0]
        _, numbers, _ = table.read_numbered(among, (path,))
        return numbers

    def _has_kept_all(self, table: ReplayHandle, num_rows: int) -> bool:
        """Returns whether no row was deleted, by the counts of the last look: the rows are the first numbers."""
        return num_rows == min(table.counts().inserts, self.max_size)

    def contains(self, item: Any) -> Any:
        """Returns whether a row number is live; of a tensor of numbers a tensor of answers. Negative ones count from
        the length.
        """
        is_one = not isinstance(item, torch.Tensor)
        numbers = torch.tensor(int(item)) if is_one else item.cpu().long()
        table, num_rows = self.table, len(self)  # asks for the counts
        numbers = torch.where(numbers < 0, numbers + num_rows, numbers)
        if table is None or self._has_kept_all(table, num_rows):
            found = (numbers >= 0) & (numbers < num_rows)
        else:
            found = self.find_generations(numbers) != NOT_LIVE
        return bool(found) if is_one else found

    def clear(self, *, resets_counts: bool) -> None:
        """Deletes all rows.

        Args:
            resets_counts: Whether the number of rows that were ever written begins at 0 again.
        """
        table = self.table
        if table is not None:
            table.clear(reset_counts=resets_counts)
        self._num_written = 0 if resets_counts else self._num_written
        self._set_last_cursor(None)
        self._bump_mutation_revision()

    def _empty(self) -> None:
        self.clear(resets_counts=False)

    # ------------------------------------------------------------ read by samplers that draw in this process

    @property
    def _mutation_revision(self) -> int:
        """A number that changes with the rows, also when others write them."""
        return int(super()._mutation_revision) + self.count_inserts()

    @property
    def shape(self) -> torch.Size:
        """The length, as in TorchRL's storages of tensors; while slices are drawn, how many numbers were divided."""
        division = self._held.__dict__.get("division")
        return torch.Size([len(self) if division is None else len(division.generations)])

    @property
    def _total_shape(self) -> torch.Size:
        return torch.Size([self.max_size])

    @property
    def _len_along_dim0(self) -> int:
        return len(self)

    @property
    def _last_cursor_index(self) -> int | None:
        """Number of the newest row. As long as other processes write none it is known; else rows are counted."""
        num_inserts = self.count_inserts()
        if num_inserts == self._num_written:
            known: int | None = super()._last_cursor_index
            return known
        return (num_inserts - 1) % self.max_size if num_inserts else None

    # ------------------------------------------------------------ checkpoints

    def read_by_age(self) -> tuple[Any, torch.Tensor | None]:
        """Returns all rows, the oldest first, and their priorities if the table has some; (None, None) without rows.

        Raises:
            SelectionError: Again and again others have overwritten rows before their priorities were read.
        """
        for number in range(MAX_TRIES):
            if not len(self):
                break
            table = self.require_table()
            num_inserts = self.count_inserts()
            rows, index, _ = table.read_numbered()
            by_age = torch.from_numpy(table.find_sequences(index.numpy())).argsort()
            try:
                priority = table.get_priorities(index) if table.settings.uses_priority else None
            except SelectionError:
                if number + 1 == MAX_TRIES:
                    raise
                continue
            if self.count_inserts() != num_inserts and number + 1 < MAX_TRIES:
                continue  # what has come in the meantime would have the age of new rows, and the content of old ones
            return from_table(rows[by_age]), None if priority is None else priority[by_age]
        return None, None

    def replace_rows(self, rows: Any, priority: torch.Tensor | None = None) -> None:
        """Replaces all rows by others, the oldest first.

        Args:
            rows: The rows; None: there are none.
            priority: Priority of each row; None, or for a table without priorities: all rows are equal.

        Raises:
            SpecMismatchError, InvalidRequestError: They do not fit. Nothing was replaced.
        """
        if rows is not None:
            table = self._table.open(rows)
            priority = priority if table is not None and table.settings.uses_priority else None
            self._table.check(rows, priority)
        self.clear(resets_counts=True)
        if rows is not None:
            self.extend(rows, priority)

    def state_dict(self) -> dict[str, Any]:
        """Returns all rows, the oldest first, their number, and their priorities if the table has some."""
        rows, priority = self.read_by_age()
        is_td = isinstance(rows, TensorDictBase)
        stored = {} if rows is None else rows.state_dict() if is_td else rows
        state = {"_storage": stored, "initialized": self.initialized, "_len": 0 if rows is None else len(rows)}
        return state if priority is None else {**state, PRIORITY_KEY: priority}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Replaces all rows by those of a state, of this storage or of one of TorchRL's."""
        stored, num_rows = state_dict["_storage"], state_dict["_len"]
        if not isinstance(stored, torch.Tensor):
            stored = TensorDict().load_state_dict(stored, strict=False) if num_rows else None
        self.replace_rows(None if not num_rows else stored[:num_rows], state_dict.get(PRIORITY_KEY))

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        del state["_held"], state["_narrowed"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "_held": threading.local(), "_narrowed": {}})


route_key_writes(TDServeStorage)
divide_by_columns(TDServeStorage)
