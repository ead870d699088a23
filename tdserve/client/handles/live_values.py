"""Live leaves of a store: where on the server each of their values lies."""

from __future__ import annotations

from typing import Any, Protocol

from tensordict import is_tensor_collection

from tdserve.client.handles.view_steps import Dim, narrow_dims
from tdserve.structure.capture import capture
from tdserve.structure.entries import enliven, exchange_tensors
from tdserve.structure.live_values import is_view
from tdserve.structure.tree import Path, Spec


class LiveStore(Protocol):
    """What a live leaf needs of its store; a StoreHandle is one."""

    spec: Spec

    def snapshot_at(self, key: Path, index: Any) -> Any:
        """Rows of a leaf as they are now, as plain entries."""

    def set_at_(self, key: Path, value: Any, index: Any) -> Any:
        """Writes rows of a leaf."""


class StoreSource:
    """Rows of one non-tensor leaf of a store. Picklable, as the store is: by name and address. Threads: safe.

    Rows of the store are read and written by themselves. A leaf may have more batch dimensions than its store; what is
    written to a part of these is put into the rows as they were just before, so that of two writers to different
    parts of one row the later may undo the other.

    Args:
        store: Whose.
        path: Of the leaf.
        batch_size: Of the leaf.
        dims: What is meant of each of its dimensions: positions, or one of them, whose dimension is gone; by default
            all of them.
    """

    def __init__(
        self, store: LiveStore, path: Path, batch_size: tuple[int, ...], dims: tuple[Dim, ...] | None = None
    ) -> None:
        self._store = store
        self._path = path
        self._batch_size = batch_size
        self._dims: tuple[Dim, ...] = tuple(map(range, batch_size)) if dims is None else dims

    def __repr__(self) -> str:
        return f"<StoreSource {'.'.join(self._path)} {list(self._dims)} of {self._store!r}>"

    def read(self) -> Any:
        """What the rows hold now. Raises what a read of the store does, such as StoreNotFoundError."""
        rows, inner = self._places()
        found = self._store.snapshot_at(self._path, rows)
        return found if inner is None else found.maybe_to_stack()[inner]

    def write(self, value: Any) -> None:
        """Replaces what the rows hold. Raises what a write to the store does; nothing was written then."""
        rows, inner = self._places()
        if inner is not None:
            whole = self._store.snapshot_at(self._path, rows).maybe_to_stack()
            whole[inner] = value
            value = whole
        self._store.set_at_(self._path, value, rows)

    def at(self, index: Any) -> StoreSource:
        """A part of the rows: ints and slices are kept as such, so that nothing is read here."""
        items = index if isinstance(index, tuple) else (index,)
        num_dims = sum(isinstance(dim, range) for dim in self._dims)
        dims = narrow_dims(self._dims, expand_ellipsis(items, num_dims))
        return StoreSource(self._store, self._path, self._batch_size, dims)

    def _places(self) -> tuple[Any, Any]:
        """The index into the store's rows, and the one into what these hold; None where that is all of it."""
        num_rows_dims = len(self._store.spec.batch_size)
        rows, inner = self._dims[:num_rows_dims], self._dims[num_rows_dims:]
        if inner == tuple(map(range, self._batch_size[num_rows_dims:])):
            return _index(rows), None
        kept = sum(isinstance(dim, range) for dim in rows)
        return _index(rows), (slice(None),) * kept + _index(inner)


def with_live_leaves(td: Any, store: LiveStore, index: Any = ...) -> Any:
    """A tensordict read from a store, whose non-tensor leaves are live from now on.

    Args:
        td: Changed in place; nobody else's.
        store: Where it was read.
        index: Which of the store's rows it has. What torch would copy for (a mask, a list) is a copy here too.
    """
    if not is_view(index):
        return td
    index = expand_ellipsis(index if isinstance(index, tuple) else (index,), len(store.spec.batch_size))
    leaves = [(path, leaf) for path, leaf in store.spec.values if leaf.ragged is None]
    sources = {path: StoreSource(store, path, leaf.batch_size).at(index) for path, leaf in leaves}
    is_locked = is_tensor_collection(td) and bool(td.is_locked)
    if is_locked:  # else what is live would be the only thing in there that is not
        td.unlock_()
    found = enliven(td, sources)
    return found.lock_() if is_locked else found


def show_stored(td: Any, store: LiveStore, *, mapped: Any = None, is_live: bool) -> Any:
    """Makes the caller's own tensordict, whose content a store has just got, show what the store holds; locked.

    An entry that is assigned anew would show it no longer, without a word: hence the lock, as of tensordict's own
    ``memmap_``.

    Args:
        td: Changed in place.
        store: The store.
        mapped: Its memory, as of ``StoreHandle.map``; None leaves the tensors.
        is_live: Whether its non-tensor leaves are to be live.

    Returns:
        ``td``.
    """
    if td.is_locked:
        td.unlock_()
    if mapped is not None:
        exchange_tensors(td, capture(mapped).tensors)
    return (with_live_leaves(td, store) if is_live else td).lock_()


def expand_ellipsis(items: tuple[Any, ...], num_dims: int) -> tuple[Any, ...]:
    """Index items with as many whole dimensions in the place of an ellipsis as there are without it."""
    if Ellipsis not in items:
        return items
    place = items.index(Ellipsis)
    return items[:place] + (slice(None),) * (num_dims - len(items) + 1) + items[place + 1 :]


def _index(dims: tuple[Dim, ...]) -> tuple[int | slice, ...]:
    return tuple(dim if isinstance(dim, int) else slice(dim.start, dim.stop, dim.step) for dim in dims)
