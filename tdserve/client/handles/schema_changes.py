"""Changes of the keys of a store, as a client requests them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict, is_tensor_collection

from tdserve.base.deadline import Deadline
from tdserve.base.errors import SpecMismatchError
from tdserve.client.handles.coerce import Manner, coerce_value, is_none, is_unset_field
from tdserve.client.session.calls.timeouts import compute_answer_timeout_s
from tdserve.client.session.requests.outgoing import Outgoing, WriteTarget
from tdserve.client.session.session import Session
from tdserve.client.session.session_client import SessionClient
from tdserve.client.transfers.write import write
from tdserve.structure.captures.array_dicts import read_entry
from tdserve.structure.captures.capture import Captured, capture
from tdserve.structure.tensordicts.instances import find_content, find_tensorclass
from tdserve.structure.tensors.file_tensors import is_in_file, iter_file_items
from tdserve.structure.trees import codec
from tdserve.structure.trees.altering import Renaming
from tdserve.structure.trees.nodes import find_entry
from tdserve.structure.trees.tree import Node, Path, Spec, describe, show
from tdserve.v1 import content_pb2, control_pb2


def alter(
    client: SessionClient,
    name: str,
    *,
    content: Captured | None = None,
    zeros: Spec | None = None,
    replaces: Iterable[Path] = (),
    removed: Iterable[Path] = (),
    renamed: Iterable[Renaming] = (),
    is_locked: bool | None = None,
    kind: control_pb2.StoreKind = control_pb2.STORE_KIND_TENSORDICT,
    deadline: Deadline,
) -> int:
    """Changes which keys a store has, as a whole or not at all; returns the content version of the change.

    Removals come first, then renames, then additions.

    Args:
        content: The new entries: the structure has the store's batch size, and the nodes above the entries.
        zeros: Structure of new tensors of zeros, instead of ``content``.
        replaces: Keys of the new entries that replace existing ones.
        removed, renamed: Keys.
        is_locked: Locks or unlocks the store; nothing else is changed in the same call.
        kind: Kind of the store that is meant.

    Raises:
        WrongStateError: The name means a store of another kind. Nothing was changed.
        KeyNotFoundError: An entry to remove or rename does not exist. Nothing was changed.
        StructureChangedError: An entry to add exists already. Nothing was changed.
        LockedError: The store is locked. Nothing was changed.
    """
    added = zeros if content is None else content.spec
    asked = control_pb2.AlterRequest(
        store=name,
        added=None if added is None else codec.encode(added),
        replaces=_encode_paths(replaces),
        removed=_encode_paths(removed),
        renamed=[
            control_pb2.Renamed(old_key=_encode_path(each.old), new_key=_encode_path(each.new), is_safe=each.is_safe)
            for each in renamed
        ],
        kind=kind,
    )
    if is_locked is not None:
        asked.is_locked = is_locked
    what = f"a change of keys of {name!r}"
    if content is None or not (content.tensors or content.values):
        return _alter_without_content(client, asked, deadline, what)
    target = WriteTarget(name, content.spec.fingerprint, content.spec, allow_pickle=client.allow_pickle)

    def make_body(session: Session, outgoing: Outgoing, deadline: Deadline) -> dict[str, Any]:
        asked.content.CopyFrom(outgoing.message)
        asked.timeout_s = deadline.remaining_s or 0.0
        return {"alter": asked}

    def make_outgoing(session: Session) -> Outgoing:
        return session.movers.writes.prepare([content], target)

    done = write(client, make_outgoing, make_body, deadline=deadline, what=what, store=name)
    return done.version


def _alter_without_content(
    client: SessionClient, asked: control_pb2.AlterRequest, deadline: Deadline, what: str
) -> int:
    def attempt(session: Session, request: int, deadline: Deadline) -> int:
        asked.timeout_s = deadline.remaining_s or 0.0
        version: int = session.send(request, alter=asked).wait(compute_answer_timeout_s(deadline), what).done.version
        return version

    return client.call(attempt, deadline, request=client.requests.begin_write(deadline), store=asked.store)


def capture_addition(
    spec: Spec, entries: Mapping[Path, Any], *, store: str, allow_pickle: bool = False, is_value: bool = False
) -> Captured:
    """Prepares values for keys that a store does not have, in the form that tensordict gives them.

    Args:
        spec: The store's structure.
        entries: Values by key; missing nodes above them are made.
        is_value: Whether each is a single non-tensor value, whatever its type.

    Raises:
        SpecMismatchError: A value has another batch size, or its key is below a leaf. Nothing was written.
        NotSupportedError: A value cannot be stored.
    """
    for path in entries:
        for depth in range(1, len(path)):
            above = find_entry(spec.root, path[:depth])
            if above is not None and not isinstance(above, Node):
                raise SpecMismatchError(
                    store=store, key=show(path[:depth]), expected=describe(above), actual="a key below it"
                )
    check_fields(spec, entries)
    td = _make_nodes_above(spec.root, list(entries))
    for path, value in entries.items():
        try:
            if is_value:
                td.set_non_tensor(path, value)
            else:
                td.set(path, read_entry(value, td.batch_size, path, store=store))
        except (RuntimeError, ValueError, TypeError) as fault:
            node = find_entry(spec.root, path[:-1])
            batch_size = list(node.batch_size if isinstance(node, Node) else spec.batch_size)
            shape = getattr(value, "shape", None)
            actual = f"{type(value).__name__}{'' if shape is None else list(shape)}"
            raise SpecMismatchError(
                store=store, key=show(path), expected=f"batch size {batch_size} in front", actual=actual
            ) from fault
    captured = capture(td, store=store, allow_pickle=allow_pickle, is_exact=True)
    if spec.root.device is None:
        return captured
    return Captured(captured.spec.with_device(spec.root.device), captured.tensors, captured.values, {})


def check_fields(spec: Spec, paths: Iterable[Path]) -> None:
    """Raises NotSupportedError where a tensorclass has no such field, or is not known in this process."""
    for path in paths:
        for depth in range(len(path)):
            above = find_entry(spec.root, path[:depth])
            if isinstance(above, Node) and above.tensorclass is not None:
                find_tensorclass(above.tensorclass, path[:depth], {path[depth]})


def split(spec: Spec, values: Any) -> tuple[dict[Path, Any], dict[Path, Any]]:
    """Splits values, as ``TensorDict.update`` accepts them, into entries by key; nested ones leaf by leaf.

    Returns:
        The entries at existing keys, and those at new ones.
    """
    known: dict[Path, Any] = {}
    fresh: dict[Path, Any] = {}
    _split(spec.root, values, (), known, fresh)
    return known, fresh


def find_unknown(spec: Spec, values: Any) -> Path | None:
    """Returns a key of ``values`` that the store does not have; None if it has them all."""
    return next(iter(split(spec, values)[1]), None) if hasattr(values, "items") else None


def merge_captures(
    spec: Spec, known: Mapping[Path, Any], fresh: Captured, *, store: str, allow_pickle: bool
) -> Captured:
    """Merges new content with new values of existing entries, which must fit there.

    Raises:
        SpecMismatchError, NotSupportedError: One does not fit. Nothing was written.
    """
    tensors, contents, root = dict(fresh.tensors), dict(fresh.values), fresh.spec.root
    for path, value in known.items():
        chosen = spec.select([path])
        one, _ = coerce_value(
            value,
            chosen,
            at=path,
            store=store,
            manner=Manner.ENTRY,
            is_whole=True,
            allow_pickle=allow_pickle,
        )
        root = _join_nodes(root, one.spec.root)
        tensors.update(one.tensors)
        contents.update(one.values)
    return Captured(Spec(root), tensors, contents, {})


def _join_nodes(node: Node, other: Node) -> Node:
    entries = dict(node.entries)
    for key, entry in other.entries:
        present = entries.get(key)
        both = isinstance(present, Node) and isinstance(entry, Node)
        entries[key] = _join_nodes(present, entry) if both else entry  # type: ignore[arg-type]
    return node._replace(entries=tuple(entries.items()))


def _split(node: Node, values: Any, path: Path, known: dict[Path, Any], fresh: dict[Path, Any]) -> None:
    entries = dict(node.entries)
    items = _list_items(values)
    if items is None:
        known[path] = values
        return
    for key, value in items:
        first, *rest = (key,) if isinstance(key, str) else key
        below = (*path, first)
        if rest:
            value = {tuple(rest): value}
        entry = entries.get(first)
        if isinstance(entry, Node) and entry.inner is None and _is_tree(value):
            _split(entry, value, below, known, fresh)
        elif rest:
            for inner, leaf in _iter_items(value, below):
                fresh[inner] = leaf
        elif entry is not None or not is_none(value) or not is_unset_field(node, (first,)):
            (fresh if entry is None else known)[below] = value


def _list_items(values: Any) -> list[tuple[Any, Any]] | None:
    """Lists values to write by key; None for a lazy stack whose rows differ in keys.

    Such a stack is written as a whole.
    """
    content = find_content(values)
    stack = values if content is None else content
    if isinstance(stack, LazyStackedTensorDict) and len({frozenset(row.keys()) for row in stack.tensordicts}) > 1:
        return None
    try:
        return list(iter_file_items(values) if is_in_file(values) else values.items())
    except RuntimeError:  # tensors that differ in size have no common one
        return None


def _iter_items(values: Mapping[Any, Any], path: Path) -> Iterable[tuple[Path, Any]]:
    for key, value in values.items():
        yield (*path, *((key,) if isinstance(key, str) else key)), value


def _is_tree(value: Any) -> bool:
    if isinstance(value, (NonTensorData, NonTensorStack)):
        return False
    return isinstance(value, Mapping) or is_tensor_collection(value)


def _make_nodes_above(node: Node, paths: Sequence[Path]) -> TensorDict:
    """Returns the nodes of a store that are above the keys."""
    below: dict[str, list[Path]] = {}
    for path in paths:
        if len(path) > 1:
            below.setdefault(path[0], []).append(path[1:])
    entries = dict(node.entries)
    children = {key: entries.get(key) for key in below}
    found = {key: _make_nodes_above(child, below[key]) for key, child in children.items() if isinstance(child, Node)}
    names = list(node.names) if node.names is not None else None
    return TensorDict(found, batch_size=node.batch_size, names=names)  # type: ignore[arg-type]


def _encode_path(path: Path) -> content_pb2.Path:
    return content_pb2.Path(parts=path)


def _encode_paths(paths: Iterable[Path]) -> list[content_pb2.Path]:
    return [_encode_path(path) for path in paths]
