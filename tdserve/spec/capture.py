"""From a tensordict to its spec, its tensors and its values; looks, copies nothing, changes nothing.

Owns the knowledge of how tensordict and tensorclass instances hold their entries.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    is_tensorclass,
)
from tensordict._td import _SubTensorDict
from tensordict.nn import TensorDictParams
from torch.nn.parameter import is_lazy

from tdserve.errors import InvalidSpecError, NotSupportedError
from tdserve.spec.nodes import MAX_DEPTH, MAX_DIMS, DimNames, Entry, Node, Path, TensorLeaf, ValueLeaf
from tdserve.spec.recall import Recall
from tdserve.spec.torch_types import FROM_TORCH
from tdserve.spec.tree import Spec, quote, show
from tdserve.values import check_value

_NUM_KEPT_SPECS = 512
"""Specs shared between captures of equal structures, so that fingerprints, layouts and recipes are made once."""


_RECALL = Recall()

_NOTHING: dict[str, Any] = {}


class Captured(NamedTuple):
    """What a tensordict holds.

    Attributes:
        spec: The structure; the same object for equal structures, as long as it is kept.
        tensors: Every tensor leaf by path: plain, detached, sharing memory with the tensordict.
        values: Every non-tensor leaf by path; of a leaf with one value per row, the (nested) list of them.
        memo: Whatever others derive from the tensors, for as long as this capture is kept.
    """

    spec: Spec
    tensors: dict[Path, torch.Tensor]
    values: dict[Path, Any]
    memo: dict[str, Any]


def capture(td: Any, *, store: str = "", is_destination: bool = False) -> Captured:
    """Takes a tensordict or tensorclass instance apart.

    Args:
        td: TensorDict (memory-mapped and locked ones too), TensorDictParams, a sub-tensordict, or a tensorclass
            instance.
        store: Only for messages.
        is_destination: True refuses what cannot be written through: conjugate and negative views, expanded leaves and
            sub-tensordicts. False resolves conjugate and negative views into copies, because only bytes travel.

    Raises:
        NotSupportedError: Names the key of a lazy stack, of a jagged, sparse, quantized or meta tensor, of a tensor
            subclass without memory of its own, or of a non-tensor value that cannot travel. Nothing was changed.
        InvalidSpecError: The tensordict contradicts itself (it was made by an unchecked constructor).
    """
    captured, looks = _RECALL.find(td, is_destination)
    if captured is None:
        reader = _Reader(store, is_destination)
        root = reader.node(td, ())
        tensors = reader.tensors
        if looks is not None:
            tensors = {path: tensor.detach() for path, tensor in tensors.items()}
        captured = Captured(_shared_spec(root), tensors, reader.values, {})
        if looks is not None:
            _RECALL.keep(looks, captured)
    found: Captured = captured
    return found


@lru_cache(maxsize=_NUM_KEPT_SPECS)
def _shared_spec(root: Node) -> Spec:
    return Spec(root)


def class_name(kind: type) -> str:
    """The name by which both ends know a tensorclass."""
    return f"{kind.__module__}.{kind.__qualname__}"


@lru_cache(maxsize=64)
def _device_name(device: torch.device) -> str:
    return str(device)


class _Reader:
    """One walk over one tensordict."""

    def __init__(self, store: str, is_destination: bool) -> None:
        self.store = store
        self.is_destination = is_destination
        self.tensors: dict[Path, torch.Tensor] = {}
        self.values: dict[Path, Any] = {}

    def node(self, td: Any, path: Path) -> Node:
        if len(path) >= MAX_DEPTH:
            raise self._refusal("a tensordict", path, f"tensordicts may be nested {MAX_DEPTH} levels deep")
        plain, extra, tensorclass = (td, _NOTHING, None) if type(td) is TensorDict else self._unwrap(td, path)
        batch_size = tuple(plain.batch_size)
        entries: list[tuple[str, Entry]] = []
        for key, item in _items(plain):
            if not key.isascii():
                self._check_key(key, path)
            below = (*path, key)
            kind = type(item)
            if kind is torch.Tensor or issubclass(kind, torch.Tensor):
                entries.append((key, self._tensor(item, kind, below, batch_size)))
            elif kind is TensorDict:
                entries.append((key, self._child(item, below, batch_size)))
            elif kind is NonTensorData or kind is NonTensorStack:
                entries.append((key, self._value(item, below, batch_size)))
            else:
                entries.append((key, self._child(item, below, batch_size)))
        for key, value in extra.items():
            entries.append((key, self._bare_value(value, (*path, key), batch_size)))
        device = plain.device
        return Node(
            batch_size, _names(plain), None if device is None else _device_name(device), tensorclass, tuple(entries)
        )

    def _unwrap(self, td: Any, path: Path) -> tuple[TensorDictBase, dict[str, Any], str | None]:
        """The tensordict inside of a wrapper, non-tensor fields that lie beside it, and the wrapper's class name."""
        kind = type(td)
        if isinstance(td, type):
            raise self._refusal(f"the class {td.__qualname__}", path, "instances travel")
        if kind is TensorDict or (kind is _SubTensorDict and not self.is_destination):
            return td, {}, None
        if kind is TensorDictParams:
            return self._unwrap(td._param_td, path)
        if is_tensorclass(kind):
            if kind._is_non_tensor or getattr(kind, "_pass_through", False):
                raise self._refusal(f"a {kind.__name__}", path, "only NonTensorData and NonTensorStack entries travel")
            inner, _, _ = self._unwrap(td._tensordict, path)
            return inner, td._non_tensordict or {}, class_name(kind)
        if isinstance(td, LazyStackedTensorDict):
            raise self._refusal("a lazy stack", path, "make it dense with torch.stack(list(td)) or td.contiguous()")
        if isinstance(td, TensorDictBase):
            raise self._refusal(f"a {kind.__name__}", path, "convert it with .to_tensordict()")
        raise self._refusal(f"an object of {class_name(kind)}", path, "tensordicts and tensorclasses travel")

    def _child(self, item: Any, path: Path, batch_size: tuple[int, ...]) -> Node:
        node = self.node(item, path)
        if node.batch_size[: len(batch_size)] != batch_size:
            raise self._contradiction(path, node.batch_size, batch_size)
        return node

    def _tensor(self, item: torch.Tensor, kind: type, path: Path, batch_size: tuple[int, ...]) -> TensorLeaf:
        dtype = FROM_TORCH.get(item.dtype)
        if dtype is None or item.is_nested or item.layout is not torch.strided or item.is_meta:
            raise self._refusal(_what(item), path, "only dense tensors with memory travel")
        if kind is not torch.Tensor:
            item = self._plain(item, kind, path)
        elif item.requires_grad:
            item = item.detach()
        shape = tuple(item.shape)
        if shape[: len(batch_size)] != batch_size:
            raise self._contradiction(path, shape, batch_size)
        if len(shape) > MAX_DIMS:
            raise self._refusal(f"a tensor of {len(shape)} dimensions", path, f"at most {MAX_DIMS} are possible")
        if self.is_destination:
            self._check_destination(item, path)
        elif item.is_neg() or (item.is_complex() and item.is_conj()):
            item = item.resolve_neg().resolve_conj()
        self.tensors[path] = item
        return TensorLeaf(dtype, shape)

    def _plain(self, item: torch.Tensor, kind: type, path: Path) -> torch.Tensor:
        if getattr(kind, "_pass_through", False):
            raise self._refusal(
                f"an {kind.__name__}", path, "its shape does not start with the batch size; use a row each"
            )
        if is_lazy(item):
            raise self._refusal("an uninitialized parameter", path, "run the module once, so that it gets a shape")
        if (
            getattr(kind, "__torch_dispatch__", None) is not torch.Tensor.__torch_dispatch__
        ):  # DTensor, fake tensors, quantized ones
            raise self._refusal(
                f"a tensor of class {kind.__name__}", path, "it wraps others and has no bytes of its own"
            )
        return item.detach().as_subclass(torch.Tensor)

    def _check_destination(self, item: torch.Tensor, path: Path) -> None:
        if item.is_neg() or (item.is_complex() and item.is_conj()):
            raise self._refusal("a conjugate or negative view as destination", path, "give its .resolve_conj() clone")
        if not item.is_contiguous() and any(
            stride == 0 and size > 1 for stride, size in zip(item.stride(), item.shape, strict=True)
        ):
            raise self._refusal("an expanded tensor as destination", path, "its elements share memory, give a clone")

    def _value(self, item: Any, path: Path, batch_size: tuple[int, ...]) -> ValueLeaf:
        own = tuple(item.batch_size)
        if own[: len(batch_size)] != batch_size:
            raise self._contradiction(path, own, batch_size)
        is_stack = type(item) is NonTensorStack
        value = item.tolist() if is_stack else item.data
        if is_stack and not _has_rows(value, own):
            raise self._refusal("a ragged NonTensorStack", path, f"it does not have one value per row of {own}")
        for single in _each(value, len(own)) if is_stack else (value,):
            check_value(single, key=show(path))
        self.values[path] = value
        return ValueLeaf(own, is_stack)

    def _bare_value(self, value: Any, path: Path, batch_size: tuple[int, ...]) -> ValueLeaf:
        check_value(value, key=show(path))
        self.values[path] = value
        return ValueLeaf(batch_size, False)

    def _check_key(self, key: str, path: Path) -> None:
        try:
            key.encode()
        except UnicodeEncodeError:
            raise self._refusal(f"the key {key!r}", path, "it is not valid unicode") from None

    def _refusal(self, what: str, path: Path, reason: str) -> NotSupportedError:
        where = f" at key {quote(path)}" if path else ""
        store = f" of store {self.store!r}" if self.store else ""
        return NotSupportedError(feature=f"{what}{where}{store}", reason=reason)

    def _contradiction(self, path: Path, shape: tuple[int, ...], batch_size: tuple[int, ...]) -> InvalidSpecError:
        reason = f"key {quote(path)} has shape {shape}, which does not start with the batch size {batch_size}"
        return InvalidSpecError(store=self.store, reason=reason)


def _items(td: TensorDictBase) -> Iterable[tuple[str, Any]]:
    # the dict itself: TensorDict.items() makes views and unwraps nothing we want unwrapped
    items: Iterable[tuple[str, Any]] = td._tensordict.items() if type(td) is TensorDict else td.items()
    return items


def _names(td: TensorDictBase) -> DimNames | None:
    names = td._td_dim_names if type(td) is TensorDict else td.names
    if names is None or all(name is None for name in names):
        return None
    return tuple(names)


def _what(item: torch.Tensor) -> str:
    if item.is_nested or item.layout is torch.jagged:
        return "a jagged tensor"
    if item.layout is not torch.strided:
        return f"a {str(item.layout).removeprefix('torch.')} tensor"
    if item.is_meta:
        return "a meta tensor"
    return f"a tensor of dtype {str(item.dtype).removeprefix('torch.')}"


def _has_rows(value: Any, batch_size: tuple[int, ...]) -> bool:
    if not batch_size:
        return True
    if not isinstance(value, list) or len(value) != batch_size[0]:
        return False
    return len(batch_size) == 1 or all(_has_rows(row, batch_size[1:]) for row in value)


def _each(value: Any, num_dims: int) -> Iterable[Any]:
    if num_dims == 0:
        return (value,)
    if num_dims == 1:
        return list(value)
    return [single for row in value for single in _each(row, num_dims - 1)]
