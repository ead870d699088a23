"""The part of a version of weights that is sent: all of it, some leaves, or leaves in another dtype. No torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tdserve.base.errors import RemoteProtocolError
from tdserve.structure.trees.changes import replace_entries
from tdserve.structure.trees.nodes import Entry, Path
from tdserve.structure.trees.tree import Spec

FLOATING = ("float16", "bfloat16", "float32", "float64")
"""Dtypes that are converted, and targets of a conversion. Scaled 8-bit floats are meaningless without their scale."""


def convert_floats(spec: Spec, dtype: str) -> Spec:
    """Returns a structure with its floating-point leaves in another dtype; cached with the spec.

    Args:
        spec: The structure.
        dtype: One of ``FLOATING``; "" changes nothing.
    """
    if not dtype:
        return spec
    key = ("sent.converted", dtype)
    found: Spec | None = spec.memo.get(key)
    if found is None:
        changed: dict[Path, Entry] = {
            path: leaf._replace(dtype=dtype)
            for path, leaf in spec.tensors
            if leaf.dtype in FLOATING and leaf.dtype != dtype
        }
        found = spec.memo[key] = Spec(replace_entries(spec.root, changed)) if changed else spec
    return found


def select_leaves(spec: Spec, numbers: Sequence[int]) -> Spec:
    """Returns a structure with some of its tensor leaves, and all other leaves.

    Args:
        spec: The structure.
        numbers: Numbers of the leaves that remain: positions in ``spec.tensors``.
    """
    tensors = spec.tensors
    return spec.select([*(tensors[number][0] for number in numbers), *(path for path, _ in spec.values)])


def encode_numbers(numbers: Sequence[int] | NDArray[np.int64]) -> bytes:
    """Encodes numbers of leaves for a message: uint32 each, little-endian."""
    return np.asarray(numbers, "<u4").tobytes()


def decode_numbers(content: bytes, spec: Spec) -> list[int]:
    """Reverses ``encode_numbers``.

    Raises:
        RemoteProtocolError: They are not ascending numbers of leaves of this structure.
    """
    num_leaves = len(spec.tensors)
    if len(content) % 4 == 0:
        numbers = np.frombuffer(content, "<u4").astype(np.int64)
        if not len(numbers) or (int(numbers[-1]) < num_leaves and bool((numbers[1:] > numbers[:-1]).all())):
            found: list[int] = numbers.tolist()
            return found
    raise RemoteProtocolError(
        expected=f"ascending numbers of {num_leaves} leaves", received=f"{len(content)} bytes: {content[:32].hex()}"
    )
