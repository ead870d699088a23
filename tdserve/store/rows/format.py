"""tensordict's memmap folder format as a plan of the leaves' files. Pure: no I/O, no torch.

The plan is made here and not by ``TensorDict.memmap_like``, because the process that creates the folder cannot import a
client's tensorclass. Tests compare it with what tensordict writes. Leaves that the format cannot carry go to numbered
files in the folder ``extra``, with an index.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tdserve.structure.trees.tree import Node, Path, Spec, TensorLeaf

ROWS = "rows"
EXTRA = "extra"
INDEX_FILE = "index.json"

_META_FILE = "meta.json"
_SUFFIX = ".memmap"
_MAX_NAME_BYTES = 255
"""NAME_MAX of every Linux file system that we know."""

_MAX_PATH_BYTES = 2048
"""Longest path below ``rows``: tensordict opens files by their whole path, and Linux allows 4,095 bytes including the
root's."""

UNREADABLE_DTYPES = frozenset({"float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"})
"""tensordict 0.15 writes these dtypes, and then cannot read the whole folder."""

LOST_KEYS = frozenset({"shape", "device", "_type"})
"""``meta.json`` has entries of its own under these names, so a key of such a name is lost."""

NAMES_KEY = "_names"
"""Key of the dimension names in a folder's metadata."""

_UNSAFE = {ord(c): f"%{ord(c):02X}" for c in [*'/<>:"|?*\\ %\x7f', *map(chr, range(32))]}


@dataclass
class Folder:
    """One folder of the plan.

    Attributes:
        name: Its name in its parent.
        files: (file name, path of the leaf, the leaf).
        texts: (file name, content) of small files to write whole.
        folders: The folders inside.
    """

    name: str
    files: list[tuple[str, Path, TensorLeaf]] = field(default_factory=list)
    texts: list[tuple[str, bytes]] = field(default_factory=list)
    folders: list[Folder] = field(default_factory=list)

    def walk(self) -> Iterator[Folder]:
        """Yields this folder and all folders inside."""
        yield self
        for folder in self.folders:
            yield from folder.walk()


@dataclass(frozen=True)
class FolderPlan:
    """Every folder and file of a spec's tensor leaves.

    Attributes:
        rows: The folder that tensordict reads.
        extra: The folder of the other leaves; None if there are none.
    """

    rows: Folder
    extra: Folder | None

    @property
    def extra_paths(self) -> tuple[Path, ...]:
        """The leaves in ``extra``, in canonical order."""
        return tuple(path for _, path, _ in self.extra.files) if self.extra else ()


def plan(spec: Spec) -> FolderPlan:
    """Returns the plan of a spec; computed once per spec object."""
    made: FolderPlan | None = spec.memo.get("store.rows.format.plan")
    if made is None:
        rows = Folder(ROWS)
        _plan_node(spec.root, rows, (), 0)
        carried = {path for folder in rows.walk() for _, path, _ in folder.files}
        left = [(path, leaf) for path, leaf in spec.tensors if path not in carried]
        made = FolderPlan(rows, _plan_extra(left) if left else None)
        spec.memo["store.rows.format.plan"] = made
    return made


def encode_key(key: str) -> str:
    """Returns a key as tensordict spells it in file names (``robust_key=True``, its default)."""
    if not key:
        return "%"
    return "%2E" * len(key) if key in (".", "..") else key.translate(_UNSAFE)


def _plan_node(node: Node, folder: Folder, path: Path, num_path_bytes: int) -> None:
    if node.tensorclass is not None and not node.is_typed:
        folder.texts.append((_META_FILE, _dump({"_type": f"<class '{node.tensorclass}'>"})))
        inner = Folder("_tensordict")
        folder.folders.append(inner)
        folder, num_path_bytes = inner, num_path_bytes + len("/_tensordict")
    meta: dict[str, Any] = {}
    for key, entry in node.entries:
        if isinstance(entry, TensorLeaf):
            name = encode_key(key) + _SUFFIX
            if entry.dtype not in UNREADABLE_DTYPES and _is_storable(key, name, node, num_path_bytes):
                folder.files.append((name, (*path, key), entry))
                meta[key] = _make_leaf_meta(entry)
    taken = {_META_FILE, *(name for name, _, _ in folder.files)}
    for key, entry in node.entries:
        if isinstance(entry, Node):
            name = encode_key(key)
            if name not in taken and _is_storable(key, name, node, num_path_bytes):
                child = Folder(name)
                folder.folders.append(child)
                is_class = entry.tensorclass is not None and not entry.is_typed
                meta[key] = {"type": str(entry.tensorclass).rpartition(".")[2] if is_class else "TensorDict"}
                _plan_node(entry, child, (*path, key), num_path_bytes + len(name.encode()) + 1)
    folder.texts.append((_META_FILE, _dump(_sort_keys(meta, node) | _make_own_meta(node, meta))))


def _is_storable(key: str, name: str, node: Node, num_path_bytes: int) -> bool:
    if key in LOST_KEYS or (key == NAMES_KEY and node.names is not None):
        return False
    try:
        nbytes = len(name.encode())
    except UnicodeEncodeError:  # lone surrogates name no file
        return False
    return nbytes <= _MAX_NAME_BYTES and num_path_bytes + nbytes <= _MAX_PATH_BYTES


def _make_leaf_meta(leaf: TensorLeaf) -> dict[str, Any]:
    return {"device": "cpu", "shape": list(leaf.shape), "dtype": f"torch.{leaf.dtype}", "is_nested": False}


def _make_own_meta(node: Node, meta: dict[str, Any]) -> dict[str, Any]:
    # the device is always cpu, as in what tensordict writes: its reader would otherwise need the very device
    own: dict[str, Any] = {
        "shape": list(node.batch_size),
        "device": "cpu",
        "_type": "<class 'tensordict._td.TensorDict'>",
        "_format_version": 1,
        "_class": "tensordict:TensorDict",
    }
    if node.names is not None:
        own[NAMES_KEY] = list(node.names)
    # a key named like one of the last two keeps its entry; the reader then goes by _type
    return {name: value for name, value in own.items() if name not in meta}


def _sort_keys(meta: dict[str, Any], node: Node) -> dict[str, Any]:
    return {key: meta[key] for key, _ in node.entries if key in meta}


def _plan_extra(left: list[tuple[Path, TensorLeaf]]) -> Folder:
    folder = Folder(EXTRA)
    index: list[dict[str, Any]] = []
    for number, (path, leaf) in enumerate(left):
        name = f"{number:06d}{_SUFFIX}"
        folder.files.append((name, path, leaf))
        index.append({"key": list(path), "file": name, "dtype": leaf.dtype, "shape": list(leaf.shape)})
    folder.texts.append((INDEX_FILE, _dump(index)))
    return folder


def _dump(value: Any) -> bytes:
    return json.dumps(value).encode()
