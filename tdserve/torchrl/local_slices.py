"""Slices that a sampler draws in this process: by the keys that divide the rows, of rows that stay the same.

TorchRL takes the places of ``storage[:]`` for row numbers. Where rows have left a table they are not: then a storage is
shown with all its places, and those without a live row belong to no slice.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import torch

from tdserve.base.errors import SelectionError
from tdserve.structure.trees.tree import Path
from tdserve.torchrl.table_rows import from_table, to_path


class Division(NamedTuple):
    """The rows that were divided into slices.

    Attributes:
        generations: Generations of the row of each number; -1 where none is live.
        is_full: Whether the ring has begun again.
        cursor: Number of the newest row.
        num_inserts: Rows that had ever been written before they were read.
    """

    generations: torch.Tensor
    is_full: bool
    cursor: int | None
    num_inserts: int

    @property
    def is_live(self) -> torch.Tensor:
        """Which numbers have a live row."""
        return self.generations >= 0


class NarrowStorage:
    """Stands for a storage while its rows are divided: only the keys that divide them are read. Threads: safe.

    Args:
        storage: A ``TDServeStorage`` that has a table.
        numbers: Keys of numbers of trajectories and steps, as the table has them.
        ends: Keys of flags that are set on the last row of a trajectory.
    """

    def __init__(self, storage: Any, numbers: tuple[Path, ...], ends: tuple[Path, ...]) -> None:
        self._whole = storage
        self._keys = *numbers, *ends
        self._ends = ends
        self._read = threading.local()

    @property
    def division(self) -> Division:
        """The rows of the last whole read in this thread."""
        found: Division = self._read.division
        return found

    @property
    def _is_full(self) -> bool:
        return self.division.is_full

    @property
    def _last_cursor_index(self) -> int | None:
        return self.division.cursor

    def __len__(self) -> int:
        return len(self.division.generations)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)

    def __getitem__(self, index: Any) -> Any:
        return self.get(index)

    def get(self, index: Any) -> Any:
        """Reads the keys of rows by number; a slice stands for all rows.

        Of all rows, flags of the end are also set where the next row is not the next one of the same writer.
        """
        if not isinstance(index, slice):
            return from_table(self._whole.require_table().read_rows(index, self._keys))
        before, table = self._whole.count_inserts(), self._whole.require_table()
        rows, numbers, generations = table.read_numbered(index, self._keys)
        # They may have changed since they were read: those rows cannot be drawn, see DrawnSlices.
        sequences = torch.from_numpy(table.find_sequences(numbers.numpy()))
        begins = (sequences & 1 == 1) & bool(self._ends)
        by_age = numbers[sequences.argsort()]
        num_new = min(self._whole.count_inserts() - before, len(rows))
        # Of rows that came while the others were read it is not known which there are: none of them is shown.
        by_age, hidden = by_age[: len(rows) - num_new], by_age[len(rows) - num_new :]
        cursor = int(by_age[-1]) if len(by_age) else None
        size, is_full = len(rows), before >= self._whole.max_size
        has_all = not size or int(numbers[-1]) == size - 1
        if has_all and not num_new and (not is_full or size in (0, self._whole.max_size)):
            self._read.division = Division(generations, is_full, cursor, before)
            return from_table(_separate(rows, begins.roll(-1), begins & False, self._ends))
        max_size = self._whole.max_size
        shown = torch.full((max_size,), -1, dtype=torch.int64)
        shown[numbers] = generations
        shown[hidden] = -1
        if not is_full:
            shown = shown[: int(numbers[-1]) + 1]
        self._read.division = Division(shown, is_full, cursor, before)
        places = torch.zeros(max_size, dtype=torch.int64)
        places[numbers] = torch.arange(size)
        places = places[: len(shown)]
        is_dead = shown < 0
        is_last = is_dead | (begins[places] | is_dead).roll(-1)
        return from_table(_separate(rows[places], is_last, is_dead, self._ends))

    def keep_live(self, slices: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Returns the first and last places and lengths of slices, without those of places that have no live row."""
        is_kept = self.division.is_live[slices[0][:, 0].cpu()].to(slices[0].device)
        return slices if is_kept.all() else tuple(each[is_kept] for each in slices)


class DrawnSlices:
    """Stands for a storage while the rows that were drawn are read, once.

    Args:
        storage: The ``TDServeStorage``.
        division: By which they were drawn; None if they were divided at another time.
    """

    def __init__(self, storage: Any, division: Division | None) -> None:
        self._whole = storage
        self._division = division
        self._found: tuple[Any, torch.Tensor] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)

    def __getitem__(self, index: Any) -> Any:
        """Reads rows by number.

        Raises:
            SelectionError: They are not those that were divided, or not live.
        """
        (numbers,) = index if isinstance(index, tuple) else (index,)
        numbers = numbers.cpu()
        rows, generations = self._whole.require_table().read_with_generations(numbers.numpy())
        if self._division is not None and not generations.equal(self._division.generations[numbers]):
            raise SelectionError(selection="of slices", reason="rows were written after they had been drawn")
        self._found = from_table(rows), generations
        return self._found[0]

    def hold_for(self, index: tuple[torch.Tensor, ...]) -> None:
        """Keeps the rows for the buffer, which asks for them next."""
        if self._found is not None:
            self._whole.hold(index[0], *self._found)


def _separate(rows: Any, is_last: torch.Tensor, is_dead: torch.Tensor, ends: tuple[Path, ...]) -> Any:
    """Changes keys by which rows are divided.

    Args:
        rows: Rows with these keys.
        is_last: Rows where a slice must end: flags of the end are set on them.
        is_dead: Rows that are not live: the number of their trajectory becomes one that no other row has.
        ends: Keys of such flags.
    """
    for path, leaf in rows.items(True, True):
        if to_path(path) in ends:
            leaf[is_last] = True
        elif is_dead.any():
            unused = leaf.max() + 1 + torch.arange(int(is_dead.sum()), dtype=leaf.dtype)
            leaf[is_dead] = unused.reshape(-1, *(1,) * (leaf.ndim - 1)).expand(-1, *leaf.shape[1:])
    return rows
