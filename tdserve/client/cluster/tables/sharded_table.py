"""Tables that several servers share: rows are written, read by number, changed and deleted."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import methodcaller
from typing import Any, TypeVar

import numpy as np
import torch

from tdserve.base.deadline import Deadline
from tdserve.base.errors import (
    TDServeError,
)
from tdserve.base.ids import make_client_id
from tdserve.client.cluster.servers.cluster_servers import ClusterServers
from tdserve.client.cluster.servers.part_errors import note_elsewhere
from tdserve.client.cluster.stores.divisions import TableDivision
from tdserve.client.cluster.stores.part_creation import check_answers
from tdserve.client.cluster.stores.sharded_store import ShardedStore
from tdserve.client.cluster.tables.key_shards import KeyShards
from tdserve.client.cluster.tables.shard_writes import ShardWrites
from tdserve.client.cluster.tables.sharded_rows import ShardedRows
from tdserve.client.cluster.tables.sharded_writer import ShardedWriter
from tdserve.client.content.outer_modes import leave_modes_in_calls
from tdserve.client.content.padding import Pad
from tdserve.client.content.row_choice import choose_rows, count_rows
from tdserve.client.handles.coerce import coerce_value
from tdserve.client.handles.key_paths import NO_DEFAULT, check_path
from tdserve.client.session.calls.awaitable_future import AwaitableFuture
from tdserve.client.session.calls.call_deadline import within
from tdserve.client.session.calls.call_traces import gather_spans
from tdserve.client.session.catalog.description import StoreDescription
from tdserve.client.tables.conditional_update import check_values
from tdserve.client.tables.extends.given_rows import GivenRows
from tdserve.client.tables.row_annotations import RowAnnotations
from tdserve.client.tables.row_arguments import (
    flatten_row_dims,
    spread_generations,
    to_row_numbers,
    to_whole_generations,
)
from tdserve.client.tables.rows_by_number import get_keys
from tdserve.client.tables.table_counts import TableCounts
from tdserve.client.tables.table_policy import report_policy
from tdserve.client.tables.writers.writer import ReplayWriter
from tdserve.rules.placement import PlacementRecord
from tdserve.rules.replay.settings import Settings
from tdserve.structure.building.array_views import to_arrays
from tdserve.structure.captures.array_dicts import read_rows
from tdserve.structure.captures.captured import Captured
from tdserve.structure.trees.tree import Path, Spec

_Result = TypeVar("_Result")


@leave_modes_in_calls
class ShardedTable(ShardedStore):
    """A table that several servers share. The number of a row names its shard: shard ``number // part_capacity``.

    A call that changes rows of several shards changes those of each together, and not those of all.

    Attributes:
        capacity: Rows of all parts.
        part_capacity: Rows of each.
        spec: Structure of one row.
        settings: Sampler, remover and limiter of the whole table.
    """

    def __init__(self, cluster: ClusterServers, name: str, placement: PlacementRecord, *, deadline: Deadline) -> None:
        super().__init__(cluster, name, placement, TableDivision(placement.part_capacity), deadline=deadline)
        self._rows = ShardedRows(self, is_array=cluster.numpy)
        self._writes = ShardWrites(cluster, self)
        self.capacity, self.part_capacity = self._rows.capacity, self._rows.part_capacity
        now = Settings.from_json(self.parts.first.settings)
        self.settings = replace(Settings.from_json(placement.settings), sampler=now.sampler)
        self._key_shards = KeyShards(placement.shard_by, self.spec, self.num_shards)

    @property
    def spec(self) -> Spec:
        """See the class; as of the last answers, since rows may get leaves."""
        known = [handle.spec for handle in self.parts.list_open()]
        return max(known, key=lambda spec: len(spec.leaf_paths), default=self.parts.first.spec)

    _make_deadline = ShardedStore.make_deadline

    # ------------------------------------------------------------ figures

    @property
    def address(self) -> str:
        """Address of the cluster."""
        return self._cluster.address

    @property
    def wait_s(self) -> float:
        """Default of every call that can wait, seconds."""
        return self._cluster.timeout_s

    def _get_timeout_s(self, timeout_s: float | None) -> float:
        return self._cluster.timeout_s if timeout_s is None else timeout_s

    def _show(self, numbers: torch.Tensor) -> Any:
        return to_arrays(numbers) if self._cluster.numpy else numbers

    def __len__(self) -> int:
        """Returns the number of live rows of all shards that answer."""
        return sum(self._rows.ask_lengths(self.make_deadline(None)).values())

    def measure_length(self) -> int:
        """Returns the number of rows that are live or being overwritten, of all shards that answer. See
        ``TableHandle.measure_length``."""
        counts = self._rows.ask_counts(self.make_deadline(None))
        return sum(each.rows + each.overwritten for each in counts.values())

    def check_key(self, path: Path, deadline: Deadline) -> None:
        """Raises KeyNotFoundError if rows have no leaf or nested part of this path."""
        self.ask_any_part(methodcaller("check_key", path, deadline), deadline)

    def counts(self) -> TableCounts:
        """Returns live rows and inserts as of the last answers to this handle, without a request."""
        known = [handle.counts() for handle in self.parts.list_open()]
        return TableCounts(sum(each.rows for each in known), sum(each.inserts for each in known))

    def info(self) -> dict[str, Any]:
        """Returns figures of the table, as in ``ShardedStore.info``, with ``shard_by``, () without, and
        ``on_shard_loss``."""
        placement = self.placement
        return {**super().info(), "shard_by": placement.shard_by, "on_shard_loss": placement.on_shard_loss}

    def _describe_parts(self) -> dict[int, StoreDescription]:
        def describe(shard: int, part: Any) -> StoreDescription:
            report_policy(part._client, part.name, self.settings.policy, kind=part._kind)
            return self._describe_part(shard)

        return self.ask_parts(range(self.num_shards), describe)

    # ------------------------------------------------------------ writes

    @gather_spans
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
        """Writes rows; arguments, results and errors as in ``TableHandle.extend``.

        Without ``shard_by`` all rows of a writer go to one shard, and become visible together: which one depends on
        ``writer`` and, if that is 0, on the handle. With it the rows of each shard become visible together.

        Raises:
            ConnectError: The shard does not answer, and the table was created with ``on_shard_loss="raise"``. Nothing
                was written; with ``shard_by`` nothing to this shard: the error names others that were written before.
            ShardLostError: The shard's server has lost it, and rows do not go to another one. Likewise.
            PeerLostError: The shard stopped answering after rows were sent to it, which it may have stored: they go to
                no other one.
        """
        options, deadline = {"writer": writer, "return_early": return_early}, self.make_deadline(timeout_s)
        annotations = RowAnnotations(priority, ends, writer, policy_version)
        if not self.placement.shard_by:
            shard = self.choose_shard(writer)
            given = {name: getattr(annotations, name) for name in ("priority", "ends", "policy_version")}
            return self._writes.write(
                shard, deadline, lambda part: part.extend(batch, flatten=flatten, **given, **options)
            )
        rows = read_rows(batch, self.spec, store=self.name) if isinstance(batch, (dict, list)) else batch
        by_key = GivenRows.read(rows, annotations, self.spec, self.settings.sampler, flatten=flatten, store=self.name)
        if not by_key.num_rows:
            return self._writes.write(0, deadline, lambda part: part.extend(rows, **options))
        return self._extend_by_key(by_key, options, deadline)

    def _extend_by_key(self, batch: GivenRows, options: dict[str, Any], deadline: Deadline) -> Any:
        """Writes each row to the shard of its key."""
        rows, annotations, num_rows = batch.batch, batch.annotations, batch.num_rows
        annotations.check_lengths(num_rows)
        shards = self._key_shards.choose(rows)
        places: list[torch.Tensor] = []
        written, wanted = [], np.unique(shards).tolist()
        self._writes.check_not_lost(wanted)
        for shard in wanted:
            where = torch.from_numpy(np.flatnonzero(shards == shard))
            given = {
                name: select_rows(getattr(annotations, name), where, num_rows)
                for name in ("priority", "ends", "policy_version")
            }
            extend: Any = partial(_extend_part, rows=choose_rows(rows, where), options={**options, **given})
            try:
                written.append(self._writes.write(shard, deadline, extend))
            except TDServeError as error:
                num_done, shards_done = sum(len(where) for where in places), wanted[: len(places)]
                done = f"{num_done} of {num_rows} rows, those of shards {shards_done}, are written" if places else ""
                raise note_elsewhere(error, done, shards_done)  # noqa: B904 (it is this one, or says more)
            places.append(where)

        def join(numbers: Sequence[Any]) -> Any:
            joined = torch.full((num_rows,), -1, dtype=torch.int64)
            for where, some in zip(places, numbers, strict=True):
                joined[where] = torch.as_tensor(some)
            return self._show(batch.restore(joined))

        return AwaitableFuture.gather(written, join) if options["return_early"] else join(written)

    def extend_captured(
        self, captured: Sequence[Captured], annotations: RowAnnotations, timeout_s: float | None = None
    ) -> Any:
        """Writes rows that a writer has captured, all together; see ``TableHandle.extend_captured``."""
        return self.extend_shard(self.choose_shard(annotations.writer), captured, annotations, timeout_s)

    def extend_shard(
        self, shard: int, captured: Sequence[Captured], annotations: RowAnnotations, timeout_s: float | None
    ) -> Any:
        """Writes captured rows to a shard, or to another while its server does not answer."""
        deadline = self.make_deadline(timeout_s)
        return self._writes.write(shard, deadline, lambda part: part.extend_captured(captured, annotations))

    def writer(self, batch: int = 64, **options: Any) -> ReplayWriter | ShardedWriter:
        """Returns a writer of single rows, which all go to one shard, or each to that of its key; arguments as in
        ``ReplayWriter``."""
        timeout_s = options.get("timeout_s")
        if not self.placement.shard_by:
            shard = self.choose_shard(0, salt=make_client_id())
            return ReplayWriter(_WriterShard(self, shard, timeout_s), batch=batch, **options)

        def make_writer(shard: int) -> ReplayWriter:
            return ReplayWriter(_WriterShard(self, shard, timeout_s), batch=batch, **options)

        return ShardedWriter(self.name, self._key_shards.choose_one, make_writer)

    def choose_shard(self, writer: int, *, salt: bytes = b"") -> int:
        """Returns the shard of a writer: the same one as long as this handle exists."""
        return self._writes.choose_shard(writer, salt=salt)

    # ------------------------------------------------------------ changes

    def set_at_(
        self, key: Any, value: Any, index: Any, *, timeout_s: float | None = None, return_early: bool = False
    ) -> Any:
        """Writes a leaf or nested part of live rows; arguments and errors as in ``TableHandle.set_at_``."""
        path, num_rows = check_path(key), len(to_row_numbers(index, table=self.name))
        deadline = self.make_deadline(timeout_s)
        self.check_key(path, deadline)
        # Fitted to all rows: what a value means does not depend on how many of them a server has.
        fitted = coerce_value(
            flatten_row_dims(value, index),
            self.spec.with_batch(0, (num_rows,)).select([path], store=self.name),
            at=path,
            store=self.name,
            is_whole=True,
            allow_pickle=self._cluster.allow_pickle,
            is_exact=False,
        )

        def write() -> None:
            def change(part: Any, rows: Any, where: torch.Tensor) -> None:
                part.set_at_(path, fitted.choose(where), rows)

            self._rows.change(index, deadline, change, done="written")

        return self._cluster.run_later(write, deadline) if return_early else write()

    def update_if_present(
        self,
        index: Any,
        values: Any,
        *,
        generation: Any = None,
        is_unchanged: bool = False,
        timeout_s: float | None = None,
    ) -> Any:
        """Writes leaves of rows that are still the same; arguments, result and errors as in
        ``TableHandle.update_if_present``. Those of each shard are written together."""
        num_rows, generations = len(to_row_numbers(index)), to_whole_generations(index, generation)
        check_values(values, num_rows, self.spec, store=self.name)
        deadline = self.make_deadline(timeout_s)
        written = torch.zeros(num_rows, dtype=torch.bool)

        def change(part: Any, rows: Any, where: torch.Tensor) -> None:
            found = part.update_if_present(
                rows, choose_rows(values, where), generation=generations[where.numpy()], is_unchanged=is_unchanged
            )
            written[where] = torch.as_tensor(found)

        self._rows.change(index, deadline, change, done="written")
        return self._show(written)

    def delete(self, index: Any, *, generation: Any = None, timeout_s: float | None = None) -> int:
        """Deletes rows, those of each shard together; returns their number. See ``TableHandle.delete``."""
        deadline, num_rows = self.make_deadline(timeout_s), len(to_row_numbers(index))
        generations = spread_generations(generation, num_rows)

        def delete(part: Any, rows: Any, where: torch.Tensor) -> int:
            return int(part.delete(rows, generation=select_rows(generations, where, num_rows)))

        return sum(self._rows.change(index, deadline, delete, done="deleted"))

    def clear(self, *, reset_counts: bool = False, timeout_s: float | None = None) -> int:
        """Deletes all rows; returns how many there were. See ``TableHandle.clear``."""
        deadline = self.make_deadline(timeout_s)
        found = self._ask_every(lambda _, part: part.clear(reset_counts=reset_counts), deadline)
        return sum(found.values())

    def close(self, *, timeout_s: float | None = None) -> None:
        """Closes the table for writers; see ``TableHandle.close``.

        Raises:
            ConnectError, ShardLostError: A shard was not closed; the others were. ``info()["is_closed"]`` stays False
                until the same call, made again, has closed it too.
        """
        self._ask_every(lambda _, part: part.close(), self.make_deadline(timeout_s))

    def add_leaves(self, like: Any, *, timeout_s: float | None = None) -> None:
        """Adds leaves to the rows of all shards; arguments and errors as in ``TableHandle.add_leaves``.

        What is read of several shards at once has the leaves that all of these have: readers see the new ones when the
        last of the shards has them.

        Raises:
            ConnectError: A server does not answer. Nothing was changed; or, if it was lost only now, or has no room,
                other shards have the leaves, and the same call completes it later.
        """
        deadline = self.make_deadline(timeout_s)
        with within(deadline):
            check_answers(self._cluster.members, self.name, self.placement)
        self._ask_every(lambda _, part: part.add_leaves(like), deadline)

    def set_sampler(self, sampler: Any, *, timeout_s: float | None = None) -> None:
        """Changes parameters of the sampler; see ``TableHandle.set_sampler``."""
        settings = self.settings.with_sampler(sampler)
        self._ask_every(lambda _, part: part.set_sampler(sampler), self.make_deadline(timeout_s))
        self.settings = settings

    def set_limiter(self, limiter: Any, *, timeout_s: float | None = None) -> None:
        """Replaces the limiter of each shard by its part of this one; see ``TableHandle.set_limiter``.

        Other handles continue with the ``min_size`` with which the table was created.
        """
        settings = self.settings.with_limiter(limiter)
        settings.check(self.capacity)
        part_limiter = limiter.make_part(self.num_shards)
        self._ask_every(lambda _, part: part.set_limiter(part_limiter), self.make_deadline(timeout_s))
        self.settings = settings

    def _ask_every(self, call: Callable[[int, Any], _Result], deadline: Deadline) -> Mapping[int, _Result]:
        """Calls every part. Raises ConnectError if one does not answer in time; the others have done it."""

        def explain_done(shards: list[int]) -> str:
            return f"shards {shards} of {self.name!r} have done it; the same call, made again, completes it"

        return self.ask_each(range(self.num_shards), call, deadline=deadline, explain_done=explain_done)

    # ------------------------------------------------------------ rows by number

    def explain_done(self, done: str, num_rows: Mapping[int, int], shards: Collection[int]) -> str:
        """Returns what has happened to the rows of some shards while others did not answer, and what to do.

        Args:
            done: What has happened to the rows.
            num_rows: Rows of the call by shard.
            shards: Where it has happened.
        """
        return self._rows.explain_done(done, num_rows, shards)

    def __getitem__(self, index: Any) -> Any:
        """Reads live rows by number, also by negative ones; see ``TableHandle.__getitem__``. A slice or mask stands for
        the live rows one after the other, those of the first shard first."""
        found = self._rows.read(index, self.make_deadline(None))
        return to_arrays(found) if self._cluster.numpy else found

    def get_at(
        self,
        key: str | Path | list[Any],
        index: Any,
        default: Any = NO_DEFAULT,
        *,
        pad: Pad = None,
        timeout_s: float | None = None,
    ) -> Any:
        """Reads some keys of live rows; see ``TableHandle.get_at``."""

        def read(paths: Sequence[Path]) -> Any:
            found = self._rows.read(index, deadline, paths, pad=pad)
            return to_arrays(found) if self._cluster.numpy else found

        deadline = self.make_deadline(timeout_s)
        return get_keys(read, key, default, store=self.name)

    def get_with_generations(self, index: Any) -> tuple[Any, Any]:
        """Reads live rows and their generations; see ``TableHandle.get_with_generations``."""
        numbers, deadline = to_row_numbers(index), self.make_deadline(None)
        generations = self._rows.find_generations(numbers, deadline)
        rows = self._rows.read(numbers if np.ndim(index) else int(numbers[0]), deadline)
        found = generations if np.ndim(index) else generations[0]
        return (to_arrays(rows), to_arrays(found)) if self._cluster.numpy else (rows, found)

    def find_generations(self, index: Any) -> Any:
        """Returns the generations of rows, -1 for those that are not live; see ``TableHandle.find_generations``."""
        return self._show(self._rows.find_generations(to_row_numbers(index), self.make_deadline(None)))

    def __getitems__(self, indices: Sequence[int]) -> Any:
        return self._rows.read(list(indices), self.make_deadline(None))

    def __iter__(self) -> Iterator[Any]:
        """Yields the live rows of one shard after the other, of those that answer."""
        for shard in self._rows.ask_lengths(self.make_deadline(None)):
            yield from self.parts.get_part(shard)


class _WriterShard:
    """What a writer of single rows sees of the table: the shard that it keeps to.

    Args:
        timeout_s: Timeout of the writer's calls, and of opening a part of the table.
    """

    def __init__(self, table: ShardedTable, shard: int, timeout_s: float | None) -> None:
        part = table.get_any_part(table.make_deadline(timeout_s))  # the shard's own server may not answer
        self.name, self.capacity, self.spec, self.settings = table.name, part.capacity, table.spec, part.settings
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


def _extend_part(part: Any, *, rows: Any, options: dict[str, Any]) -> Any:
    return part.extend(rows, **options)


def select_rows(given: Any, where: torch.Tensor, num_rows: int) -> Any:
    """Returns what belongs to some of the rows, of annotations that are given for each row or for all."""
    if given is None or isinstance(given, (str, bytes, int, float, bool)):
        return given
    return choose_rows(given, where) if count_rows(given) == num_rows != 1 else given
