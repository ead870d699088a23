"""A whole structure as a value: its parts by key, its changes of batch size, its fingerprint. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tdserve.base.errors import InvalidRequestError, InvalidSpecError, KeyNotFoundError
from tdserve.structure.trees.canonical import compute_fingerprint
from tdserve.structure.trees.changes import (
    move_to_cpu,
    rebatch,
    redevice,
    replace_entries,
    set_locks,
    set_per_row,
    strip_to_content,
)
from tdserve.structure.trees.matching import (
    check_node,
    describe,
    describe_destination,
    describe_misfit,
    is_compatible,
    quote,
    show,
)
from tdserve.structure.trees.nodes import (
    DimNames,
    Entry,
    Form,
    Node,
    Path,
    TensorLeaf,
    ValueLeaf,
    has_state,
    make_packed_leaf,
)

__all__ = [
    "DimNames",
    "Entry",
    "Node",
    "Path",
    "Spec",
    "TensorLeaf",
    "ValueLeaf",
    "check_matches",
    "check_node",
    "describe",
    "has_stack",
    "is_compatible",
    "iter_leaves",
    "quote",
    "show",
]

_MAX_KEPT_ROW_COUNTS = 256
"""Specs cached by ``with_rows`` and by ``with_per_row``: callers use few batch sizes and mixtures, and an adversary
must not fill the memory."""


_MAX_KEPT_ENTRIES = 1 << 16
"""Entries of all of these together, of which each takes about a kilobyte."""

_MAX_NODES = 8
_MAX_REPEATED = 1_000
"""Most keys of one selection: this many, and for each leaf its own and those of nodes above it."""

_MAX_KEPT_SELECTIONS = 1024
"""Specs cached by ``select``, for the same reasons."""


@dataclass(frozen=True)
class Spec:
    """A structure. Equal specs have equal trees, entry order included; equal fingerprints ignore that order."""

    root: Node

    def __hash__(self) -> int:
        return hash(self.root)

    def __reduce__(self) -> tuple[Any, ...]:
        return (Spec, (self.root,))  # caches are not pickled

    @property
    def batch_size(self) -> tuple[int, ...]:
        """Batch size of the root."""
        return self.root.batch_size

    @property
    def num_rows(self) -> int:
        """Rows that are written and read on their own: along the first batch dimension; one if there is none."""
        return self.root.batch_size[0] if self.root.batch_size else 1

    @cached_property
    def fingerprint(self) -> bytes:
        """SHA-256, 32 bytes; the same for every order of entries."""
        return compute_fingerprint(self.root)

    @cached_property
    def tensors(self) -> tuple[tuple[Path, TensorLeaf], ...]:
        """Every tensor leaf in canonical order: sorted by path."""
        return tuple(sorted((path, leaf) for path, leaf in iter_leaves(self.root, ()) if isinstance(leaf, TensorLeaf)))

    @cached_property
    def tensors_by_path(self) -> dict[Path, TensorLeaf]:
        """Every tensor leaf by its path."""
        return dict(self.tensors)

    @cached_property
    def values(self) -> tuple[tuple[Path, ValueLeaf], ...]:
        """Every leaf that is stored value by value in canonical order, sorted by path; packed nodes are such leaves."""
        found = [(path, leaf) for path, leaf in iter_leaves(self.root, ()) if isinstance(leaf, ValueLeaf)]
        return tuple(sorted(found, key=lambda item: item[0]))

    @cached_property
    def values_by_path(self) -> dict[Path, ValueLeaf]:
        """Every leaf that is stored value by value by its path."""
        return dict(self.values)

    @cached_property
    def leaf_paths(self) -> tuple[Path, ...]:
        """Paths of all stored leaves, tensors first."""
        return tuple(path for path, _ in (*self.tensors, *self.values))

    @cached_property
    def has_ragged(self) -> bool:
        """Whether elements of some leaf may differ in shape, or some node is a lazy stack."""
        return any(leaf.ragged is not None for _, leaf in self.values) or has_stack(self.root)

    @cached_property
    def packed(self) -> frozenset[Path]:
        """Paths where elements carry their own structure."""
        return frozenset(
            path for path, leaf in self.values if leaf.ragged is not None and leaf.ragged.form is Form.PACKED
        )

    @cached_property
    def packed_nodes(self) -> dict[Path, Node]:
        """The nodes whose elements carry their own structure, by path."""
        found = [(path, self.find(path)) for path in self.packed]
        return {path: node for path, node in found if isinstance(node, Node)}

    @cached_property
    def has_state(self) -> bool:
        """Whether it records anything besides content: locked nodes, parameters, ``requires_grad``."""
        return has_state(self.root)

    @cached_property
    def has_members(self) -> bool:
        """Whether a packed node records its members."""
        return _has_members(self.root)

    @cached_property
    def without_state(self) -> Spec:
        """This spec without anything besides content."""
        return Spec(strip_to_content(self.root)) if self.has_state else self

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all tensor leaves, packed."""
        return sum(leaf.nbytes for _, leaf in self.tensors)

    @cached_property
    def memo(self) -> dict[object, Any]:
        """Results that other code computes once per spec (layouts, build recipes), by keys of its own."""
        return {}

    def memoize(self, key: object, make: Callable[[], Any]) -> Any:
        """Returns the result of the first call of ``make`` with this key."""
        found = self.memo.get(key)
        if found is None:
            found = self.memo[key] = make()
        return found

    def keys(self, include_nested: bool = False, leaves_only: bool = False, *, sort: bool = False) -> list[str | Path]:
        """Lists the keys as ``TensorDict.keys`` does.

        A key of the root is a str, a nested one a tuple; the keys of a node precede its own; non-tensor entries are no
        leaves (as for tensordict's default ``is_leaf``); sorting compares keys joined by dots.
        """
        found = [
            path[0] if len(path) == 1 else path
            for path, entry in _walk(self.root, (), is_nested=include_nested)
            if not leaves_only or _is_tensor(entry)
        ]
        return sorted(found, key=_join_key) if sort else found

    def find(self, path: Path, *, store: str = "") -> Entry:
        """Returns the entry at ``path``; the root for the empty path.

        Raises:
            KeyNotFoundError: There is none. ``store`` is only for its message.
        """
        entry: Entry = self.root
        for depth, key in enumerate(path):
            child = self._list_children(path[:depth], entry).get(key) if isinstance(entry, Node) else None
            if child is None:
                raise KeyNotFoundError(store=store, key=show(path))
            entry = child[1]
        return entry

    def select(self, paths: Sequence[Path], *, store: str = "") -> Spec:
        """Returns this spec with only the given entries (nodes are complete) and the nodes above them, unlocked.

        Raises:
            KeyNotFoundError: A path does not exist. ``store`` is only for its message.
            InvalidRequestError: They are far more than there are entries.
        """
        most = _MAX_REPEATED + _MAX_NODES * (len(self.tensors) + len(self.values))
        if len(paths) > most:
            raise InvalidRequestError(argument="keys", reason=f"{len(paths)} keys are more than {most}")
        kept: dict[tuple[Path, ...], Spec] = self.memo.setdefault("selected", {})
        wanted = tuple(paths)
        spec = kept.get(wanted)
        if spec is None:
            for path in wanted:
                self.find(path, store=store)
            spec = Spec(self._select((), self.root, wanted))
            num_entries = len(wanted) + len(spec.tensors) + len(spec.values)
            num_kept = self.memo.get("num_selected", 0) + num_entries
            if len(kept) >= _MAX_KEPT_SELECTIONS or num_kept > _MAX_KEPT_ENTRIES:
                kept.clear()
                num_kept = num_entries
            kept[wanted], self.memo["num_selected"] = spec, num_kept
        return spec

    def with_batch(
        self,
        num_dims: int,
        batch_size: tuple[int, ...],
        names: DimNames | None = None,
        *,
        moved: tuple[int | None, ...] | None = None,
        taken: tuple[Sequence[int], ...] | None = None,
    ) -> Spec:
        """Returns this spec with the first ``num_dims`` batch dimensions replaced, in every node and leaf.

        Nothing is locked.

        Args:
            num_dims: Number of dimensions of the root's batch size to replace.
            batch_size: The new dimensions.
            names: Names of the new dimensions. None keeps the old names if their number stays; otherwise the new
                dimensions have none.
            moved: Position of each old dimension among the new ones, None if it has none: decides whether a lazy stack
                still is one. None: not known.
            taken: Indices that are selected along each old dimension, in order. None: not known.

        Raises:
            InvalidSpecError: There are fewer batch dimensions, or the names do not fit.
        """
        if not 0 <= num_dims <= len(self.batch_size):
            raise InvalidSpecError(reason=f"batch size {self.batch_size} has no {num_dims} dimensions to replace")
        if names is not None and len(names) != len(batch_size):
            raise InvalidSpecError(reason=f"{len(names)} names for batch dimensions {batch_size}")
        return Spec(rebatch(self.root, num_dims, tuple(batch_size), names, moved, taken))

    def prepend(self, batch_size: tuple[int, ...]) -> Spec:
        """Returns this spec with more batch dimensions in front, unnamed."""
        return self.with_batch(0, batch_size)

    def with_rows(self, num_rows: int) -> Spec:
        """Returns this spec with another size of its first batch dimension; the same object for the same number.

        Raises:
            InvalidSpecError: There is no batch dimension.
        """
        kept = self._by_rows
        spec = kept.get(num_rows)
        if spec is None:
            spec = self if self.batch_size[:1] == (num_rows,) else self.with_batch(1, (num_rows,))
            if len(kept) >= _MAX_KEPT_ROW_COUNTS:
                kept.clear()
            kept[num_rows] = spec
        return spec

    def with_device(self, device: str | None) -> Spec:
        """Returns this spec with every node on ``device``, as after ``TensorDict.to``, or on none. Cached."""
        spec: Spec = self.memoize(("device", device), lambda: Spec(redevice(self.root, device)))
        return spec

    def with_locked(self, is_locked: bool) -> Spec:
        """Returns this spec with every node locked, as after ``TensorDict.lock_``, or none. Cached."""
        spec: Spec | None = self.memo.get(("locked", is_locked))
        if spec is None:
            root = set_locks(self.root, is_locked)
            spec = self.memo[("locked", is_locked)] = self if root == self.root else Spec(root)
        return spec

    @cached_property
    def on_cpu(self) -> Spec:
        """Returns this spec with the CPU as the device of every node that has one; itself if that is so already."""
        root = move_to_cpu(self.root)
        return self if root == self.root else Spec(root)

    def with_values_per_row(self) -> Spec:
        """Returns this spec with one value per row in every non-tensor leaf with rows, as in stacked rows. Cached."""
        if not self.values:
            return self
        spec: Spec = self.memoize("values per row", lambda: Spec(set_per_row(self.root)))
        return spec

    def with_per_row(self, is_per_row: Mapping[Path, bool]) -> Spec:
        """Returns this spec with one value per row, or one for all, in the named non-tensor leaves.

        Others are unchanged. Cached, since every read of a store may need it.
        """
        kept: dict[frozenset[tuple[Path, bool]], Spec] = self.memo.setdefault("per row", {})
        wanted = frozenset(is_per_row.items())
        spec = kept.get(wanted)
        if spec is None:
            changed: dict[Path, Entry] = {
                path: leaf._replace(per_row=not leaf.per_row)
                for path, leaf in self.values
                if leaf.ragged is None and is_per_row.get(path, leaf.per_row) != leaf.per_row
            }
            spec = Spec(replace_entries(self.root, changed)) if changed else self
            if len(kept) >= _MAX_KEPT_ROW_COUNTS:
                kept.clear()
            kept[wanted] = spec
        return spec

    def _list_children(self, path: Path, node: Node) -> dict[str, tuple[int, Entry]]:
        """Returns the entries of the node at ``path`` by key, with their positions.

        Cached, since a node may have 10,000.
        """
        kept: dict[Path, dict[str, tuple[int, Entry]]] = self.memo.setdefault("children", {})
        children = kept.get(path)
        if children is None:
            children = kept[path] = {key: (number, entry) for number, (key, entry) in enumerate(node.entries)}
        return children

    def _select(self, at: Path, node: Node, paths: Sequence[Path]) -> Node:
        below: dict[str, list[Path]] = {}
        for path in paths:
            if not path or node.inner is not None:
                return node
            below.setdefault(path[0], []).append(path[1:])
        children = self._list_children(at, node)
        found = sorted(((*children[key], key) for key in below), key=lambda child: child[0])
        entries = tuple(
            (key, self._select((*at, key), entry, below[key]) if isinstance(entry, Node) else entry)
            for _, entry, key in found
        )
        return node._replace(entries=entries, is_locked=False, params=None)

    @cached_property
    def _by_rows(self) -> dict[int, Spec]:
        return {}


def check_matches(expected: Spec, actual: Spec, *, store: str, is_destination: bool = False) -> None:
    """Raises unless ``actual`` has exactly what ``expected`` requires.

    The following does not count: the order of entries, devices, names of dimensions, locks, parameters and buffers,
    ``requires_grad``, whether a node is a lazy stack, and whether a non-tensor leaf has one value for all rows or one
    for each, which changes with every stacking and indexing. Where ``expected`` allows elements of any size, every size
    matches. Elements of a packed node may lack keys, and an instance there may have any of its fields.

    Args:
        expected: The structure of a store, or of content.
        actual: Structure of content for the store, or of a destination of the content.
        store: Name, for errors.
        is_destination: Whether ``actual`` is a destination.

    Raises:
        SpecMismatchError: The structures differ; the error names the first key, with both sides.
    """
    if expected is not actual:
        advise = describe_destination if is_destination else describe_misfit
        check_node(expected.root, actual.root, (), store, advise=advise)


def _walk(node: Node, path: Path, *, is_nested: bool = True) -> Iterator[tuple[Path, Entry]]:
    for key, entry in node.entries:
        if is_nested and isinstance(entry, Node):
            yield from _walk(entry, (*path, key))
        yield (*path, key), entry


def iter_leaves(node: Node, path: Path) -> Iterator[tuple[Path, TensorLeaf | ValueLeaf]]:
    """Yields the stored leaves of a node."""
    if node.inner is not None:
        yield path, make_packed_leaf(node)
        return
    for key, entry in node.entries:
        if isinstance(entry, Node):
            yield from iter_leaves(entry, (*path, key))
        else:
            yield (*path, key), entry


def has_stack(node: Node) -> bool:
    """Returns whether anything in a tree is a lazy stack."""
    return node.stack_dim is not None or any(isinstance(entry, Node) and has_stack(entry) for _, entry in node.entries)


def _has_members(node: Node) -> bool:
    return bool(node.members) or any(isinstance(entry, Node) and _has_members(entry) for _, entry in node.entries)


def _is_tensor(entry: Entry) -> bool:
    is_ragged = isinstance(entry, ValueLeaf) and entry.ragged is not None and bool(entry.ragged.dtype)
    is_unbatched = isinstance(entry, ValueLeaf) and entry.is_unbatched
    return is_ragged or is_unbatched or isinstance(entry, TensorLeaf)


def _join_key(key: str | Path) -> str:
    return key if isinstance(key, str) else ".".join(key)
