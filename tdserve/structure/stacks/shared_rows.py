"""Rows of a lazy stack that share memory, so that none of them can be written without the others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDict, is_tensor_collection

from tdserve.structure.tensordict_private import entries_of, is_value_class
from tdserve.structure.tensordicts.instances import strip_wrappers
from tdserve.structure.tensors.plain_tensors import is_dense
from tdserve.structure.trees.nodes import Path


def find_shared(stack: LazyStackedTensorDict, path: Path) -> Path | None:
    """Returns the path of a tensor whose memory another one in the stack has too; None if there is none.

    Of a tensor that is not contiguous only the first element is looked for.

    Args:
        stack: Its rows can be written.
        path: Path of the stack.
    """
    spans = sorted(
        (str(item.device), item.data_ptr(), item.nbytes if item.is_contiguous() else item.element_size(), below)
        for below, item in _iter_tensors(stack, path)
        if is_dense(item) and not item.is_meta and item.numel()
    )
    end: tuple[str, int] = ("", 0)
    for device, start, nbytes, below in spans:
        if start and (device, start) < end:
            return below
        end = max(end, (device, start + nbytes))
    return None


def _iter_tensors(td: Any, path: Path) -> Iterator[tuple[Path, torch.Tensor]]:
    td = strip_wrappers(td)
    if isinstance(td, NonTensorStack) or is_value_class(type(td)):
        return
    if isinstance(td, LazyStackedTensorDict):
        for row in td.tensordicts:
            yield from _iter_tensors(row, path)
    elif isinstance(td, TensorDict):
        for key, item in entries_of(td).items():
            if isinstance(item, torch.Tensor):
                yield (*path, key), item
            elif is_tensor_collection(item) and not is_value_class(type(item)):
                yield from _iter_tensors(item, (*path, key))
