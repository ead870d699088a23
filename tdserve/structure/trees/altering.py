"""Changes of the keys of a structure: the new structure, and the former path of each of its leaves. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tdserve.base.errors import (
    InvalidRequestError,
    KeyExistsError,
    KeyNotFoundError,
    LockedError,
    NotSupportedError,
    SpecMismatchError,
    StructureChangedError,
)
from tdserve.structure.trees.nodes import Entry, Node, Path, TensorLeaf, find_entry
from tdserve.structure.trees.tree import Spec, describe, quote, show


@dataclass(frozen=True)
class Renaming:
    """A key and its new name.

    Attributes:
        is_safe: True refuses a ``new`` that exists; otherwise it is replaced.
    """

    old: Path
    new: Path
    is_safe: bool = False


@dataclass(frozen=True)
class Alteration:
    """A requested change. Removals come first, then renames, then additions.

    Attributes:
        removed: Leaves or nodes to remove.
        renamed: Carried out in this order.
        added: New entries, and the nodes above them; existing nodes stay as they are.
        replaces: Entries of ``added`` that replace existing ones.
        is_locked: Locks or unlocks the root; None keeps its lock.
    """

    removed: tuple[Path, ...] = ()
    renamed: tuple[Renaming, ...] = ()
    added: Spec | None = None
    replaces: frozenset[Path] = frozenset()
    is_locked: bool | None = None

    def apply(self, spec: Spec, *, store: str = "") -> Altered:
        """Applies the change to a structure.

        Raises:
            KeyNotFoundError: An entry to remove or rename does not exist.
            StructureChangedError: An entry to add exists already.
            LockedError: A node that would change is locked.
            SpecMismatchError, InvalidRequestError, NotSupportedError: An entry does not fit there.
        """
        if self.is_locked is not None and (self.removed or self.renamed or self.added):
            raise InvalidRequestError(argument="alteration", reason="a lock changes alone")
        tree = _Tree(spec, store)
        for path in self.removed:
            tree.remove(path)
        for renaming in self.renamed:
            tree.rename(renaming)
        if self.added is not None:
            tree.add(self.added, self.replaces)
        altered = Spec(tree.root)
        return Altered(altered if self.is_locked is None else altered.with_locked(self.is_locked), tree.origins)


@dataclass(frozen=True)
class Altered:
    """The result of a change.

    Attributes:
        spec: The new structure.
        origins: Former path of each stored leaf; None for a new one.
    """

    spec: Spec
    origins: Mapping[Path, Path | None] = field(default_factory=dict)


class _Tree:
    """A structure that changes step by step."""

    def __init__(self, spec: Spec, store: str) -> None:
        self.root = spec.root
        self.origins: dict[Path, Path | None] = {path: path for path, _ in (*spec.tensors, *spec.values)}
        self._store = store

    def remove(self, path: Path) -> None:
        self._find(path)
        self.root = self._change_at(self.root, (), path[:-1], lambda node: _remove_key(node, path[-1]))
        self.origins = {leaf: origin for leaf, origin in self.origins.items() if leaf[: len(path)] != path}

    def rename(self, asked: Renaming) -> None:
        old, new = asked.old, asked.new
        entry = self._find(old)
        if old == new:
            return
        if new[: len(old)] == old or old[: len(new)] == new:
            raise InvalidRequestError(
                argument="new key", reason=f"{quote(new)} and {quote(old)} are inside one another"
            )
        is_there = self._has(new)
        if is_there and asked.is_safe:
            raise KeyExistsError(store=self._store, key=show(new))
        moved = {new + leaf[len(old) :]: at for leaf, at in self.origins.items() if leaf[: len(old)] == old}
        self.remove(old)
        if is_there:
            self.origins = {leaf: at for leaf, at in self.origins.items() if leaf[: len(new)] != new}
        self.root = self._change_at(
            self.root, (), new[:-1], lambda node: self._with(node, new, entry), makes_nodes=True
        )
        self.origins.update(moved)

    def add(self, added: Spec, replaces: frozenset[Path]) -> None:
        if added.batch_size != self.root.batch_size:
            expected = f"batch size {list(self.root.batch_size)}"
            raise SpecMismatchError(store=self._store, key="", expected=expected, actual=f"{list(added.batch_size)}")
        for path in replaces:
            if not path or find_entry(added.root, path) is None:
                raise InvalidRequestError(argument="replaces", reason=f"{quote(path)} is not among what is added")
            if self._has(path):
                self.origins = {leaf: at for leaf, at in self.origins.items() if leaf[: len(path)] != path}
        self.root = self._merge(self.root, added.root, (), replaces)
        self.origins.update({path: None for path, _ in (*added.tensors, *added.values)})

    def _merge(self, node: Node, added: Node, path: Path, replaces: frozenset[Path]) -> Node:
        entries = dict(node.entries)
        for key, entry in added.entries:
            present, below = entries.get(key), (*path, key)
            if below not in replaces and isinstance(present, Node) and isinstance(entry, Node) and entry.inner is None:
                if present.batch_size != entry.batch_size:
                    expected, actual = describe(present), describe(entry)
                    raise SpecMismatchError(store=self._store, key=show(below), expected=expected, actual=actual)
                entries[key] = self._merge(present, entry, below, replaces)
                continue
            if present is not None and below not in replaces:
                raise StructureChangedError(
                    store=self._store, key=show(below), expected="no such key", actual=describe(present)
                )
            self._check_unlocked(path)
            if present is None:
                self._check_open(node, path, is_added=True)
            entries[key] = entry
        return node._replace(entries=tuple(entries.items()))

    def _with(self, node: Node, path: Path, entry: Entry) -> Node:
        batch_size = entry.shape if isinstance(entry, TensorLeaf) else entry.batch_size
        if batch_size[: len(node.batch_size)] != node.batch_size:
            expected = f"batch size {list(node.batch_size)} in front"
            raise SpecMismatchError(store=self._store, key=show(path), expected=expected, actual=describe(entry))
        return node._replace(entries=tuple({**dict(node.entries), path[-1]: entry}.items()))

    def _change_at(
        self, node: Node, at: Path, above: Path, change: Callable[[Node], Node], *, makes_nodes: bool = False
    ) -> Node:
        """Returns the tree with the node at ``above`` changed."""
        if not above:
            self._check_unlocked(at)
            self._check_open(node, at)
            return change(node)
        entries = dict(node.entries)
        child, below = entries.get(above[0]), (*at, above[0])
        if child is None and makes_nodes:
            self._check_unlocked(at)
            self._check_open(node, at)
            child = node._replace(entries=(), tensorclass=None, stack_dim=None)
        if not isinstance(child, Node):
            raise KeyNotFoundError(store=self._store, key=show(below))
        entries[above[0]] = self._change_at(child, below, above[1:], change, makes_nodes=makes_nodes)
        return node._replace(entries=tuple(entries.items()))

    def _check_unlocked(self, path: Path) -> None:
        """Raises if the node at ``path``, or one above it, is locked."""
        for depth in range(len(path) + 1):
            above = find_entry(self.root, path[:depth])
            if isinstance(above, Node) and above.is_locked:
                raise LockedError(store=self._store, key=show(path[:depth]) if depth else "")

    def _check_open(self, node: Node, path: Path, *, is_added: bool = False) -> None:
        """Raises unless the node at ``path`` may have other keys.

        Only processes that have a tensorclass know its fields.
        """
        what = (
            f"a change of keys of {quote(path)} of store {self._store!r}"
            if path
            else (f"a change of keys of store {self._store!r}")
        )
        if node.inner is not None:
            raise NotSupportedError(feature=what, reason="its rows differ in structure; write whole rows")
        if node.tensorclass is not None and not is_added:
            reason = f"it is a {node.tensorclass}, whose class fixes its keys"
            raise NotSupportedError(feature=what, reason=reason)

    def _find(self, path: Path) -> Entry:
        entry = find_entry(self.root, path) if path else None
        if entry is None:
            raise KeyNotFoundError(store=self._store, key=show(path))
        return entry

    def _has(self, path: Path) -> bool:
        return find_entry(self.root, path) is not None


def _remove_key(node: Node, key: str) -> Node:
    return node._replace(entries=tuple((other, entry) for other, entry in node.entries if other != key))
