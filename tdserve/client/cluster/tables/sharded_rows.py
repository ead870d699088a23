"""Rows of a table that several servers share, by their numbers: which part has them, and reads of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import is_leaf_nontensor

from tdserve.base.deadline import Deadline
from tdserve.base.errors import InvalidRequestError, SelectionError, TDServeError
from tdserve.client.cluster.stores.joined_rows import check_range, join_rows
from tdserve.client.cluster.stores.sharded_store import ShardedStore
from tdserve.client.content.padding import Pad, pad_built
from tdserve.client.content.row_choice import choose_rows
from tdserve.client.session.calls.call_conditions import may_repeat
from tdserve.client.session.calls.call_deadline import within
from tdserve.client.tables.row_arguments import is_batch, spread_generations, to_row_numbers
from tdserve.client.tables.shaped_rows import check_row_index, shape_rows
from tdserve.client.tables.table_counts import ask_counts
from tdserve.rules.lost_servers import PATIENCE_S
from tdserve.structure.tensors.plain_tensors import to_host
from tdserve.structure.trees.tree import Path
from tdserve.v1 import control_pb2

_Result = TypeVar("_Result")
_ReadPart = Callable[[Any, Any], Any]
"""Reads rows of a part by an index of its own."""


class ShardedRows:
    """Finds the rows of a shared table by number: shard ``number // part_capacity`` has the row. Threads: safe.

    Args:
        store: The parts, and calls to them.
        is_array: Whether rows are asked for by arrays, of a client of NumPy arrays.

    Attributes:
        capacity: Rows of all parts.
        part_capacity: Rows of each.
    """

    def __init__(self, store: ShardedStore, *, is_array: bool) -> None:
        self._store = store
        self._is_array = is_array
        self.part_capacity = store.placement.part_capacity
        self.capacity = self.part_capacity * store.num_shards

    def ask_lengths(self, deadline: Deadline) -> dict[int, int]:
        """Returns the live rows of each shard that answers."""
        return {shard: counts.rows for shard, counts in self.ask_counts(deadline).items()}

    def ask_counts(self, deadline: Deadline) -> dict[int, control_pb2.TableCounts]:
        """Returns the counts of each shard that answers."""

        def ask(_: int, part: Any) -> control_pb2.TableCounts:
            done = ask_counts(part._client, part.name, deadline.shorten(PATIENCE_S), kind=part._kind)
            return done.counts

        while True:
            try:
                return self._store.ask_parts(range(self._store.num_shards), ask, deadline=deadline)
            except TDServeError as error:  # a server is slow, or the store at rest
                if not may_repeat(error, deadline):
                    raise

    def split(self, index: Any) -> dict[int, torch.Tensor]:
        """Returns the positions of the rows of each shard among row numbers, or those of a batch.

        Raises:
            SelectionError: A number is out of range.
        """
        numbers = torch.from_numpy(np.asarray(to_row_numbers(index), np.int64).reshape(-1).copy())
        check_range(numbers.numpy(), self.capacity, f"table {self._store.name!r}")
        shards = numbers // self.part_capacity
        return {shard: torch.nonzero(shards == shard).flatten() for shard in torch.unique(shards).tolist()}

    def change(
        self,
        index: Any,
        deadline: Deadline,
        change: Callable[[Any, Any, torch.Tensor], _Result],
        *,
        done: str = "",
    ) -> list[_Result]:
        """Changes rows at all their shards at the same time.

        Args:
            index: A sampled batch, or row numbers.
            deadline: Deadline of the call; parts end by it without a timeout of their own.
            change: Gets a part, the rows there (a batch with index and generation if there are generations), and their
                positions among all.
            done: What then has happened to the rows, such as "deleted", for errors; "" if nothing was changed.

        Raises:
            InvalidRequestError: A batch has neither one generation for each row nor one for all. Nothing was changed.
            TransportError: A shard does not answer. The rows of the others were changed.
        """
        numbers = torch.from_numpy(np.asarray(to_row_numbers(index), np.int64).reshape(-1).copy())
        given = index.get("generation", None) if is_batch(index) else None
        generations = spread_generations(given, len(numbers))
        where = self.split(index)

        def act(shard: int, part: Any) -> _Result:
            rows: Any = numbers[where[shard]] - self._store.parts.division.get_first_row(shard)
            if generations is not None:
                rows = {"index": rows, "generation": torch.from_numpy(generations[where[shard].numpy()])}
            return change(part, rows, where[shard])

        if not where:
            return []

        def explain_done(shards: list[int]) -> str:
            return self.explain_done(done, {shard: len(rows) for shard, rows in where.items()}, shards) if done else ""

        return list(self._store.ask_each(where, act, deadline=deadline, explain_done=explain_done).values())

    def explain_done(self, done: str, num_rows: Mapping[int, int], shards: Collection[int]) -> str:
        """Returns what has happened to the rows of some shards while others did not answer, and what to do.

        Args:
            done: What has happened to the rows.
            num_rows: Rows of the call by shard.
            shards: Where it has happened.
        """
        num_done, whole = sum(num_rows[shard] for shard in shards), sum(num_rows.values())
        ends = [
            (shard * self.part_capacity, (shard + 1) * self.part_capacity) for shard in num_rows if shard not in shards
        ]
        others = " and ".join(f"{begin} to {end - 1}" for begin, end in sorted(ends))
        return (
            f"{num_done} of these {whole} rows were {done}, those of shards {sorted(shards)}; repeat it with the other "
            f"{whole - num_done} alone, whose index is {others}"
        )

    def find_generations(self, numbers: Any, deadline: Deadline) -> torch.Tensor:
        """Returns the generations of rows, -1 for those that are not live."""
        found = torch.full((len(numbers),), -1, dtype=torch.int64)

        def ask(part: Any, rows: Any, where: torch.Tensor) -> None:
            found[where] = torch.as_tensor(part.find_generations(rows))

        self.change(numbers, deadline, ask)
        return found

    def read(self, index: Any, deadline: Deadline, keys: Sequence[Path] = (), *, pad: Pad = None) -> Any:
        """Reads live rows, or these keys of them, by number; a slice or mask stands for those of one shard after the
        other."""
        shape, found = self._read_flat(index, keys, deadline)
        if pad is not None and not len(found):  # a lazy stack of no rows has no keys any more
            found = self._store.ask_any_part(lambda part: part.read_rows(slice(0, 0), keys, pad=pad), deadline)
        elif pad is not None:
            found = pad_built(found, pad, self._store.get_any_part(deadline).spec.prepend((1,)))
        return shape_rows(found, shape, store=self._store.name, is_array=self._is_array)

    def _read_flat(self, index: Any, keys: Sequence[Path], deadline: Deadline) -> tuple[tuple[int, ...] | None, Any]:
        """Returns the shape of row numbers, None if there are none, and the rows in one dimension."""

        def read_part(part: Any, local: Any) -> Any:
            return part.read_rows(local, keys)

        check_row_index(index, store=self._store.name)
        if isinstance(index, slice) or index is Ellipsis or _is_mask(index):
            return None, self._read_selected(slice(None) if index is Ellipsis else index, read_part, deadline)
        if isinstance(index, str):
            raise InvalidRequestError(argument="index", reason=f"{index!r} is neither row numbers nor a slice or mask")
        given = np.asarray(to_host(index))
        if given.dtype.kind not in "iu" and given.size:
            raise SelectionError(selection=f"of table {self._store.name!r}", reason=f"{index!r} names no rows")
        shape = given.shape
        index = self._count_from_end(given.reshape(-1), deadline)
        where = self.split(index)
        numbers = torch.from_numpy(index)

        def read(shard: int, part: Any) -> Any:
            asked = numbers[where[shard]]
            local = asked - self._store.parts.division.get_first_row(shard)
            try:
                return read_part(part, local)
            except SelectionError:
                gone = asked[torch.as_tensor(part.find_generations(local)) < 0].tolist()
                if not gone:  # written since
                    return read_part(part, local)
                others = f", nor are {len(gone) - 1} others" if gone[1:] else ""
                reason = f"this row of table {self._store.name!r} (shard {shard}) is not live now{others}"
                raise SelectionError(selection=str(gone[0]), reason=reason) from None

        if not where:
            return shape, self._store.ask_any_part(lambda part: read_part(part, slice(0, 0)), deadline)
        found = self._store.ask_each(where, read, deadline=deadline)
        positions = torch.cat([where[shard] for shard in found])
        return shape, choose_rows(_join_alike(list(found.values())), torch.argsort(positions))

    def _count_from_end(self, given: NDArray[Any], deadline: Deadline) -> NDArray[np.int64]:
        """Returns row numbers in place of negative ones, of which -1 is the live row with the highest number.

        Raises:
            ConnectError: A server does not answer that may have this row: another row would be meant without it.
            SelectionError: A negative number counts beyond row 0.
        """
        numbers, is_negative = given.astype(np.int64), given < 0  # a large unsigned number is not negative
        if not is_negative.any():
            return numbers
        num_numbers = self._find_last_live(deadline) + 1
        lowest = int(numbers.min())
        if lowest + num_numbers < 0:
            last = f"row {num_numbers - 1}" if num_numbers else "none"
            reason = f"negative numbers count from the last live row of table {self._store.name!r}, which is {last}"
            raise SelectionError(selection=str(lowest), reason=reason)
        return np.where(is_negative, numbers + num_numbers, numbers)

    def _find_last_live(self, deadline: Deadline) -> int:
        """Returns the highest number of a live row; -1 if there is none. Asks the servers of the last shards alone."""

        def find(part: Any) -> int:
            found = part.read_numbered(slice(-1, None))[1]
            if not len(found) and len(part):  # it was lost, or has left in the meantime
                found = torch.nonzero(torch.as_tensor(part.find_generations(np.arange(part.capacity))) >= 0).flatten()
            return int(found[-1]) if len(found) else -1

        for shard in reversed(range(self._store.num_shards)):
            last = self._store.ask_part(shard, find, deadline)
            if last >= 0:
                return self._store.parts.division.get_first_row(shard) + last
        return -1

    def _read_selected(self, index: Any, read_part: _ReadPart, deadline: Deadline) -> Any:
        """Reads rows by their places among all live ones: by slices and masks of the parts, which may grow."""
        if isinstance(index, slice) and index == slice(None):
            with within(deadline):
                found = self._store.ask_parts(
                    range(self._store.num_shards), lambda _, part: read_part(part, slice(None))
                )
            return _join_alike([found[shard] for shard in sorted(found)])
        lengths = self.ask_lengths(deadline)
        every = np.arange(sum(lengths.values()))
        if not isinstance(index, slice) and np.shape(index) != every.shape:
            reason = f"a mask of shape {list(np.shape(index))} stands for {len(every)} live rows"
            raise SelectionError(selection=f"of table {self._store.name!r}", reason=reason)
        chosen = every[index if isinstance(index, slice) else np.asarray(index)]
        shards = sorted(lengths)
        parts, order, begin = [], [], 0
        for shard in shards:
            where = np.flatnonzero((chosen >= begin) & (chosen < begin + lengths[shard]))
            if len(where):
                local = chosen[where] - begin
                step = int(local[1] - local[0]) if len(local) > 1 else 1
                if isinstance(index, slice):
                    end = int(local[-1]) + (1 if step > 0 else -1)
                    selected: Any = slice(int(local[0]), end if end >= 0 else None, step)
                else:
                    selected = np.zeros(lengths[shard], np.bool_)
                    selected[local] = True
                found = self._store.ask_part(
                    shard, partial(_read_places, lengths[shard], selected, read_part), deadline
                )
                parts.append(found)
                order.append(where[: len(found)])  # rows may have left since
            begin += lengths[shard]
        if not parts:
            return self._store.ask_part(shards[0], lambda part: read_part(part, slice(0, 0)), deadline)
        return choose_rows(_join_alike(parts), torch.from_numpy(np.argsort(np.concatenate(order))))


def _read_places(num_rows: int, selected: Any, read_part: _ReadPart, part: Any) -> Any:
    """Reads rows of a part by their places among its live rows, which are their numbers if no row has left it."""
    last = part.read_numbered(slice(-1, None))[1]
    if last.tolist() == [num_rows - 1]:
        return read_part(part, selected)
    every, places = read_part(part, slice(None)), np.arange(num_rows)[selected]
    return choose_rows(every, torch.from_numpy(places[places < len(every)]))


def _join_alike(parts: Sequence[Any]) -> Any:
    """Joins tensordicts of rows. Leaves that only some of them have got so far are left out."""
    leaves = [set(part.keys(True, True, is_leaf=is_leaf_nontensor)) for part in parts]
    common = set.intersection(*leaves)
    is_alike = all(len(each) == len(common) for each in leaves)
    return join_rows(parts if is_alike else [part.select(*common) for part in parts])


def _is_mask(index: Any) -> bool:
    dtype = getattr(index, "dtype", None)
    return dtype in (torch.bool, np.bool_) or (isinstance(index, list) and bool(index) and isinstance(index[0], bool))
