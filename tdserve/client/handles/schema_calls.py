"""The calls of a handle that change which keys its store has, with tensordict's own names and arguments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from tensordict import TensorDict

from tdserve.base.errors import InvalidRequestError, KeyNotFoundError
from tdserve.client.handles.coerce import Manner, is_unset_field
from tdserve.client.handles.keys import NO_DEFAULT, as_path, check_path
from tdserve.client.handles.schema import StructuredHandle
from tdserve.client.handles.schema_changes import addition, alter, check_fields, split, union
from tdserve.client.handles.tensordict_calls import as_local
from tdserve.structure.altering import Renaming
from tdserve.structure.capture import Captured
from tdserve.structure.tree import Node, Path, Spec

if TYPE_CHECKING:
    from typing_extensions import Self


class AlterableHandle(StructuredHandle):
    """A handle that can change the keys of its store.

    Every change becomes visible to all clients as a whole or not at all. Their handles notice it at their next call;
    tensors that were read or mapped before are unchanged. Threads: safe.

    All of these calls raise the following, and have changed nothing then: LockedError if the store is locked,
    SpecMismatchError for content that does not fit, NotSupportedError for content that cannot be stored, and for new
    keys in an adopted store, in a store whose rows differ in structure, or in a tensorclass.
    """

    def get(self, key: str | Path, default: Any = None) -> Any:
        """Reads a whole leaf or nested part."""
        raise NotImplementedError

    def write_rows(
        self, index: Any, value: Any, *, at: Path = (), manner: Manner, timeout_s: float | None = None
    ) -> None:
        """Writes rows of leaves, or of the entry at a key."""
        raise NotImplementedError

    def set(
        self,
        key: str | Path,
        item: Any,
        inplace: bool = False,
        *,
        non_blocking: bool = False,
        timeout_s: float | None = None,
    ) -> Self:
        """Writes a leaf or nested part; if the store does not have it, adds it together with the nodes above it.

        An existing entry is overwritten in place and keeps its structure. A value of another shape or dtype, or a
        tensor in place of a nested part, is refused; remove the entry with ``del_`` first.

        Args:
            inplace: True also writes existing content of a locked store, as ``set_`` does.
            non_blocking: Accepted; the call returns when the content is stored.

        Raises:
            SpecMismatchError: The value does not fit. Nothing was written.
            LockedError: The store is locked. Nothing was written.
        """
        path = check_path(key)

        def write() -> None:
            if not self._has(path):
                if item is not None or not is_unset_field(self.spec.root, path):
                    is_field = self.spec.root.tensorclass is not None and len(path) == 1  # may be a dict
                    self._add({path: item}, timeout_s, is_value=is_field and isinstance(item, dict))
                return
            if not inplace:
                self._check_unlocked(path[:-1])
            self.write_rows(..., item, at=path, manner=_manner(inplace), timeout_s=timeout_s)

        if not self._has(path):
            self.refresh(timeout_s=timeout_s)
        self._insist(write, timeout_s)
        return self

    def set_non_tensor(self, key: str | Path, value: Any, *, timeout_s: float | None = None) -> Self:
        """Sets one non-tensor value for all rows, at a new key or in place of an existing entry."""
        path = check_path(key)

        def write() -> None:
            is_there = self._has(path)
            self._add({path: value}, timeout_s, is_value=True, replaces=[path] if is_there else ())

        if not self._has(path):
            self.refresh(timeout_s=timeout_s)
        self._insist(write, timeout_s)
        return self

    def setdefault(
        self, key: str | Path, default: Any, inplace: bool = False, *, timeout_s: float | None = None
    ) -> Any:
        """Returns the existing entry; if there is none, sets ``default`` and returns it as it was stored."""
        path = check_path(key)
        try:
            return self.get(path, NO_DEFAULT)
        except KeyNotFoundError:
            self.set(path, default, inplace, timeout_s=timeout_s)
            return self.get(path, NO_DEFAULT)

    def create_nested(self, key: str | Path, *, timeout_s: float | None = None) -> Self:
        """Adds an empty nested tensordict; replaces an existing entry."""
        path = check_path(key)

        def write() -> None:
            node: Node = self.spec.root
            for part in path[:-1]:
                child = dict(node.entries).get(part)
                node = child if isinstance(child, Node) else node
            check_fields(self.spec, [path])
            empty = node._replace(entries=(), tensorclass=None, stack_dim=None)
            added = Spec(_around(self.spec.root, path, empty))
            is_there = self._has(path)
            self._alter(zeros=added, replaces=[path] if is_there else (), timeout_s=timeout_s)

        self._insist(write, timeout_s)
        return self

    def update(
        self,
        input_dict_or_td: Any = None,
        clone: bool = False,
        inplace: bool = False,
        *,
        non_blocking: bool = False,
        keys_to_update: Sequence[str | Path] | None = None,
        timeout_s: float | None = None,
        **values: Any,
    ) -> Self:
        """Writes all leaves of a tensordict or dict in one write; adds those that the store lacks.

        Args:
            clone, non_blocking: Accepted; what is stored is a copy in any case.
            inplace: True also writes existing content of a locked store.
            keys_to_update: Only these keys, and what is below them.
            **values: More entries, by key.
        """
        given = _chosen(as_local(input_dict_or_td), keys_to_update)
        given = {**dict(given.items()), **values} if values else given

        def write() -> None:
            known, fresh = split(self.spec, given)
            if not fresh:
                for path in known if not inplace else ():
                    self._check_unlocked(path[:-1])
                values = given if () in known else known
                self.write_rows(..., values, manner=_manner(inplace), timeout_s=timeout_s)
                return
            self._add(fresh, timeout_s, known=known)

        if split(self.spec, given)[1]:
            self.refresh(timeout_s=timeout_s)
        self._insist(write, timeout_s)
        return self

    def pop(self, key: str | Path, default: Any = NO_DEFAULT, *, timeout_s: float | None = None) -> Any:
        """Removes a leaf or nested part, and returns it.

        Raises:
            KeyNotFoundError: The store has no such entry, and no default was given.
        """
        path = check_path(key)
        try:
            value = self.get(path, NO_DEFAULT)
            self.del_(path, timeout_s=timeout_s)
        except KeyNotFoundError:
            if default is NO_DEFAULT:
                raise
            return default
        return value

    def popitem(self, *, timeout_s: float | None = None) -> tuple[str, Any]:
        """Removes the entry that was added last, and returns its key and its content.

        Raises:
            KeyNotFoundError: The store has no entries.
        """
        self.refresh(timeout_s=timeout_s)
        if not self.spec.root.entries:
            raise KeyNotFoundError(store=self.name, key="")
        key = self.spec.root.entries[-1][0]
        return key, self.pop(key, timeout_s=timeout_s)

    def del_(self, key: str | Path, *, timeout_s: float | None = None) -> Self:
        """Removes a leaf or nested part. Raises KeyNotFoundError."""
        return self._remove([check_path(key)], timeout_s)

    def __delitem__(self, key: str | Path) -> None:
        self._remove([check_path(key)], None)

    def clear(self, *, timeout_s: float | None = None) -> Self:
        """Removes all entries; the store and its batch size stay."""
        self.refresh(timeout_s=timeout_s)
        return self._remove([(key,) for key, _ in self.spec.root.entries], timeout_s)

    def rename_key_(
        self,
        old_key: str | Path,
        new_key: str | Path,
        safe: bool = False,
        *,
        timeout_s: float | None = None,
    ) -> Self:
        """Gives a leaf or nested part another key; nothing is copied.

        Args:
            safe: True refuses a ``new_key`` that exists; otherwise it is replaced.

        Raises:
            KeyExistsError: ``new_key`` exists.
            KeyNotFoundError: There is no ``old_key``.
        """
        old, new = check_path(old_key), check_path(new_key, argument="new_key")
        self._alter(renamed=[Renaming(old, new, safe)], timeout_s=timeout_s)
        return self

    def add_zeros(self, added: Spec, *, timeout_s: float | None = None) -> Self:
        """Adds leaves of zeros.

        Args:
            added: Their structure, with the store's batch size, and the nodes above them.

        Raises:
            StructureChangedError: One of them exists already. Nothing was changed.
        """
        self._alter(zeros=added, timeout_s=timeout_s)
        return self

    def _add_rows(self, index: Any, values: Any) -> bool:
        """Adds keys for which only some rows are given; False if the store has one of them, or ``values`` is empty."""
        known, fresh = split(self.spec, values) if hasattr(values, "items") else ({}, {})
        if known or not fresh or self.spec.has_ragged:
            return False
        whole = TensorDict({}, self.spec.batch_size)
        try:
            whole[index] = values
        except (RuntimeError, ValueError, TypeError, AttributeError):
            return False
        self._insist(lambda: self._add(split(self.spec, whole)[1], None), None)
        return True

    def _keep_only(self, keys: Sequence[str | Path], *, strict: bool) -> None:
        """Performs ``select(..., inplace=True)``."""
        self.refresh()
        wanted = [check_path(key) for key in keys]
        for path in wanted if strict else ():
            self.spec.find(path, store=self.name)
        self._remove(list(_others(self.spec.root, (), wanted)), None)

    def _drop(self, keys: Sequence[str | Path]) -> None:
        """Performs ``exclude(..., inplace=True)``."""
        self.refresh()
        self._remove([path for path in map(check_path, keys) if self._has(path)], None)

    def _remove(self, paths: Sequence[Path], timeout_s: float | None) -> Self:
        if paths:
            self._alter(removed=paths, timeout_s=timeout_s)
        return self

    def _add(
        self,
        fresh: dict[Path, Any],
        timeout_s: float | None,
        *,
        known: dict[Path, Any] | None = None,
        is_value: bool = False,
        replaces: Iterable[Path] = (),
    ) -> None:
        """Adds entries, and writes ``known``, new values of existing entries, in the same change."""
        allow_pickle = self._client.allow_pickle
        content = addition(self.spec, fresh, store=self.name, allow_pickle=allow_pickle, is_value=is_value)
        if known:
            content = union(self.spec, known, content, store=self.name, allow_pickle=allow_pickle)
        self._alter(content=content, replaces=(*replaces, *(known or ())), timeout_s=timeout_s)

    def _alter(
        self,
        *,
        content: Captured | None = None,
        zeros: Spec | None = None,
        replaces: Iterable[Path] = (),
        removed: Iterable[Path] = (),
        renamed: Iterable[Renaming] = (),
        is_locked: bool | None = None,
        timeout_s: float | None = None,
    ) -> None:
        alter(
            self._client,
            self.name,
            content=content,
            zeros=zeros,
            replaces=replaces,
            removed=removed,
            renamed=renamed,
            is_locked=is_locked,
            deadline=self._client.deadline(timeout_s),
        )
        self.refresh()


def _manner(inplace: bool) -> Manner:
    return Manner.BEHIND if inplace else Manner.ENTRY


def _around(root: Node, path: Path, entry: Node) -> Node:
    """Returns a root with a single entry and the nodes above it; a missing node is like the one above it."""
    if not path:
        return entry
    child = dict(root.entries).get(path[0]) if len(path) > 1 else None
    below = child if isinstance(child, Node) else root._replace(entries=(), tensorclass=None, stack_dim=None)
    return root._replace(entries=((path[0], _around(below, path[1:], entry)),))


def _others(node: Node, path: Path, wanted: Sequence[Path]) -> Iterable[Path]:
    """Lists the entries that are neither wanted nor above a wanted one."""
    for key, entry in node.entries:
        below = (*path, key)
        if below in wanted:
            continue
        if isinstance(entry, Node) and any(each[: len(below)] == below for each in wanted):
            yield from _others(entry, below, wanted)
        else:
            yield below


def _chosen(values: Any, keys: Sequence[str | Path] | None) -> Any:
    if values is None:
        return {}
    if not hasattr(values, "items"):
        raise InvalidRequestError(argument="update", reason=f"{type(values).__name__} has no keys")
    if keys is None:
        return values
    wanted = [check_path(key) for key in keys]
    found: dict[Any, Any] = {}
    for key, value in values.items():
        path = as_path(key) or ()
        if any(path[: len(each)] == each for each in wanted):
            found[key] = value
            continue
        below = [each[len(path) :] for each in wanted if each[: len(path)] == path]
        if below and hasattr(value, "items"):
            found[key] = _chosen(value, below)
    return found
