"""Tables that several servers share: rows are written, read by number, changed and deleted."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch

from tdserve.base.config import find_rank
from tdserve.base.deadline import Deadline
from tdserve.base.errors import (
    ConnectError,
    InvalidRequestError,
    NotSupportedError,
    SelectionError,
    TransportError,
)
from tdserve.base.ids import make_client_id
from tdserve.client.cluster.cluster_servers import ClusterServers
from tdserve.client.cluster.members import REACH_S
from tdserve.client.cluster.part_limiter import make_part_limiter
from tdserve.client.cluster.sharded_store import ShardedStore
from tdserve.client.session.awaitable_future import AwaitableFuture
from tdserve.client.session.reach import reach_within
from tdserve.client.tables.change_requests import is_batch, to_row_numbers
from tdserve.client.tables.row_annotations import RowAnnotations
from tdserve.client.tables.table_counts import TableCounts
from tdserve.client.tables.writer import ReplayWriter
from tdserve.rules.placement import PlacementRecord, hash_to_shard
from tdserve.rules.replay.settings import Settings
from tdserve.structure.array_dicts import read_rows
from tdserve.structure.array_views import to_arrays
from tdserve.structure.captured import Captured

_Result = TypeVar("_Result")


class ShardedTable(ShardedStore):
    """A table that several servers share. The number of a row names its shard: shard ``number // part_capacity``.

    A call that changes rows of several shards changes those of each together, and not those of all.

    Attributes:
        capacity: Rows of all parts.
        spec: Structure of one row.
        settings: Sampler, remover and limiter of the whole table.
    """

    def __init__(self, cluster: ClusterServers, name: str, placement: PlacementRecord, *, timeout_s: float) -> None:
        super().__init__(cluster, name, placement, timeout_s=timeout_s)
        now = Settings.from_json(self._first.settings)
        self.settings = replace(Settings.from_json(placement.settings), sampler=now.sampler)
        self.spec = self._first.spec
        self.part_capacity = self._first.capacity
        self.capacity = self.part_capacity * self.num_shards
        self._identity = (os.getpid(), make_client_id())
        self._counts: dict[int, TableCounts] = {}

    # ------------------------------------------------------------ figures

    def __len__(self) -> int:
        """Returns the number of live rows of all shards that answer."""
        found = self.ask_parts(range(self.num_shards), lambda _, part: (len(part), part.counts()))
        self._counts.update({shard: counts for shard, (_, counts) in found.items()})
        return sum(num_rows for num_rows, _ in found.values())

    def counts(self) -> TableCounts:
        """Returns live rows and inserts as of the last answers to this handle, without a request."""
        known = [handle.counts() for _, handle in self._handles.values()]
        return TableCounts(sum(each.rows for each in known), sum(each.inserts for each in known))

    # ------------------------------------------------------------ writes

    def extend(
        self,
        batch: Any,
        *,
        flatten: bool = False,
        priority: Any = None,
        ends: Any = None,
        writer: int = 0,
        policy_version: Any = None,
        timeout_s: float | None = None,
        return_early: bool = False,
    ) -> Any:
        """Writes rows; arguments, results and errors as of ``TableHandle.extend``.

        Without ``shard_by`` all rows of a writer go to one shard, and become visible together: which one depends on
        ``writer`` and, if that is 0, on the handle. With it the rows of each shard become visible together.

        Raises:
            ConnectError: The shard does not answer, and the table was created with ``on_shard_loss="raise"``. Nothing
                was written.
        """
        options = {
            "writer": writer,
            "timeout_s": self._get_timeout_s(timeout_s),
            "return_early": return_early,
        }
        annotations = RowAnnotations(priority, ends, writer, policy_version)
        if not self.placement.shard_by:
            shard = self.choose_shard(writer)
            given = {name: getattr(annotations, name) for name in ("priority", "ends", "policy_version")}
            return self._write(shard, lambda part: part.extend(batch, flatten=flatten, **given, **options))
        if flatten:
            raise InvalidRequestError(argument="flatten", reason="a table with shard_by takes rows in one dimension")
        rows = read_rows(batch, self.spec, store=self.name) if isinstance(batch, (dict, list)) else batch
        if tuple(rows.batch_size) == self.spec.batch_size:
            rows = rows.unsqueeze(0)
        return self._extend_by_key(rows, annotations, options)

    def _extend_by_key(self, rows: Any, annotations: RowAnnotations, options: dict[str, Any]) -> Any:
        """Writes each row to the shard of its key."""
        num_rows = rows.batch_size[0]
        shards = _hash_rows(rows.get(self.placement.shard_by), num_rows, self.num_shards)
        places, written = [], []
        for shard in np.unique(shards).tolist():
            where = torch.from_numpy(np.flatnonzero(shards == shard))
            given = {
                name: select_rows(getattr(annotations, name), where, num_rows)
                for name in ("priority", "ends", "policy_version")
            }
            places.append(where)
            selected = rows[where]
            written.append(self._write(shard, lambda part, td=selected, more=given: part.extend(td, **more, **options)))  # type: ignore[misc]

        def join(numbers: Sequence[Any]) -> Any:
            joined = torch.full((num_rows,), -1, dtype=torch.int64)
            for where, some in zip(places, numbers, strict=True):
                joined[where] = torch.as_tensor(some)
            return self._show(joined)

        return AwaitableFuture.gather(written, join) if options["return_early"] else join(written)

    def extend_captured(
        self, captured: Sequence[Captured], annotations: RowAnnotations, timeout_s: float | None = None
    ) -> Any:
        """Writes rows that a writer has captured, all together; see ``TableHandle.extend_captured``."""
        return self.extend_shard(self.choose_shard(annotations.writer), captured, annotations, timeout_s)

    def extend_shard(
        self, shard: int, captured: Sequence[Captured], annotations: RowAnnotations, timeout_s: float | None
    ) -> Any:
        """Writes captured rows to a shard, or as the table says while its server does not answer."""
        wait_s = self._get_timeout_s(timeout_s)
        return self._write(shard, lambda part: part.extend_captured(captured, annotations, wait_s))

    def writer(self, batch: int = 64, **options: Any) -> ReplayWriter:
        """Returns a writer of single rows, which all go to one shard; arguments as of ``ReplayWriter``.

        Raises:
            NotSupportedError: The table chooses the shard of a row by its key.
        """
        if self.placement.shard_by:
            reason = f"rows go to shards by {'.'.join(self.placement.shard_by)}; use extend()"
            raise InvalidRequestError(argument="writer", reason=reason)
        return ReplayWriter(_WriterShard(self, self.choose_shard(0, salt=make_client_id())), batch=batch, **options)

    def choose_shard(self, writer: int, *, salt: bytes = b"") -> int:
        """Returns the shard of a writer: the same one as long as this handle exists."""
        pid, identity = self._identity
        if pid != os.getpid():  # a forked child is another writer
            self._identity = os.getpid(), make_client_id()
            identity = self._identity[1]
        rank = find_rank()
        if not writer and not salt and rank is not None:
            return rank % self.num_shards
        return hash_to_shard(b"%d" % writer if writer else salt or identity, self.num_shards)

    def _write(self, shard: int, write: Callable[[Any], Any]) -> Any:
        """Writes to a part, or as the table says while its server does not answer; returns numbers of the whole table.

        Only an attempt of which nothing was sent is followed by one at another shard; one that goes on in the
        background is followed by none.
        """
        if self.placement.on_shard_loss == "wait":
            return self._shift(write(self.get_part(shard)), shard)
        failure: TransportError | None = None
        for number in [(shard + step) % self.num_shards for step in range(self.num_shards)]:
            server = self.placement.servers[number]
            if failure is not None and self.placement.on_shard_loss == "raise":
                break
            if self._cluster.members.is_lost(server) and not self._is_last(number):
                failure = failure or ConnectError(address=str(server), reason="it did not answer lately")
                continue
            try:
                with reach_within(REACH_S, is_for_unsent=True):
                    return self._shift(write(self.get_part(number)), number)
            except ConnectError as error:
                self._cluster.members.note_lost(server, error)
                self._note_left_out()
                failure = error
        raise failure or ConnectError(address=self.address, reason="there is no shard")

    def _is_last(self, shard: int) -> bool:
        return self.placement.on_shard_loss == "redirect" and not [each for each in self.list_live() if each != shard]

    def _shift(self, numbers: Any, shard: int) -> Any:
        """Returns the numbers of rows of a part in the whole table; those that were not stored stay -1."""
        offset = shard * self.part_capacity
        if isinstance(numbers, AwaitableFuture):
            return numbers.convert(lambda found: self._shift(found, shard))
        found = torch.as_tensor(numbers)
        return self._show(torch.where(found < 0, found, found + offset) if offset else found)

    def _show(self, numbers: torch.Tensor) -> Any:
        return to_arrays(numbers) if self._cluster.numpy else numbers

    def _get_timeout_s(self, timeout_s: float | None) -> float:
        return self._cluster.timeout_s if timeout_s is None else timeout_s

    @property
    def address(self) -> str:
        """Address of the cluster."""
        return self._cluster.address

    @property
    def wait_s(self) -> float:
        """Default of every call that can wait, seconds."""
        return self._cluster.timeout_s

    def get_any_part(self) -> Any:
        """Returns the handle of a part that was used; of the first that answers if none was."""
        for _, handle in self._handles.values():
            return handle
        return next(iter(self.ask_parts(range(self.num_shards), lambda _, part: part).values()))

    def make_deadline(self, timeout_s: float | None) -> Deadline:
        """Returns the deadline of a call."""
        return Deadline.after(self._get_timeout_s(timeout_s))

    # ------------------------------------------------------------ rows by number

    def split_numbers(self, index: Any) -> dict[int, torch.Tensor]:
        """Returns the positions of the rows of each shard among row numbers, or those of a batch.

        Raises:
            SelectionError: A number is out of range.
        """
        numbers = torch.from_numpy(np.asarray(to_row_numbers(index), np.int64).reshape(-1).copy())
        if len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) < self.capacity:
            reason = f"row numbers go from 0 to {self.capacity - 1}"
            raise SelectionError(selection=f"of table {self.name!r}", reason=reason)
        shards = numbers // self.part_capacity
        return {shard: torch.nonzero(shards == shard).flatten() for shard in torch.unique(shards).tolist()}

    def change_rows(self, index: Any, change: Callable[[Any, Any, torch.Tensor], _Result]) -> list[_Result]:
        """Changes rows at all their shards at the same time.

        Args:
            index: A sampled batch, or row numbers.
            change: Gets a part, the rows there (a batch with index and generation if there are generations), and their
                positions among all.

        Raises:
            TransportError: A shard does not answer. The rows of the others were changed.
        """
        numbers = torch.from_numpy(np.asarray(to_row_numbers(index), np.int64).reshape(-1).copy())
        generations = index.get("generation", None) if is_batch(index) else None
        where = self.split_numbers(index)

        def act(shard: int, part: Any) -> _Result:
            rows: Any = numbers[where[shard]] - shard * self.part_capacity
            if generations is not None:
                rows = {"index": rows, "generation": torch.as_tensor(generations).reshape(-1)[where[shard]]}
            return change(part, rows, where[shard])

        if not where:
            return []
        found = self.ask_parts(where, act, reach_s=self._cluster.timeout_s)
        missing = where.keys() - found.keys()
        if missing:
            raise ConnectError(address=self._cluster.address, reason=f"shards {sorted(missing)} do not answer")
        return list(found.values())

    def __getitem__(self, index: Any) -> Any:
        """Reads live rows by number; see ``TableHandle.__getitem__``. A slice or mask selects among the live rows,
        those of the first shard first."""
        found = self._read_live(index)
        return to_arrays(found) if self._cluster.numpy else found

    def __getitems__(self, indices: Sequence[int]) -> Any:
        return self._read_live(list(indices))

    def _read_live(self, index: Any) -> Any:
        if isinstance(index, slice) or index is Ellipsis or _is_mask(index):
            return self._read_selected(slice(None) if index is Ellipsis else index)
        shape = np.shape(index.detach().cpu() if hasattr(index, "detach") else index)
        where = self.split_numbers(index)
        numbers = torch.as_tensor(np.asarray(to_row_numbers(index), np.int64)).reshape(-1)

        def read(shard: int, part: Any) -> Any:
            return part.read_rows(numbers[where[shard]] - shard * self.part_capacity)

        found = self.ask_parts(where, read)
        if len(found) < len(where):
            missing = sorted(where.keys() - found.keys())
            raise ConnectError(address=self._cluster.address, reason=f"shards {missing} do not answer")
        positions = torch.cat([where[shard] for shard in found]) if found else torch.empty(0, dtype=torch.int64)
        joined = join_rows(list(found.values()))[torch.argsort(positions)]
        return joined[0] if shape == () else joined.reshape(*shape) if len(shape) != 1 else joined

    def _read_selected(self, index: Any) -> Any:
        """Reads rows by their places among all live ones: by slices and masks of the parts, which may grow."""
        if isinstance(index, slice) and index == slice(None):
            found = self.ask_parts(range(self.num_shards), lambda _, part: part.read_rows(slice(None)))
            return join_rows([found[shard] for shard in sorted(found)])
        lengths = self.ask_parts(range(self.num_shards), lambda _, part: len(part))
        every = np.arange(sum(lengths.values()))
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
                    rows = self.get_part(shard).read_rows(slice(int(local[0]), end if end >= 0 else None, step))
                else:
                    mask = np.zeros(lengths[shard], np.bool_)
                    mask[local] = True
                    rows = self.get_part(shard).read_rows(mask)
                parts.append(rows)
                order.append(where)
            begin += lengths[shard]
        if not parts:
            return self.get_part(shards[0]).read_rows(slice(0, 0))
        return join_rows(parts)[torch.as_tensor(np.argsort(np.concatenate(order)))]

    def __iter__(self) -> Iterator[Any]:
        """Yields the live rows of one shard after the other."""
        for shard in range(self.num_shards):
            yield from self.get_part(shard)

    # ------------------------------------------------------------ changes

    def set_at_(
        self, key: Any, value: Any, index: Any, *, timeout_s: float | None = None, return_early: bool = False
    ) -> Any:
        """Writes a leaf or nested part of live rows; arguments and errors as of ``TableHandle.set_at_``."""

        def write() -> None:
            num_rows = len(to_row_numbers(index))

            def change(part: Any, rows: Any, where: torch.Tensor) -> None:
                part.set_at_(key, select_rows(value, where, num_rows), rows, timeout_s=self._get_timeout_s(timeout_s))

            self.change_rows(index, change)

        return self._cluster.later(write) if return_early else write()

    def delete(self, index: Any, *, timeout_s: float | None = None) -> int:
        """Deletes rows, those of each shard together; returns their number. See ``TableHandle.delete``."""
        wait_s = self._get_timeout_s(timeout_s)
        return sum(self.change_rows(index, lambda part, rows, _: part.delete(rows, timeout_s=wait_s)))

    def clear(self, *, reset_counts: bool = False, timeout_s: float | None = None) -> int:
        """Deletes all rows; returns how many there were. See ``TableHandle.clear``."""
        wait_s = self._get_timeout_s(timeout_s)
        found = self._ask_every(lambda _, part: part.clear(reset_counts=reset_counts, timeout_s=wait_s))
        return sum(found.values())

    def close(self, *, timeout_s: float | None = None) -> None:
        """Closes the table for writers; see ``TableHandle.close``."""
        self._ask_every(lambda _, part: part.close(timeout_s=self._get_timeout_s(timeout_s)))

    def add_leaves(self, like: Any, *, timeout_s: float | None = None) -> None:
        """Raises NotSupportedError: the servers would not get the leaves at one moment, and samples join their rows."""
        feature = f"adding leaves to table {self.name!r}, which several servers share,"
        raise NotSupportedError(feature=feature, reason="create it with a like= that has all keys")

    def set_sampler(self, sampler: Any, *, timeout_s: float | None = None) -> None:
        """Changes parameters of the sampler; see ``TableHandle.set_sampler``."""
        settings = self.settings.with_sampler(sampler)
        self._ask_every(lambda _, part: part.set_sampler(sampler, timeout_s=self._get_timeout_s(timeout_s)))
        self.settings = settings

    def set_limiter(self, limiter: Any, *, timeout_s: float | None = None) -> None:
        """Replaces the limiter of each shard by its part of this one; see ``TableHandle.set_limiter``.

        Other handles go on with the ``min_size`` with which the table was created.
        """
        settings = self.settings.with_limiter(limiter)
        settings.check(self.capacity)
        part_limiter = make_part_limiter(limiter, self.num_shards)
        self._ask_every(lambda _, part: part.set_limiter(part_limiter, timeout_s=self._get_timeout_s(timeout_s)))
        self.settings = settings

    def _ask_every(self, call: Callable[[int, Any], _Result]) -> Mapping[int, _Result]:
        """Calls every part. Raises ConnectError if one does not answer in time; the others have done it."""
        found = self.ask_parts(range(self.num_shards), call, reach_s=self._cluster.timeout_s)
        missing = [shard for shard in range(self.num_shards) if shard not in found]
        if missing:
            raise ConnectError(address=self._cluster.address, reason=f"shards {missing} do not answer")
        return found


class _WriterShard:
    """What a writer of single rows sees of the table: the shard that it keeps to."""

    def __init__(self, table: ShardedTable, shard: int) -> None:
        part = table.get_part(shard)
        self.name, self.capacity, self.spec, self.settings = table.name, part.capacity, part.spec, part.settings
        self._client = part._client
        self._table, self._shard = table, shard

    def extend_captured(
        self, captured: Sequence[Captured], annotations: RowAnnotations, timeout_s: float | None = None
    ) -> Any:
        """Stores rows together."""
        return self._table.extend_shard(self._shard, captured, annotations, timeout_s)

    def info(self) -> dict[str, Any]:
        """Returns figures of the table."""
        return self._table.info()


def join_rows(parts: Sequence[Any]) -> Any:
    """Joins tensordicts of rows along their first dimension."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _is_mask(index: Any) -> bool:
    dtype = getattr(index, "dtype", None)
    return dtype in (torch.bool, np.bool_) or (isinstance(index, list) and bool(index) and isinstance(index[0], bool))


def select_rows(given: Any, where: torch.Tensor, num_rows: int) -> Any:
    """Returns what belongs to some of the rows, of something that is given for each row or for all."""
    if given is None or isinstance(given, (str, bytes, int, float, bool)):
        return given
    size = getattr(given, "shape", None)
    length = size[0] if size else len(given) if isinstance(given, (list, tuple)) else 0
    if length != num_rows or num_rows == 1:
        return given
    return [given[number] for number in where.tolist()] if isinstance(given, (list, tuple)) else given[where]


def _hash_rows(values: Any, num_rows: int, num_shards: int) -> Any:
    """Returns the shard of each row by its key."""
    if isinstance(values, torch.Tensor):
        found = np.ascontiguousarray(values.detach().cpu().numpy()).reshape(num_rows, -1)
        distinct, inverse = np.unique(found, axis=0, return_inverse=True)
        shards = np.array([hash_to_shard(row.tobytes(), num_shards) for row in distinct])
        return shards[inverse.reshape(-1)]
    listed = values.tolist() if hasattr(values, "tolist") else list(values)
    return np.array([hash_to_shard(repr(value).encode(), num_shards) for value in listed])
