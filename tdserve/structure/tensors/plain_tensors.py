"""Takes tensors of any kind as plain ones, and refuses those that have no bytes of their own to be sent or filled.

Torch lets such tensors pass almost everywhere: it shows a freed storage as zeros or as other memory, and a tensor that
wraps others as a plain one without memory. So each is looked at where content is captured, before anything is written.
"""

from __future__ import annotations

from contextlib import nullcontext
from operator import mul
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from tdserve.structure.tensors.array_tensors import make_refusal
from tdserve.structure.tensors.torch_types import FROM_TORCH
from tdserve.structure.torch_private import FakeTensor, is_of_transform
from tdserve.structure.trees.nodes import Path

LOWEST_ADDRESS = 1 << 32
"""Memory lies above it, on devices too; a tensor in a freed storage seems to lie at its offset. Below it the storage is
asked, which takes longer."""

_BLANK = "it has no content; init_remote(), memmap_like() and create_replay() accept its structure"
"""Why a meta or fake tensor is refused."""


def to_plain(item: torch.Tensor, path: Path = (), *, store: str = "") -> torch.Tensor:
    """Returns a dense tensor as one of class ``torch.Tensor`` without a history; it shares the memory.

    Args:
        item: The tensor.
        path, store: For errors.

    Raises:
        NotSupportedError: It has no elements that can be sent. The error names the key and the kind of tensor.
    """
    kind = type(item)
    if not is_dense(item):
        raise make_refusal(_describe_kind(item), path, store, _suggest_remedy(item))
    if kind is not torch.Tensor:
        _check_class(item, kind, path, store)
        item = item.detach().as_subclass(torch.Tensor)
    elif item.is_meta:
        raise make_refusal("a meta tensor", path, store, _BLANK)
    elif item.requires_grad:
        item = item.detach() if not is_of_transform(item) else check_memory(item, path, store=store)
    return item if is_in_memory(item) else check_memory(item, path, store=store)


def to_host(given: Any) -> Any:
    """Returns numbers that may be given as a tensor in memory that NumPy can read; anything else as it is.

    Raises:
        NotSupportedError: It is a tensor whose elements cannot be read; NumPy would crash, or take other memory for it.
    """
    if isinstance(given, torch.Tensor):
        return to_plain(given).cpu().resolve_conj().resolve_neg()
    return given.detach().cpu() if hasattr(given, "detach") else given


def write_in_place(place: torch.Tensor, content: torch.Tensor) -> None:
    """Copies content into a tensor. What was made in inference mode can be written there only; of others torch counts
    changes outside of it."""
    with torch.inference_mode() if place.is_inference() else nullcontext():
        place.copy_(content)


def is_dense(item: torch.Tensor) -> bool:
    """Returns whether a tensor is dense, and of a shape and a dtype that are known."""
    is_strided = item.layout is torch.strided and item.dtype in FROM_TORCH and not item.is_nested
    return is_strided and (type(item) is torch.Tensor or not is_lazy(item))


def check_memory(item: torch.Tensor, path: Path = (), *, store: str = "") -> torch.Tensor:
    """Returns a tensor, of any kind; arguments as in ``to_plain``.

    Torch itself reads a freed storage without a check: a copy of the tensor before it is captured may crash.

    Raises:
        NotSupportedError: It is a plain dense tensor, and not all of its elements are in memory.
    """
    if type(item) is not torch.Tensor or is_in_memory(item) or item.is_meta or not is_dense(item):
        return item
    if is_of_transform(item):
        reason = "it has no bytes of its own: write what the transform returns, outside of it"
        raise make_refusal("a tensor inside torch.vmap or another transform of torch.func", path, store, reason)
    held = item.untyped_storage().nbytes()
    reason = f"its storage has {held} bytes, fewer than the tensor needs; gather the parameters first (FSDP)"
    raise make_refusal("a tensor whose memory was freed", path, store, reason)


def is_in_memory(item: torch.Tensor) -> bool:
    """Returns whether all elements of a plain dense tensor are in memory, in a tenth of a microsecond."""
    try:
        return item.data_ptr() >= LOWEST_ADDRESS or _has_whole_storage(item)
    except RuntimeError:  # of a transform of torch.func, or of another kind without a storage
        return False


def _has_whole_storage(item: torch.Tensor) -> bool:
    if not item.nbytes:
        return True
    num_elements = sum(map(mul, item.shape, item.stride())) - sum(item.stride()) + 1 + int(item.storage_offset())
    storage = item.untyped_storage()
    return storage.nbytes() >= num_elements * item.element_size() and storage.data_ptr() != 0


def _check_class(item: torch.Tensor, kind: type[Any], path: Path, store: str) -> None:
    if item.is_meta or issubclass(kind, FakeTensor):
        raise make_refusal("a meta tensor" if item.is_meta else "a fake tensor", path, store, _BLANK)
    if getattr(kind, "__torch_dispatch__", None) is torch.Tensor.__torch_dispatch__:
        return
    reason = "it wraps others and has no bytes of its own"
    if hasattr(kind, "full_tensor"):
        reason += "; as weights tdserve.dtensor publishes it, elsewhere send its .full_tensor(), or its .to_local()"
    raise make_refusal(f"a tensor of class {kind.__name__}", path, store, reason)


def _describe_kind(item: torch.Tensor) -> str:
    if is_lazy(item):
        return "an uninitialized parameter"
    if item.is_nested or item.layout is torch.jagged:
        return "a jagged tensor"
    if item.layout is not torch.strided:
        return f"a {str(item.layout).removeprefix('torch.')} tensor"
    return f"a tensor of dtype {str(item.dtype).removeprefix('torch.')}"


def _suggest_remedy(item: torch.Tensor) -> str:
    if is_lazy(item):
        return "run the module once, so that it gets a shape"
    if item.layout is not torch.strided:
        return "only dense and nested tensors with memory can be sent; send its .to_dense()"
    if item.is_quantized:
        return "its scale is not among its bytes; send its .dequantize()"
    return "only elements of whole bytes that torch can copy can be sent; send its .view(torch.uint8)"
