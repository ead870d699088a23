"""Stores as meta or fake tensors: their structure, without their content."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from tdserve.base.errors import NotSupportedError
from tdserve.client.content.padding import Pad, padded
from tdserve.client.tensordicts.memmap.arguments import named_device
from tdserve.client.transfers.read import on_cpu
from tdserve.structure.build import build
from tdserve.structure.entries import change_tensors
from tdserve.structure.state import mark_of, marked, restored
from tdserve.structure.torch_private import FakeTensor, FakeTensorMode, unset_fake_temporarily
from tdserve.structure.torch_types import to_torch
from tdserve.structure.tree import Path, Spec

FetchValues = Callable[[Sequence[Path]], "dict[Path, Any]"]
"""Reads the leaves of these paths that are stored value by value."""


def is_imitation(device: torch.device | str | int | None, mode: FakeTensorMode | None) -> bool:
    """Whether a tensordict on this device, under this mode, has tensors without content."""
    return mode is not None or (device is not None and named_device(device).type == "meta")


def imitate(
    spec: Spec,
    fetch_values: FetchValues,
    *,
    device: torch.device | str | int | None,
    mode: FakeTensorMode | None,
    pad: Pad = None,
) -> Any:
    """A tensordict whose tensors have no content; its non-tensor values are there.

    Args:
        spec: The structure.
        fetch_values: For non-tensor values, which are no tensors to imitate, and for ragged tensors: how large they are
            is part of their content.
        device: Where the tensors seem to be; None is the CPU.
        mode: Makes fake tensors; without one ``device`` is ``"meta"``.
        pad: As in ``load_memmap``.

    Raises:
        NotSupportedError: There is a nested tensor that torch, or this ``mode``, cannot make without content.
    """
    wanted = None if device is None else named_device(device)
    with nullcontext() if mode is None else mode:
        tensors = {
            path: torch.empty(leaf.shape, dtype=to_torch(leaf.dtype), device=wanted) for path, leaf in spec.tensors
        }

    def without_content(leaf: torch.Tensor) -> torch.Tensor:
        if leaf.is_meta or isinstance(leaf, FakeTensor):
            return leaf
        if leaf.is_nested and leaf.layout is torch.strided:
            reason = "torch has none: store it in the layout torch.jagged, or load it with its content"
            raise NotSupportedError(feature="a strided nested tensor without content", reason=reason)
        if mode is None:
            return marked(leaf.to("meta"), *mark_of(leaf))
        if leaf.is_nested and mode.shape_env is None:
            reason = "its sizes are symbols: use FakeTensorMode(shape_env=ShapeEnv()), or device='meta'"
            raise NotSupportedError(feature="a jagged tensor under this FakeTensorMode", reason=reason)
        content = leaf.detach()  # of which the sizes are known, but for those of a nested one
        return marked(mode.from_tensor(content, static_shapes=None if leaf.is_nested else True), *mark_of(leaf))

    with unset_fake_temporarily():  # else what arrives would be made of fake memory
        values = fetch_values([path for path, _ in spec.values]) if spec.values else {}
        shown = on_cpu(spec) if wanted is None else spec.with_device(str(wanted))
        columns = padded(shown, tensors, values, pad)
        td = build(columns.spec.without_state, columns.tensors, columns.values)
        has_tensors = spec.has_ragged or any(leaf.is_unbatched for _, leaf in spec.values)
        td = change_tensors(td, without_content) if has_tensors else td
        return restored(td, columns.spec.root) if columns.spec.has_state else td
