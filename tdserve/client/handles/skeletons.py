"""A store as a local tensordict of meta tensors: what tensordict does to that, it does to the rows.

So views follow tensordict's own rules for batch sizes, names and keys, without a second copy of these rules here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict, is_non_tensor, is_tensor_collection

from tdserve.structure.building.build import build
from tdserve.structure.tensordicts.entries import get_entry
from tdserve.structure.tensors.torch_types import from_torch, to_torch
from tdserve.structure.trees.nodes import Entry, Node, Path, TensorLeaf, ValueLeaf
from tdserve.structure.trees.tree import Spec

_EMPTY = ""
"""Key below which an empty node is found among the sources."""


class Skeleton(NamedTuple):
    """A structure, and where in a store its leaves come from. It is never changed.

    Attributes:
        stored: Structure of the store.
        td: Tensordict or tensorclass instance of meta tensors; ragged leaves have size 0 where they differ.
        sources: For each leaf, by its key, the number of its stored path; without batch dimensions.
        paths: Stored paths, by number. Rows that carry their own structure are stored at a single path, and read as
            one.
    """

    stored: Spec
    td: Any
    sources: TensorDict
    paths: tuple[Path, ...]

    def list_paths(self, key: Path) -> list[Path]:
        """Lists the stored paths to read for an entry: ``()`` for everything, none for an entry without leaves.

        Args:
            key: Key of an entry of the skeleton; ``()`` for all of it.
        """
        found = self.find_source(key) if key else self.sources
        numbers = _list_numbers(found) if isinstance(found, TensorDict) else [int(found)]
        return list(_cover(self.stored.root, (), {self.paths[number] for number in numbers}))

    def iter_leaves(self) -> Iterator[tuple[Path, Path]]:
        """Yields each leaf's key and its stored path."""
        for key in self.sources.keys(True, True):
            path = key if isinstance(key, tuple) else (key,)
            yield path, self.paths[int(self.find_source(path))]

    def list_hollow_nodes(self, key: Path = ()) -> list[Path]:
        """Lists nodes at or below a key that are empty here and do not exist in the store: nothing is read for them."""
        found = self.find_source(key) if key else self.sources
        return list(_iter_hollow(found, key)) if isinstance(found, TensorDict) else []

    def make_spec(self) -> Spec:
        """Returns the structure as a spec."""
        return Spec(self._make_node(self.td, self.sources))

    def find_source(self, key: Path) -> Any:
        """Returns the number of a leaf's stored path, or those of all leaves of a node."""
        return self.sources.get(key)

    def _make_node(self, td: Any, sources: Any) -> Node:
        kind = None if isinstance(td, TensorDict) else f"{type(td).__module__}.{type(td).__qualname__}"
        names = tuple(td.names) if any(name is not None for name in td.names) else None
        found = []
        for key in td.keys():  # noqa: SIM118
            source = None if sources is None else sources.get(key, None)
            found.append((key, self._make_entry(get_entry(td, (key,)), source)))
        return Node(tuple(td.batch_size), names, self.stored.root.device, kind, tuple(found))

    def _make_entry(self, item: Any, source: Any) -> Entry:
        stored = self.stored.find(self.paths[int(source)]) if isinstance(source, torch.Tensor) else None
        if isinstance(stored, ValueLeaf) and stored.ragged is not None:
            batch_size = tuple(item.shape)[: item.ndim - len(stored.ragged.shape)]
            return ValueLeaf(batch_size, stored.per_row, stored.ragged)
        if isinstance(item, torch.Tensor):
            return TensorLeaf(from_torch(item.dtype), tuple(item.shape))
        if isinstance(stored, ValueLeaf):
            return ValueLeaf(tuple(item.batch_size), stored.per_row)
        if is_tensor_collection(item) and not is_non_tensor(item):
            return self._make_node(item, source if isinstance(source, TensorDict) else None)
        return ValueLeaf(tuple(getattr(item, "batch_size", ())), False)


def get_skeleton(spec: Spec) -> Skeleton:
    """Returns the skeleton of a store, cached with its structure.

    Raises:
        NotSupportedError: A tensorclass is not known in this process.
    """
    kept: Skeleton | None = spec.memo.get("skeleton")
    if kept is None:
        plain = Spec(_simplify(spec.root))
        tensors = {
            path: torch.empty(leaf.shape, dtype=to_torch(leaf.dtype), device="meta") for path, leaf in plain.tensors
        }
        paths: list[Path] = []
        sources = _number_paths(spec.root, (), paths)
        td = build(plain, tensors, {path: None for path, _ in plain.values})
        kept = spec.memo["skeleton"] = Skeleton(spec, td, sources, tuple(paths))
    return kept


def _iter_hollow(sources: TensorDict, path: Path) -> Iterator[Path]:
    entries = list(sources.items())
    if not entries and path:
        yield path
    for key, entry in entries:
        if isinstance(entry, TensorDict):
            yield from _iter_hollow(entry, (*path, key))


def _simplify(node: Node) -> Node:
    """Returns a node without stacks, packed nodes, ragged leaves, values shared by all rows, and devices."""
    names = node.names if node.names is not None and len(node.names) == len(node.batch_size) else None
    entries = tuple((key, _simplify_entry(entry)) for key, entry in node.entries)
    return Node(node.batch_size, names, None, node.tensorclass, entries)


def _simplify_entry(entry: Entry) -> Entry:
    if isinstance(entry, Node):
        return _simplify(entry)
    if not isinstance(entry, ValueLeaf):
        return entry
    ragged = entry.ragged
    if ragged is None or not ragged.dtype:
        return ValueLeaf(entry.batch_size, False)
    return TensorLeaf(ragged.dtype, entry.batch_size + tuple(max(0, size) for size in ragged.shape))


def _number_paths(node: Node, path: Path, paths: list[Path], packed: int | None = None) -> TensorDict:
    """Numbers the stored paths; all leaves of a packed node get the same number."""
    if node.inner is not None and packed is None:
        packed = _number_path(path, paths)
    found: dict[str, Any] = {}
    for key, entry in node.entries:
        below = (*path, key)
        if isinstance(entry, Node):
            found[key] = _number_paths(entry, below, paths, packed)
        else:
            found[key] = torch.tensor(_number_path(below, paths) if packed is None else packed)
    if not found:
        found[_EMPTY] = torch.tensor(_number_path(path, paths) if packed is None else packed)
    return TensorDict(found, [])


def _number_path(path: Path, paths: list[Path]) -> int:
    paths.append(path)
    return len(paths) - 1


def _list_numbers(sources: TensorDict) -> list[int]:
    numbers: Any = sources.values(True, True)
    return [int(number) for number in numbers]


def _cover(entry: Entry, path: Path, wanted: set[Path]) -> Iterator[Path]:
    """Yields the fewest paths that cover all wanted ones and no others."""
    if path in wanted:
        yield path
    elif isinstance(entry, Node) and entry.inner is None:
        below = [list(_cover(child, (*path, key), wanted)) for key, child in entry.entries]
        is_whole = all(len(part) == 1 and len(part[0]) == len(path) + 1 for part in below)
        yield from [path] if below and is_whole else [found for part in below for found in part]
