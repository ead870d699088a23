"""The safetensors layout of a version file, computed from a spec. Pure: no I/O, no torch.

A file has a header length (8 bytes, little-endian), a header (JSON, padded with spaces so that the data starts at a
multiple of 4,096 bytes), and data. safetensors allows no holes, so the leaves are packed, those with the largest
elements first: each is then aligned for its own dtype. What the format cannot express (nesting, dtypes that it has no
name for) is JSON in its metadata, under ``tdserve``.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tdserve.base.errors import CorruptDataError
from tdserve.structure.trees.dtypes import ITEMSIZE
from tdserve.structure.trees.tree import Node, Path, Spec, TensorLeaf

DATA_ALIGNMENT_BYTES = 4096
LENGTH = struct.Struct("<Q")
OWN_KEY = "tdserve"

_SLACK_BYTES = 1024
"""Room for longer metadata in the next version, so that the file can be recycled in place."""

_MAX_HEADER_BYTES = 100_000_000
"""safetensors' own limit."""

_CODES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
}

_STAND_INS: dict[str, tuple[str, tuple[int, ...]]] = {
    "complex32": ("I16", (2,)),
    "complex128": ("I64", (2,)),
    "float8_e8m0fnu": ("U8", ()),
}
"""Dtypes that ``safetensors.torch`` cannot load: the integers that replace them, and the dimensions that this adds."""


def list_leaf_places(spec: Spec) -> list[tuple[Path, int, int]]:
    """Returns every tensor leaf as (path, offset, nbytes), in file order; offsets count from the start of the data."""
    return list(make_layout(spec).slots)


def make_layout(spec: Spec) -> VersionLayout:
    """Returns the layout of a spec; computed once per spec object."""
    made: VersionLayout | None = spec.memo.get("store.weights.version_format.layout")
    if made is None:
        made = spec.memo["store.weights.version_format.layout"] = VersionLayout(spec)
    return made


@dataclass(frozen=True)
class VersionLayout:
    """Positions and header of the version files of one spec."""

    spec: Spec

    @cached_property
    def slots(self) -> tuple[tuple[Path, int, int], ...]:
        """The result of :func:`list_leaf_places`."""
        offset = 0
        slots: list[tuple[Path, int, int]] = []
        for path, leaf in sorted(self.spec.tensors, key=lambda item: (-ITEMSIZE[item[1].dtype], item[0])):
            slots.append((path, offset, leaf.nbytes))
            offset += leaf.nbytes
        return tuple(slots)

    @cached_property
    def offsets(self) -> dict[Path, int]:
        """Offset of each leaf from the start of the data."""
        return {path: offset for path, offset, _ in self.slots}

    @cached_property
    def _frame(self) -> tuple[bytes, bytes]:
        """The header before and after the caller's metadata: the same for every version of this spec."""
        own = _dump(_describe_leaves(self.spec))
        head = f'{{"__metadata__":{{{_dump(OWN_KEY)}:{_dump(own)}'
        leaves = dict(self.spec.tensors)
        tensors = "".join(
            f",{_dump(escape(path))}:{_dump(_describe_leaf(leaves[path], offset, nbytes))}"
            for path, offset, nbytes in self.slots
        )
        return head.encode(), f"}}{tensors}}}".encode()

    def encode_header(self, metadata: dict[str, str]) -> bytes:
        """Returns the JSON header, without padding."""
        head, tail = self._frame
        middle = "".join(f",{_dump(_make_own_name(key))}:{_dump(value)}" for key, value in metadata.items())
        return head + middle.encode() + tail

    def parse(self, header: bytes, *, path: str) -> dict[str, str]:
        """Returns the caller's metadata from a header, padded or not.

        Raises:
            CorruptDataError: It is not the header of a version of this spec. ``path`` is only for the message.
        """
        head, tail = self._frame
        text = header.rstrip(b" ")
        if text.startswith(head) and text.endswith(tail) and len(text) >= len(head) + len(tail):
            try:
                found = json.loads(b"{" + text[len(head) + 1 : len(text) - len(tail)] + b"}")
                return {_make_user_name(key): str(value) for key, value in found.items()}
            except ValueError:
                pass  # reported below
        expected = f"the header of a version with structure {self.spec.fingerprint.hex()[:16]}"
        raise CorruptDataError(path=path, expected=expected, actual=repr(header[:80]))


def compute_data_start(header: bytes) -> int:
    """Returns the start of the data in a fresh file: after the header and some room, at a multiple of 4,096 bytes."""
    needed = LENGTH.size + len(header) + _SLACK_BYTES
    return -(-needed // DATA_ALIGNMENT_BYTES) * DATA_ALIGNMENT_BYTES


def check_header_nbytes(nbytes: int, file_nbytes: int, *, path: str) -> None:
    """Raises CorruptDataError unless a header of ``nbytes`` fits into a file of ``file_nbytes``."""
    is_inside = 2 <= nbytes <= min(_MAX_HEADER_BYTES, file_nbytes - LENGTH.size)
    if not is_inside or (LENGTH.size + nbytes) % DATA_ALIGNMENT_BYTES:
        expected = f"an aligned header inside the file's {file_nbytes} bytes"
        raise CorruptDataError(path=path, expected=expected, actual=f"a header of {nbytes} bytes")


def escape(path: Path) -> str:
    """Returns a path as one name: keys joined by dots, dots and backslashes in keys escaped; never ``__metadata__``."""
    name = ".".join(key.replace("\\", "\\\\").replace(".", "\\.") for key in path)
    return "\\" + name if name == "__metadata__" else name


def _describe_leaf(leaf: TensorLeaf, offset: int, nbytes: int) -> dict[str, Any]:
    code, more = (_CODES[leaf.dtype], ()) if leaf.dtype in _CODES else _STAND_INS[leaf.dtype]
    return {"dtype": code, "shape": [*leaf.shape, *more], "data_offsets": [offset, offset + nbytes]}


def _describe_leaves(spec: Spec) -> dict[str, Any]:
    leaves = [
        {"name": escape(path), "key": list(path), "dtype": leaf.dtype, "shape": list(leaf.shape)}
        for path, leaf in spec.tensors
    ]
    return {
        "format_version": 1,
        "fingerprint": spec.fingerprint.hex(),
        "nodes": sorted(_describe_nodes(spec.root, ()), key=lambda node: node["key"]),
        "leaves": leaves,
    }


def _describe_nodes(node: Node, path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {"key": list(path), "batch_size": list(node.batch_size), "names": node.names, "tensorclass": node.tensorclass}
    ]
    for key, entry in node.entries:
        if isinstance(entry, Node):
            found += _describe_nodes(entry, (*path, key))
    return found


def _make_own_name(key: str) -> str:
    # a caller's "tdserve" must not hide ours
    return f"{OWN_KEY}:{key}" if key == OWN_KEY or key.startswith(f"{OWN_KEY}:") else key


def _make_user_name(key: str) -> str:
    return key.removeprefix(f"{OWN_KEY}:")


def _dump(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
