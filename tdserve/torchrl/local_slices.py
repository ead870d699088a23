"""Slices that a sampler draws in this process: by the keys that divide the rows, of rows that stay the same.

TorchRL takes the places of ``storage[:]`` for row numbers. Where rows have left a table they are not: then a storage is
shown with all its places, and those without a live row belong to no slice.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import torch

from tdserve.base.errors import SelectionError
from tdserve.structure.tree import Path
from tdserve.torchrl.table_rows import from_table


class Division(NamedTuple):
    """The rows that were divided into slices.

    Attributes:
        generations: Of the row of each number; -1 where none is live.
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
        keys: Those to read, as the table has them.
    """

    def __init__(self, storage: Any, keys: tuple[Path, ...]) -> None:
        self._whole = storage
        self._keys = keys
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
        """Reads the keys of rows by number; a slice stands for all rows."""
        if not isinstance(index, slice):
            return from_table(self._whole.require_table().read_rows(index, self._keys))
        before = self._whole.count_inserts()
        cursor = self._whole.find_cursor(before)
        rows, numbers, generations = self._whole.require_table().read_numbered(index, self._keys)
        num_new = self._whole.count_inserts() - before
        size, is_full = len(rows), before >= self._whole.max_size
        has_all = not size or int(numbers[-1]) == size - 1
        if has_all and not num_new and (not is_full or size in (0, self._whole.max_size)):
            self._read.division = Division(generations, is_full, cursor, before)
            return from_table(rows)
        max_size = self._whole.max_size
        shown = torch.full((max_size,), -1, dtype=torch.int64)
        shown[numbers] = generations
        # Rows that came while the others were read: it is not known which are the newest.
        shown[(torch.arange(min(num_new, max_size)) + before) % max_size] = -1
        if not is_full:
            shown = shown[: int(numbers[-1]) + 1]
        self._read.division = Division(shown, is_full, cursor, before)
        places = torch.zeros(max_size, dtype=torch.int64)
        places[numbers] = torch.arange(size)
        places = places[: len(shown)]
        return from_table(_separate(rows[places], shown < 0))

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


def _separate(rows: Any, is_dead: torch.Tensor) -> Any:
    """Changes keys by which rows are divided, so that rows that are not live are slices of their own: a flag of the end
    is set on them and on the rows before them, and the number of a trajectory is one that no other row has."""
    ends = is_dead | is_dead.roll(-1)
    for leaf in rows.values(True, True):
        if leaf.dtype == torch.bool:
            leaf[ends] = True
        else:
            unused = leaf.max() + 1 + torch.arange(int(is_dead.sum()), dtype=leaf.dtype)
            leaf[is_dead] = unused.reshape(-1, *(1,) * (leaf.ndim - 1)).expand(-1, *leaf.shape[1:])
    return rows
