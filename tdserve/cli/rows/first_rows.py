"""The first rows of a store, and the leaves of rows as columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from tdserve.base.errors import DeadlineExceededError
from tdserve.cli.screen.render import format_cell, format_key
from tdserve.structure.trees.nodes import Node, Path, TensorLeaf, ValueLeaf

if TYPE_CHECKING:
    from tensordict import TensorDictBase

    from tdserve.client.client import Client
    from tdserve.client.cluster.cluster_client import ClusterClient
    from tdserve.client.kv.keyed_handle import KeyedHandle
    from tdserve.client.session.catalog.description import StoreDescription


def read_first_columns(client: Client | ClusterClient, name: str, num_rows: int) -> tuple[Any, list[Column]]:
    """Reads rows as ``read_first_rows`` does; returns them, and their leaves. Instances of classes that this process
    does not know are read as the tensordicts in them."""
    from tdserve.structure.tensordicts.instances import allow_unknown_classes  # imports torch

    with allow_unknown_classes():
        content = read_first_rows(client, name, num_rows)
        return content, list(iter_columns(content))


def read_first_rows(client: Client | ClusterClient, name: str, num_rows: int) -> Any:
    """Reads up to ``num_rows`` rows of a store, or all of a tensordict or tensorclass that has no rows.

    Raises:
        StoreNotFoundError: There is no such store.
        DeadlineExceededError: Nothing has been published there yet.
    """
    described = client.describe(name)
    if described.kind == "weights":
        newest = client.latest(name)
        if newest is None:
            raise DeadlineExceededError(what=f"a first version of {name!r}", timeout_s=0.0)
        return newest.data
    if described.kind == "keyed":
        return _read_first_entries(client.kv(name), num_rows)
    if described.capacity:
        return _read_first_live(client[name], min(num_rows, described.num_rows), described.capacity)
    return client[name][0:num_rows] if described.batch_size else client[name][...]


def compute_row_nbytes(described: StoreDescription) -> int:
    """Returns about how many bytes ``read_first_rows`` reads for each row; 0 if that cannot be known beforehand."""
    if described.kind == "keyed":
        return 0
    has_rows = described.capacity or (described.batch_size and described.kind != "weights")
    num_rows = max(described.capacity or described.num_rows, 1) if has_rows else 1
    return described.nbytes // num_rows


def _read_first_live(table: Any, num_rows: int, capacity: int) -> Any:
    """Returns the first live rows of a table. The first numbers may have none."""
    end = num_rows
    while len(rows := table[0:end]) < num_rows and end < capacity:
        end = min(4 * end, capacity)
    return rows[:num_rows]


def _read_first_entries(kv: KeyedHandle, num_entries: int) -> Any:
    """Returns the entries of a keyed store with the first keys, as leaves and parts of one tensordict."""
    import torch
    from tensordict import NonTensorData, TensorDict, is_tensor_collection

    keys = kv.keys()[:num_entries]
    found = [kv.get(key) for key in keys]
    are_parts = [isinstance(value, torch.Tensor) or is_tensor_collection(value) for value in found]
    shown = [value if is_part else NonTensorData(value) for value, is_part in zip(found, are_parts, strict=True)]
    return TensorDict(dict(zip(keys, shown, strict=True)), [])


class Column(NamedTuple):
    """One leaf: a tensor or a plain value, and whether its first dimension counts the rows."""

    path: Path
    type: str
    value: Any
    is_per_row: bool

    def make_cells(self, num_rows: int) -> list[str]:
        """Returns the row of a table: key, type, then one cell per row."""
        values = [self.value[i] for i in range(num_rows)] if self.is_per_row else [self.value] * num_rows
        return [format_key(self.path[0] if len(self.path) == 1 else self.path), self.type, *map(format_cell, values)]


def iter_columns(content: TensorDictBase) -> Iterator[Column]:
    """Yields every leaf of a tensordict or tensorclass, in the order of its keys."""
    from tdserve.structure.captures.capture import capture  # imports torch

    captured = capture(content)
    has_rows = bool(captured.spec.batch_size)
    if () in captured.spec.packed:
        yield _make_packed_column(("",), captured.spec.root, captured.values[()])
    for key in captured.spec.keys(include_nested=True):
        path = (key,) if isinstance(key, str) else key
        entry = captured.spec.find(path)
        if any(path[:depth] in captured.spec.packed for depth in range(len(path))):
            continue
        if isinstance(entry, Node) and entry.inner is not None:
            yield _make_packed_column(path, entry, captured.values[path])
        elif isinstance(entry, ValueLeaf) and entry.ragged is not None:
            held = captured.values[path]
            shown = [_to_plain(element) for element in held] if entry.batch_size else _to_plain(held)
            yield Column(path, entry.ragged.dtype or "value", shown, has_rows and bool(entry.batch_size))
        elif isinstance(entry, TensorLeaf):
            yield Column(path, entry.dtype, captured.tensors[path], has_rows)
        elif isinstance(entry, ValueLeaf):
            yield Column(path, "value", captured.values[path], has_rows and entry.per_row)


def _make_packed_column(path: Path, node: Node, elements: Any) -> Column:
    """Returns a part whose rows differ in structure as dicts."""
    from tdserve.structure.stacks.elements import unwrap  # imports torch

    is_listed, elements = bool(node.batch_size), unwrap(elements)
    found = [_to_plain(element) for element in elements] if is_listed else _to_plain(elements)
    return Column(path, node.tensorclass or "tensordict", found, is_listed)


def _to_plain(entry: Any) -> Any:
    """Returns an entry of any kind as dicts and lists."""
    from tensordict import NonTensorData, NonTensorStack  # imports torch

    from tdserve.structure.tensordicts.instances import find_content

    if isinstance(entry, list):
        return [_to_plain(row) for row in entry]
    if isinstance(entry, NonTensorData):
        return entry.data
    if isinstance(entry, NonTensorStack) or getattr(entry, "is_nested", None) is False:
        return entry.tolist()
    if getattr(entry, "is_nested", False):
        return [part.tolist() for part in entry.unbind()]
    if hasattr(entry, "tensordicts"):
        return [_to_plain(row) for row in entry.tensordicts]
    if type(entry).__name__ != "TensorDict":
        return _to_plain(find_content(entry))
    return {key: _to_plain(item) for key, item in entry.items()}


def nest_leaves(leaves: Iterable[Column]) -> dict[str, Any]:
    """Leaves as dicts in dicts."""
    tree: dict[str, Any] = {}
    for leaf in leaves:
        branch = tree
        for part in leaf.path[:-1]:
            branch = branch.setdefault(part, {})
        branch[leaf.path[-1]] = leaf.value
    return tree
