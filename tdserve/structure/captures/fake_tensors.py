"""Blank tensordicts of meta and fake tensors: structure without content."""

from __future__ import annotations

import torch

from tdserve.base.errors import NotSupportedError
from tdserve.structure.captures.captured import Captured
from tdserve.structure.tensors.file_tensors import FileTensor
from tdserve.structure.torch_private import FakeTensor, unset_fake_temporarily
from tdserve.structure.trees.matching import quote
from tdserve.structure.trees.tree import Spec

META = "meta"
"""Device of a stored structure that was made of such tensors: until it is first written, it reads as meta tensors."""


def has_no_content(item: torch.Tensor) -> bool:
    """Returns whether a tensor has only a shape and a dtype."""
    return (item.is_meta and type(item) is not FileTensor) or isinstance(item, FakeTensor)


def to_meta(item: torch.Tensor) -> torch.Tensor | None:
    """Returns a fake or meta tensor as a plain meta tensor; None if its sizes are symbols."""
    if not all(type(size) is int for size in item.shape):
        return None
    with unset_fake_temporarily():
        return torch.empty(item.shape, dtype=item.dtype, device="meta")


def to_meta_capture(captured: Captured, *, store: str) -> Captured | None:
    """Returns the capture of a tensordict without content, with its spec on the meta device; None if it has content.

    Raises:
        NotSupportedError: Some of its tensors have content and some have none; the error names one that has none.
    """
    blank = [path for path, tensor in captured.tensors.items() if has_no_content(tensor)]
    if not blank:
        return None
    if len(blank) < len(captured.tensors):
        feature = f"a meta tensor at key {quote(blank[0])} of store {store!r}, besides tensors with content,"
        raise NotSupportedError(feature=feature, reason="make the store with memmap_like(), and write what there is")
    return captured._replace(spec=captured.spec.with_device(META), tensors={})


def to_structure_capture(captured: Captured) -> Captured:
    """Returns a capture whose tensors do not matter, without the meta device."""
    return captured._replace(spec=captured.spec.with_device("cpu")) if captured.spec.root.device == META else captured


def is_blank(stored: Spec, version: int) -> bool:
    """Returns whether no tensors have been written into a store of this structure yet.

    Args:
        stored: Its whole structure.
        version: Version of its content. If the structure has no content, only non-tensor values are written at first.
    """
    return stored.root.device == META and version <= (1 if stored.values else 0)
