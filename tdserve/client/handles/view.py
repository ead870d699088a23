"""A view: some keys and rows of a store, perhaps rearranged, that are fetched when they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, is_non_tensor, is_tensor_collection

from tdserve.base.deadline import Deadline
from tdserve.base.errors import KeyNotFoundError, NotSupportedError, SpecMismatchError
from tdserve.client.content.devices import resolve_device, to_device
from tdserve.client.content.outer_modes import leave_modes_in_calls
from tdserve.client.content.padding import Pad, pad_built
from tdserve.client.datasets.dataset import iter_rows
from tdserve.client.handles.coerce import Manner, broadcast, is_none, is_unset_field
from tdserve.client.handles.key_paths import NO_DEFAULT, check_path, to_path
from tdserve.client.handles.local_values import to_local
from tdserve.client.handles.overwriting import check_whole_rows
from tdserve.client.handles.skeletons import Skeleton, get_skeleton
from tdserve.client.handles.store_client import StoreClient
from tdserve.client.handles.tensordict_calls import TensorDictCalls
from tdserve.client.handles.tensordict_names import REFUSED
from tdserve.client.handles.view_steps import (
    INDEX_STEP,
    KEY_STEPS,
    REPEATING_STEPS,
    SHAPE_STEPS,
    STACKING_STEPS,
    Dim,
    Grid,
    Step,
    compose_index,
    count_elements,
    make_grid,
    narrow_dims,
    spread,
)
from tdserve.client.session.catalog.structure_text import format_repr
from tdserve.messages.selection.dimension_names import select_names
from tdserve.messages.selection.items import split_index
from tdserve.messages.selection.selection import EVERYTHING, Selection, encode
from tdserve.messages.selection.torch_selection import to_torch_index
from tdserve.structure.tensordicts.entries import get_entry, put_in_order
from tdserve.structure.trees.nodes import count_dims
from tdserve.structure.trees.tree import Node, Path, Spec, ValueLeaf, quote, show


@leave_modes_in_calls
class StoreView(TensorDictCalls):
    """The result of ``select``, ``exclude``, ``view``, ``permute``, ``split``, ``flatten_keys`` ... of a store.

    It has the methods of a handle. Reading it is one read of the store, of the keys that are asked for. If the selected
    rows can be determined, only these are read, however the batch dimensions were rearranged. Writing into it writes
    into the store. Its keys are those that the store had when the view was made.
    Threads: safe.
    """

    def __init__(
        self,
        store: StoreClient,
        skeleton: Skeleton | None = None,
        dims: tuple[Dim, ...] | None = None,
        steps: tuple[Step, ...] = (),
    ) -> None:
        self._store = store
        self._shape = get_skeleton(store.spec) if skeleton is None else skeleton
        self._dims: tuple[Dim, ...] = tuple(map(range, store.spec.batch_size)) if dims is None else dims
        self._steps = steps
        self._spec = self._shape.make_spec()
        self._has_hollow = bool(steps) and bool(self._shape.list_hollow_nodes())

    @property
    def spec(self) -> Spec:
        """The structure of what the view shows."""
        return self._spec

    def __repr__(self) -> str:
        return format_repr(f"of store {self.name!r}", self.spec.root, kind="StoreView", device=self.device)

    def __enter__(self) -> StoreView:
        """Enters ``with store.view(...) as part:``, as for a local tensordict."""
        return self

    def __exit__(self, *_: object) -> None:
        """Does nothing: what was written into the view is in the store already."""

    # ------------------------------------------------------------------------------- reading

    def _read_item(self, index: Any) -> Any:
        path = to_path(index)
        if path is None:
            below = None
            inner = self._store.spec.root.inner
            if inner and not self._is_arranged:  # batch dimensions that only the elements have
                num_dims = len(self._shape.td.batch_size)
                index, below = split_index(index, num_dims, num_dims + len(inner))
            found = self._fetch((), index, self._store.make_deadline(None))
            return found if below is None else found[below]
        entry = self._read_entry(path, ..., NO_DEFAULT, self._store.make_deadline(None))
        return unwrap_leaf(entry) if isinstance(self.spec.find(path), ValueLeaf) else entry

    def __getitems__(self, indices: Sequence[int]) -> Any:
        """Reads a whole batch in one call, as a ``DataLoader`` does; as for a store."""
        self._store.read_into_shared_memory()
        return self._read_item(list(indices))

    @property
    def is_locked(self) -> bool:
        """Whether the store was locked when the view was made."""
        return self._shape.stored.root.is_locked

    @is_locked.setter
    def is_locked(self, value: bool) -> None:
        self._refuse("lock_")

    def __iter__(self) -> Iterator[Any]:
        """Yields the rows, read in blocks; each block is of one moment. Raises TypeError without a batch dimension."""
        if not self.batch_size:
            raise TypeError(f"iteration over a view of store {self.name!r} that has no batch dimension")
        return map(self._store.hand_over, iter_rows(self._read_item, len(self), self.spec.nbytes))

    @property
    def _what(self) -> str:
        return f"this view of store {self.name!r}"

    def _read_batch(self, rows: Any, numbered_in: tuple[int, ...], pad: Pad, deadline: Deadline) -> Any:
        return pad_built(self._fetch((), rows, deadline), pad, self.spec)

    def get(self, key: str | Path, default: Any = None, *, pad: Pad = None, timeout_s: float | None = None) -> Any:
        """Reads a whole leaf or nested part; returns the default if there is none. ``pad`` as for a store."""
        return self.get_at(key, ..., default, pad=pad, timeout_s=timeout_s)

    def get_at(
        self,
        key: str | Path,
        index: Any,
        default: Any = None,
        *,
        pad: Pad = None,
        timeout_s: float | None = None,
    ) -> Any:
        """Reads rows of a leaf or nested part; ``pad`` as for a store."""
        deadline = self._store.make_deadline(timeout_s)
        return self._store.hand_over(self._read_entry(check_path(key), index, default, deadline, pad))

    def _read_entry(self, path: Path, index: Any, default: Any, deadline: Deadline, pad: Pad = None) -> Any:
        try:
            entry = self.spec.find(path, store=self.name)
        except KeyNotFoundError:
            if default is NO_DEFAULT:
                raise
            return default
        index, below = split_index(index, len(self.batch_size), count_dims(entry))
        found = get_entry(pad_built(self._fetch(path, index, deadline), pad, self.spec), path)
        return found if below is None else found[below]

    def to_tensordict(
        self,
        *,
        retain_none: bool | None = None,
        device: torch.device | str | None = None,
        pad: Pad = None,
        timeout_s: float | None = None,
    ) -> Any:
        """Reads all of it into a local tensordict; ``retain_none`` and ``pad`` as for a store."""
        deadline = self._store.make_deadline(timeout_s)
        if pad is None:
            found = self._fetch((), ..., deadline, device=device)
        else:  # on the CPU, where it is padded
            found = to_device(pad_built(self._fetch((), ..., deadline), pad, self.spec), resolve_device(device))
        return found if retain_none is None else found.to_tensordict(retain_none=retain_none)

    def _read_all(self, deadline: Deadline, *, device: torch.device | str | None = None) -> Any:
        return self._fetch((), ..., deadline, device=device)

    # ------------------------------------------------------------------------------- writing

    def __setitem__(self, index: Any, value: Any) -> None:
        """Replaces a leaf or nested part (``view["key"] = tensor``) or rows of everything (``view[3] = td``)."""
        path = to_path(index)
        if path is None:
            self.update_at_(value, index)
        else:
            self.set(path, value)

    def set(
        self,
        key: str | Path,
        value: Any,
        inplace: bool = False,
        *,
        non_blocking: bool = False,
        timeout_s: float | None = None,
    ) -> StoreView:
        """Replaces a leaf or nested part; new keys are set in the store itself. Arguments as in a store's."""
        manner = Manner.BROADCAST_AFTER_BATCH if inplace else Manner.ENTRY
        return self._write_whole(check_path(key), value, manner, self._store.make_deadline(timeout_s))

    def set_(self, key: str | Path, value: Any, *, timeout_s: float | None = None) -> StoreView:
        """Does the same as ``set``, but broadcasts dimensions beyond the batch dimensions."""
        deadline = self._store.make_deadline(timeout_s)
        return self._write_whole(check_path(key), value, Manner.BROADCAST_AFTER_BATCH, deadline)

    def _prepare_write_of_rows(self, path: Path, value: Any, index: Any, deadline: Deadline) -> Callable[[], StoreView]:
        check_whole_rows(index, self.spec, path, store=self.name)
        return lambda: self._write({path: to_local(value, deadline)}, index, Manner.ROWS, deadline)

    def _write_whole(self, path: Path, value: Any, manner: Manner, deadline: Deadline) -> StoreView:
        self.spec.find(path, store=self.name)
        return self._write({path: to_local(value, deadline)}, ..., manner, deadline)

    def _update(self, values: Any, deadline: Deadline) -> None:
        self._write(values, ..., Manner.COPY, deadline)

    def _update_at(self, values: Any, index: Any, deadline: Deadline) -> None:
        self._write(values, index, Manner.ROWS, deadline)

    # ------------------------------------------------------------------------------- narrowing

    def _get_skeleton(self) -> Skeleton:
        return self._shape

    def _add_step(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> StoreView:
        if kwargs.get("inplace"):
            raise NotSupportedError(feature=f"{name}(inplace=True) on a store", reason=REFUSED["pop"])
        step = Step(name, to_local(args), dict(kwargs))
        td = step.check(self._shape.td, store=self.name)
        sources = step.apply(self._shape.sources) if name in KEY_STEPS else self._shape.sources
        return StoreView(self._store, self._shape._replace(td=td, sources=sources), self._dims, (*self._steps, step))

    def _cut(self, dim: int, pieces: Sequence[int | slice], cut: Sequence[Any]) -> tuple[StoreView, ...]:
        return tuple(self._take_part((*[slice(None)] * dim, piece), td) for piece, td in zip(pieces, cut, strict=True))

    def _take_part(self, index: tuple[int | slice, ...], td: Any) -> StoreView:
        shape = self._shape._replace(td=td)
        if self._is_arranged:
            return StoreView(self._store, shape, self._dims, (*self._steps, Step(INDEX_STEP, (index,), {})))
        return StoreView(self._store, shape, narrow_dims(self._dims, index), self._steps)

    @property
    def _numbered_in(self) -> tuple[int, ...]:
        return self._shape.stored.batch_size

    @property
    def _is_arranged(self) -> bool:
        return any(step.name in SHAPE_STEPS for step in self._steps)

    # ------------------------------------------------------------------------------- in the store

    def _fetch(self, path: Path, index: Any, deadline: Deadline, *, device: torch.device | str | None = None) -> Any:
        """Reads rows of an entry, or of everything, with the nodes above it."""
        batch_size = self._shape.td.batch_size
        selection = encode(index, batch_size=batch_size, store=self.name)
        keys = self._shape.list_paths(path)
        if not keys:
            found = _index_rows(self._shape.td.select(*self._shape.list_hollow_nodes(path)), selection)
            return found if self.device is None else found.to(self.device)
        keys = [] if keys == [()] else keys
        place = self._place(selection, self._store.spec.select(keys) if keys else self._store.spec)
        is_placed = place is not None
        rows = compose_index(self._dims, EVERYTHING) if place is None else place
        td = self._store.read(rows, keys, numbered_in=self._numbered_in, device=device, deadline=deadline)
        for step in self._steps:
            if not is_placed or step.name in KEY_STEPS:
                td = step.apply(td)
        if not is_placed:
            td = _index_rows(td, selection)
        elif self._is_arranged and is_tensor_collection(td):
            names = select_names(self._shape.td.names, batch_size, selection)
            td.names = names if names is None else [*names]
        if self._has_hollow and (hollow := self._shape.list_hollow_nodes(path)):
            td = td.unlock_() if td.is_locked else td
            for node in hollow:
                td.set(node, get_entry(self._fetch(node, index, deadline, device=device), node))
            put_in_order(td, self._shape.td)
        return td.lock_() if self.is_locked and selection.is_everything else td

    def _place(self, selection: Selection, wanted: Spec) -> tuple[Any, ...] | None:
        """Returns the store's index for a selection.

        Returns None if it is better to read all rows and arrange them here: if most of them are selected, or if the
        type of the result depends on how they are arranged.
        """
        if not self._is_arranged:
            return compose_index(self._dims, selection)
        is_whole = selection.is_everything and not any(step.name == INDEX_STEP for step in self._steps)
        is_stacked = bool(wanted.values) and any(step.name in STACKING_STEPS for step in self._steps)
        if is_whole or is_stacked or wanted.has_ragged or _has_inner_names(wanted.root, len(wanted.batch_size)):
            return None
        grid = self._make_selected_grid(selection)
        return spread(self._dims, grid) if 2 * grid.size <= count_elements(self._dims) else None

    def _make_selected_grid(self, selection: Selection) -> Grid:
        """Returns which elements of the remaining dimensions are selected."""
        grid = make_grid(self._dims, self._steps)
        found: Grid = grid[to_torch_index(selection, tuple(grid.shape))].numpy()
        return found

    def _write(self, values: Any, index: Any, manner: Manner, deadline: Deadline) -> StoreView:
        batch_size = self._shape.td.batch_size
        selection = encode(index, batch_size=batch_size, store=self.name)
        if any(step.name in REPEATING_STEPS for step in self._steps):
            raise NotSupportedError(
                feature="writing into an expanded view",
                reason="several rows of the view are one stored row; write the store",
            )
        stored = dict(self._shape.iter_leaves())
        found: dict[Path, Any] = {}
        for path, value in self._iter_leaves(values, (), selection.compute_batch_size(batch_size), manner):
            if path not in stored or stored[path] in self._store.spec.packed:
                raise NotSupportedError(
                    feature=f"writing {quote(path)} in a view of store {self.name!r}", reason="write it in the store"
                )
            found[stored[path]] = value
        place = (
            spread(self._dims, self._make_selected_grid(selection))
            if self._is_arranged
            else compose_index(self._dims, selection)
        )
        if found:
            self._store.write_rows(place, found, manner=manner, numbered_in=self._numbered_in, deadline=deadline)
        return self

    def _iter_leaves(
        self, values: Any, path: Path, batch_size: tuple[int, ...], manner: Manner
    ) -> Iterator[tuple[Path, Any]]:
        """Yields the leaves of a write, by their keys in this view. Raises SpecMismatchError for unknown keys."""
        try:
            entry = self.spec.find(path)
        except KeyNotFoundError:
            raise self._make_mismatch(path, "no such key", values) from None
        if not isinstance(entry, Node):
            yield path, values
        elif is_tensor_collection(values) and not is_non_tensor(values):
            wanted = batch_size + entry.batch_size[len(self.spec.batch_size) :]
            given = values
            if tuple(values.batch_size[: len(batch_size)]) != batch_size:
                values = broadcast(values, wanted, manner)
            if values is None:
                raise self._make_mismatch(path, f"batch size {list(wanted)}", given)
            for key in values.keys():  # noqa: SIM118
                yield from self._iter_child_leaves(entry, get_entry(values, (key,)), (key,), path, batch_size, manner)
        elif isinstance(values, dict):
            for key, value in values.items():
                yield from self._iter_child_leaves(entry, value, check_path(key), path, batch_size, manner)
        elif manner is Manner.ROWS and not is_non_tensor(values):
            for key, child in entry.entries:
                if not isinstance(child, ValueLeaf):  # a value leaf takes no number
                    yield from self._iter_leaves(values, (*path, key), batch_size, manner)
        else:
            raise self._make_mismatch(path, "a tensordict or a dict", values)

    def _iter_child_leaves(
        self, node: Node, value: Any, key: Path, path: Path, batch_size: tuple[int, ...], manner: Manner
    ) -> Iterator[tuple[Path, Any]]:
        """Yields the leaves of an entry below a node; an empty field that gets None has none."""
        if not is_none(value) or not is_unset_field(node, key):
            yield from self._iter_leaves(value, (*path, *key), batch_size, manner)

    def _make_mismatch(self, path: Path, expected: str, values: Any) -> SpecMismatchError:
        actual = str(list(values.batch_size)) if is_tensor_collection(values) else type(values).__name__
        return SpecMismatchError(store=self.name, key=show(path) if path else "", expected=expected, actual=actual)


def unwrap_leaf(entry: Any) -> Any:
    """Returns a non-tensor leaf as ``TensorDict.__getitem__`` does: the value, or the list of values."""
    if isinstance(entry, NonTensorData):
        return entry.data
    return entry.tolist() if isinstance(entry, NonTensorStack) else entry


def _has_inner_names(node: Node, num_dims: int) -> bool:
    """Returns whether a dimension beyond the first ones has a name; a call that rearranges those drops it."""
    if any((node.names or ())[num_dims:]):
        return True
    return any(isinstance(entry, Node) and _has_inner_names(entry, num_dims) for _, entry in node.entries)


def _index_rows(td: Any, selection: Selection) -> Any:
    index = to_torch_index(selection, td.batch_size)
    return td[index] if index else td
