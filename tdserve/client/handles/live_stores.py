"""Live leaves of a store: where on the server each of their values is."""

from __future__ import annotations

from typing import Any, Protocol

from tensordict import is_tensor_collection

from tdserve.client.handles.view_steps import Dim, narrow_dims
from tdserve.structure.captures.capture import capture
from tdserve.structure.tensordicts.entries import enliven, exchange_tensors
from tdserve.structure.tensordicts.live_values import is_view
from tdserve.structure.trees.tree import Path, Spec


class LiveStore(Protocol):
    """The calls that a live leaf needs of its store; a StoreHandle has them."""

    @property
    def spec(self) -> Spec:
        """Its structure, when it was last read."""

    def snapshot_at(self, key: Path, index: Any) -> Any:
        """Reads rows of a leaf as they are now, as plain entries."""

    def set_at_(self, key: Path, value: Any, index: Any) -> Any:
        """Writes rows of a leaf."""


class StoreSource:
    """Rows of a non-tensor leaf of a store. Pickled as the store is, by name and address. Threads: safe.

    Each row of the store is read and written on its own. A leaf may have more batch dimensions than its store. A write
    to a part of these reads the rows first and writes them back whole, so that of two clients that write different
    parts of a row at once the later one may undo the other.

    Args:
        store: The store.
        path: Path of the leaf.
        batch_size: Batch size of the leaf.
        dims: The selected part of each dimension: several positions, or a single one, which removes the dimension; by
            default all of them.
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
        """Reads what the rows hold now. Raises what a read of the store raises, such as StoreNotFoundError."""
        rows, inner = self._find_places()
        found = self._store.snapshot_at(self._path, rows)
        return found if inner is None else found.maybe_to_stack()[inner]

    def write(self, value: Any) -> None:
        """Replaces what the rows hold. Raises what a write to the store raises; nothing was written then."""
        rows, inner = self._find_places()
        if inner is not None:
            whole = self._store.snapshot_at(self._path, rows).maybe_to_stack()
            whole[inner] = value
            value = whole
        self._store.set_at_(self._path, value, rows)

    def select(self, index: Any) -> StoreSource:
        """Selects a part of the rows. Ints and slices are only noted, so that nothing is read here."""
        items = index if isinstance(index, tuple) else (index,)
        num_dims = sum(isinstance(dim, range) for dim in self._dims)
        dims = narrow_dims(self._dims, expand_ellipsis(items, num_dims))
        return StoreSource(self._store, self._path, self._batch_size, dims)

    def _find_places(self) -> tuple[Any, Any]:
        """Returns the index of the store's rows, and the index within what these hold; None for all of it."""
        num_rows_dims = len(self._store.spec.batch_size)
        rows, inner = self._dims[:num_rows_dims], self._dims[num_rows_dims:]
        if inner == tuple(map(range, self._batch_size[num_rows_dims:])):
            return _index(rows), None
        kept = sum(isinstance(dim, range) for dim in rows)
        return _index(rows), (slice(None),) * kept + _index(inner)


def with_live_leaves(td: Any, store: LiveStore, index: Any = ...) -> Any:
    """Makes the non-tensor leaves of a tensordict that was read from a store live.

    Args:
        td: Changed in place; nothing else refers to it.
        store: The store that it was read from.
        index: Which rows of the store it has. If torch would copy for it (a mask, a list), the result is a copy here
            too.
    """
    if not is_view(index):
        return td
    index = expand_ellipsis(index if isinstance(index, tuple) else (index,), len(store.spec.batch_size))
    leaves = [(path, leaf) for path, leaf in store.spec.values if leaf.ragged is None]
    sources = {path: StoreSource(store, path, leaf.batch_size).select(index) for path, leaf in leaves}
    is_locked = is_tensor_collection(td) and bool(td.is_locked)
    if is_locked:  # else the live entry would be the only unlocked one
        td.unlock_()
    found = enliven(td, sources)
    return found.lock_() if is_locked else found


def show_stored(td: Any, store: LiveStore, *, mapped: Any = None, is_live: bool) -> Any:
    """Makes the caller's own tensordict, which was just stored, show what the store holds, and locks it.

    An entry that is assigned later would no longer show the store, without an error. The lock prevents this, as in
    tensordict's own ``memmap_``.

    Args:
        td: Changed in place.
        store: The store.
        mapped: Its memory, as in ``StoreHandle.map``; None leaves the tensors.
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
    """Replaces an ellipsis in an index by as many full slices as it stands for."""
    if Ellipsis not in items:
        return items
    place = items.index(Ellipsis)
    return items[:place] + (slice(None),) * (num_dims - len(items) + 1) + items[place + 1 :]


def _index(dims: tuple[Dim, ...]) -> tuple[int | slice, ...]:
    return tuple(dim if isinstance(dim, int) else slice(dim.start, dim.stop, dim.step) for dim in dims)
