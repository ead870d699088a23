"""Datasets that several servers share: each has a block of the rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tdserve.base.deadline import Deadline
from tdserve.base.errors import InvalidRequestError, KeyNotFoundError, SelectionError
from tdserve.base.integers import check_integer
from tdserve.client.client import Client
from tdserve.client.cluster.servers.cluster_servers import ClusterServers
from tdserve.client.cluster.stores.divisions import DatasetDivision
from tdserve.client.cluster.stores.joined_rows import check_range, join_rows
from tdserve.client.cluster.stores.part_creation import create_parts
from tdserve.client.cluster.stores.sharded_store import ShardedStore
from tdserve.client.content.devices import resolve_device
from tdserve.client.content.outer_modes import leave_modes_in_calls
from tdserve.client.content.padding import Pad, pad_built
from tdserve.client.content.row_choice import choose_rows
from tdserve.client.datasets.dataset import add_index, check_index_free, iter_rows
from tdserve.client.datasets.epoch_batches import EpochBatches, plan_epoch
from tdserve.client.handles.coerce import coerce_value
from tdserve.client.handles.key_paths import to_path
from tdserve.rules.placement import PlacementRecord, name_part
from tdserve.structure.building.array_views import to_arrays
from tdserve.structure.tensors.plain_tensors import to_host
from tdserve.structure.trees.nodes import Entry, TensorLeaf
from tdserve.structure.trees.tree import Path

CreatePart = Callable[[Client, str, slice], Any]
"""Creates the part of some rows at its server, under a name."""


def create_sharded_dataset(
    cluster: ClusterServers, name: str, servers: tuple[int, ...], num_rows: int, create: CreatePart, *, exists_ok: bool
) -> None:
    """Creates a dataset of several servers; see ``ClusterClient.memmap_like``."""
    num_rows = check_integer("batch_size", num_rows, 0)
    if num_rows < len(servers):
        reason = f"{num_rows} rows cannot be divided among {len(servers)} servers, of which each has at least one"
        raise InvalidRequestError(argument="shards", reason=reason)
    placement = PlacementRecord("dataset", servers, capacity=num_rows)
    bounds = DatasetDivision(placement).bounds

    def create_part(shard: int, client: Client) -> None:
        create(client, name_part(name, shard), slice(int(bounds[shard]), int(bounds[shard + 1])))

    create_parts(cluster, name, placement, create_part, exists_ok=exists_ok)


@leave_modes_in_calls
class ShardedDataset(ShardedStore):
    """A tensordict whose rows several servers share; calls for rows and leaves as in :class:`tdserve.StoreHandle`.

    Each part has consecutive rows, as many as every other or one more. A call reads or writes the rows of one part as
    of one moment, and those of several at the same time. While a server does not answer, calls that need its rows raise
    ConnectError.

    Attributes:
        bounds: The first row of each part, and the number of all rows.
        spec: Structure of the first part.
    """

    def __init__(self, cluster: ClusterServers, name: str, placement: PlacementRecord, *, deadline: Deadline) -> None:
        self._division = DatasetDivision(placement)
        super().__init__(cluster, name, placement, self._division, deadline=deadline)
        self.bounds = self._division.bounds
        self.spec = self.parts.first.spec

    def ask_part(self, shard: int, call: Callable[[Any], Any], deadline: Deadline | None = None) -> Any:
        """Calls a part; see ``ShardedStore.ask_part``. A handle of a part follows a store that was made anew, and what
        has read rows of one with others is not returned."""

        def call_checked(part: Any) -> Any:
            self._check_rows(shard, part)
            try:
                return call(part)
            finally:
                self._check_rows(shard, part)

        return super().ask_part(shard, call_checked, deadline)

    def _check_rows(self, shard: int, part: Any) -> None:
        if not self._division.has_rows(shard, part.spec.batch_size):
            raise self.parts.make_anew_error()

    @property
    def batch_size(self) -> torch.Size:
        """Batch size of the whole."""
        return torch.Size((len(self), *self.spec.batch_size[1:]))

    shape = batch_size

    def __len__(self) -> int:
        """Returns the number of rows."""
        return self.placement.capacity

    def keys(self, include_nested: bool = False, leaves_only: bool = False, *, sort: bool = False) -> list[str | Path]:
        """Lists the keys; arguments as in ``TensorDict.keys``."""
        return self.list_part_keys(self.make_deadline(None), include_nested, leaves_only, sort=sort)

    def __contains__(self, key: object) -> bool:
        path = to_path(key)
        return path is not None and path in {to_path(each) for each in self.keys(include_nested=True)}

    # ------------------------------------------------------------ reading

    def __getitem__(self, index: Any) -> Any:
        """Reads a leaf or nested part by its key, or rows: a number, a slice, a mask, or a list of numbers."""
        if to_path(index) is not None:
            return self.get(index)
        found = self._read(index, self.make_deadline(None))
        return to_arrays(found) if self._cluster.numpy else found

    def __getitems__(self, indices: Sequence[int]) -> Any:
        """Reads rows in one call to each server, for a ``DataLoader``."""
        return self._read(list(indices), self.make_deadline(None))

    def __iter__(self) -> Iterator[Any]:
        """Yields row after row."""
        nbytes = self.spec.nbytes * self.num_shards
        return iter_rows(lambda rows: self._read(rows, self.make_deadline(None)), len(self), nbytes)

    def get(self, key: str | Path, *, timeout_s: float | None = None) -> Any:
        """Reads a leaf or nested part of all rows."""
        return self.get_at(key, slice(None), timeout_s=timeout_s)

    def get_at(self, key: str | Path, index: Any, *, timeout_s: float | None = None) -> Any:
        """Reads a leaf or nested part of some rows."""
        path = self._to_path(key)
        self.spec.find(path, store=self.name)
        found = self._gather(index, lambda part, rows: part.snapshot_at(path, rows), self.make_deadline(timeout_s))
        return to_arrays(found) if self._cluster.numpy else found

    def _to_path(self, key: Any) -> Path:
        path = to_path(key)
        if path is None:
            raise KeyNotFoundError(store=self.name, key=str(key))
        return path

    def to_tensordict(self, *, pad: Pad = None, timeout_s: float | None = None) -> Any:
        """Reads all rows; ``pad`` as in ``StoreHandle.to_tensordict``."""
        found = self._gather(slice(None), lambda part, _: part.to_tensordict(), self.make_deadline(timeout_s))
        return pad_built(found, pad, self.spec)

    def batches(
        self,
        num_rows: int,
        *,
        sampler: Any = None,
        epoch: int = 0,
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = False,
        start: int = 0,
        prefetch: int = 4,
        with_index: bool = False,
        device: Any = None,
        pad: Pad = None,
        numpy: bool | None = None,
        timeout_s: float | None = None,
    ) -> EpochBatches:
        """Returns an iterator over a reader's part of an epoch; arguments and errors as in ``StoreHandle.batches``."""
        self.make_deadline(timeout_s)  # refuses an invalid timeout
        client = self._cluster.members.get(self.placement.servers[0])
        is_numpy_wanted = client.is_numpy_wanted(numpy, device)
        plan = plan_epoch(
            len(self), num_rows, sampler=sampler, epoch=epoch, rank=rank, world_size=world_size, drop_last=drop_last
        )
        if with_index:
            check_index_free(self.name, self.list_part_keys(self.make_deadline(timeout_s)))

        def read(rows: Any) -> Any:
            found = pad_built(self._read(rows, self.make_deadline(timeout_s)), pad, self.spec)
            found = add_index(found, rows) if with_index else found
            return to_arrays(found) if is_numpy_wanted else found

        return EpochBatches(self.name, read, plan, start=start, prefetch=prefetch, device=resolve_device(device))

    def _read(self, index: Any, deadline: Deadline) -> Any:
        return self._gather(index, lambda part, rows: part._read_rows(rows), deadline)

    def _gather(self, index: Any, read: Callable[[Any, Any], Any], deadline: Deadline) -> Any:
        numbers, shape = self._list_numbers(index)
        where = self._split(numbers)

        def act(shard: int, part: Any) -> Any:
            return read(part, self._to_local(numbers[where[shard]], shard))

        found = self.ask_each(where, act, deadline=deadline)
        if not found:
            return _shape(self.ask_part(0, lambda part: read(part, slice(0, 0)), deadline), shape)
        shards = sorted(found)
        rows = join_rows([found[shard] for shard in shards])
        places = np.concatenate([where[shard] for shard in shards])
        if np.any(np.diff(places) < 0):
            rows = choose_rows(rows, torch.from_numpy(np.argsort(places)))
        return _shape(rows, shape)

    # ------------------------------------------------------------ writing

    def __setitem__(self, index: Any, value: Any) -> None:
        """Replaces rows, by a tensordict of as many or of one; not a whole leaf: see ``set_at_``."""
        if to_path(index) is not None:
            raise InvalidRequestError(argument="index", reason=f"set {index!r} by rows: set_at_(key, value, rows)")
        deadline = self.make_deadline(None)
        self._scatter(index, value, (), lambda part, rows, values: part.__setitem__(rows, values), deadline)

    def set_at_(self, key: str | Path, value: Any, index: Any, *, timeout_s: float | None = None) -> ShardedDataset:
        """Writes a leaf or nested part of some rows; a value without a dimension for them is meant for each."""
        path, deadline = self._to_path(key), self.make_deadline(timeout_s)
        self._scatter(index, value, path, lambda part, rows, values: part.set_at_(key, values, rows), deadline)
        return self

    def _scatter(
        self, index: Any, value: Any, path: Path, write: Callable[[Any, Any, Any], Any], deadline: Deadline
    ) -> None:
        """Writes a value to the parts of its rows.

        Args:
            path: Key of what is written; () is whole rows.
        """
        numbers, shape = self._list_numbers(index)
        where = self._split(numbers)
        spec = self.spec.with_rows(len(numbers)) if shape else self.spec.with_batch(1, ())
        value = _flatten(value, shape, self.spec.find(path, store=self.name))
        # Fitted to all rows: what a value means does not depend on how many of them a server has.
        fitted = coerce_value(
            value,
            spec.select([path], store=self.name) if path else spec,
            at=path,
            store=self.name,
            is_whole=bool(path),
            allow_pickle=self._cluster.allow_pickle,
        )

        def act(shard: int, part: Any) -> None:
            places = where[shard]
            if not shape:
                write(part, int(numbers[0] - self.bounds[shard]), fitted)
            else:
                write(part, self._to_local(numbers[places], shard), fitted.choose(_to_slice(places)))

        self.ask_each(where, act, deadline=deadline)

    # ------------------------------------------------------------ numbers

    def _list_numbers(self, index: Any) -> tuple[NDArray[np.int64], tuple[int, ...]]:
        """Returns the numbers of the rows that an index selects, and its shape. Raises SelectionError."""
        index, before, after = _unwrap(index)
        if before or after:
            numbers, shape = self._list_numbers(index)
            return numbers, (*(1,) * before, *shape, *(1,) * after)
        if _is_flag(index):
            numbers = np.arange(len(self) if index else 0)
            return numbers, (int(bool(index)), len(self))
        if isinstance(index, slice) or index is Ellipsis:
            numbers = np.arange(len(self))[slice(None) if index is Ellipsis else index]
            return numbers, numbers.shape
        given = _to_array(index)
        if given.dtype == np.bool_ and given.shape == (len(self),):
            numbers = np.flatnonzero(given)
            return numbers, numbers.shape
        if given.dtype.kind not in "iu" and given.size:
            reason = f"{str(index)[:80]} is neither row numbers nor a mask of {len(self)} rows"
            raise SelectionError(selection=f"of dataset {self.name!r}", reason=reason)
        numbers = np.asarray(given, np.int64).reshape(-1)
        numbers = np.where((numbers < 0) & (numbers >= -len(self)), numbers + len(self), numbers)
        check_range(numbers, len(self), f"dataset {self.name!r}")
        return numbers, given.shape

    def _split(self, numbers: NDArray[np.int64]) -> dict[int, NDArray[np.int64]]:
        """Returns the positions of the rows of each part among some row numbers."""
        shards = np.searchsorted(self.bounds, numbers, side="right") - 1
        return {int(shard): np.flatnonzero(shards == shard) for shard in np.unique(shards)}

    def _to_local(self, numbers: NDArray[np.int64], shard: int) -> Any:
        return _to_slice(numbers - self.bounds[shard])


def _unwrap(index: Any) -> tuple[Any, int, int]:
    """Returns the index of the rows, and how many dimensions of size 1 ``None`` adds before and after theirs, as with
    torch; beside the index an ellipsis selects nothing.

    Raises:
        InvalidRequestError: There are several indices.
    """
    given = index if isinstance(index, tuple) else (index,)
    items = [item for item in given if item is not Ellipsis]
    chosen = [item for item in items if item is not None]
    has_dims = len(chosen) < len(items)
    if len(chosen) > 1 or len(given) - len(items) > 1 or (has_dims and chosen and _is_flag(chosen[0])):
        remedy = "give one index of rows, and index what is read further"
        raise InvalidRequestError(argument="index", reason=f"{index!r}: a shared dataset has one dimension: {remedy}")
    places = [place for place, item in enumerate(given) if item is not None]
    of_rows = next((place for place in places if given[place] is not Ellipsis), places[0] if places else len(given))
    before = sum(item is None for item in given[:of_rows])
    return chosen[0] if chosen else slice(None), before, len(items) - len(chosen) - before


def _is_flag(index: Any) -> bool:
    """Returns whether an index is one bool, which stands for all rows or none, in a dimension more."""
    return isinstance(index, bool) or (isinstance(index, torch.Tensor) and index.dtype == torch.bool and not index.ndim)


def _flatten(value: Any, shape: tuple[int, ...], entry: Entry) -> Any:
    """Returns a value of rows with one dimension for them, where it has several as their index; another as it is."""
    row_shape = (entry.shape if isinstance(entry, TensorLeaf) else entry.batch_size)[1:]
    if len(shape) < 2 or getattr(value, "is_nested", False) or getattr(value, "shape", ()) != (*shape, *row_shape):
        return value
    return value.reshape(-1, *row_shape)


def _shape(rows: Any, shape: tuple[int, ...]) -> Any:
    """Returns rows, or a leaf of them, in the shape of their index."""
    return rows[0] if shape == () else rows if len(shape) == 1 else rows.reshape(*shape, *rows.shape[1:])


def _to_array(index: Any) -> NDArray[Any]:
    return np.asarray(to_host(index))


def _to_slice(numbers: NDArray[np.int64]) -> Any:
    """Returns a slice if the numbers are consecutive: rows of a slice are copied at once."""
    is_run = (
        len(numbers) > 0 and int(numbers[-1]) - int(numbers[0]) == len(numbers) - 1 and np.all(np.diff(numbers) == 1)
    )
    return slice(int(numbers[0]), int(numbers[-1]) + 1) if is_run else torch.from_numpy(numbers)
