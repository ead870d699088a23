"""From a tensordict to its spec, its tensors and its values; looks, copies nothing, changes nothing.

Owns the knowledge of how tensordict and tensorclass instances hold their entries.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

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
from tdserve.spec.captured import Captured, EncodedValues, conformed, shared_spec
from tdserve.spec.elements import elements_of, flat_elements, nested_leaf, values_of
from tdserve.spec.instances import class_name
from tdserve.spec.live_values import LiveEntry
from tdserve.spec.nodes import (
    MAX_DEPTH,
    MAX_DIMS,
    PACKED,
    DimNames,
    Entry,
    Node,
    Path,
    TensorLeaf,
    ValueLeaf,
)
from tdserve.spec.pieces import Jagged
from tdserve.spec.recall import Recall
from tdserve.spec.stacks import Part, known_of, stacked
from tdserve.spec.torch_types import FROM_TORCH
from tdserve.spec.tree import Spec, quote, show
from tdserve.values import check_values, encode_many

__all__ = ["Captured", "capture", "capture_packed"]

_RECALL = Recall()

_NOTHING: dict[str, Any] = {}


def capture(
    td: Any,
    *,
    store: str = "",
    is_destination: bool = False,
    like: Spec | None = None,
    allow_pickle: bool = False,
) -> Captured:
    """Takes a tensordict or tensorclass instance apart.

    Args:
        td: TensorDict (memory-mapped and locked ones too), TensorDictParams, a sub-tensordict, a lazy stack, or a
            tensorclass instance.
        store: Only for messages.
        is_destination: True refuses what cannot be written through: conjugate and negative views, expanded leaves and
            sub-tensordicts. False resolves conjugate and negative views into copies, because only bytes travel.
        like: A structure, of any number of rows, that it is taken apart for: what is ragged or packed there is ragged
            or packed in the result, and where ``td`` has that in another form, it gets the form that is asked for.
        allow_pickle: Whether non-tensor values of any type are let through; those of a destination are in any case.

    Raises:
        NotSupportedError: Names the key of a sparse, quantized or meta tensor, of a tensor subclass without memory of
            its own, or of a non-tensor value that cannot travel. Nothing was changed.
        InvalidSpecError: The tensordict contradicts itself (it was made by an unchecked constructor).
    """
    if like is not None and like.packed:
        reader = _Reader(store, is_destination, like.packed, checks=not (allow_pickle or is_destination))
        is_one = like.root.inner is not None and not like.root.batch_size
        root = reader.node(td, (), () if is_one else None)  # its own dimensions are then those of the element
        return conformed(Captured(shared_spec(root), reader.tensors, reader.values, {}), like)
    captured, looks = _RECALL.find(td, is_destination)
    if captured is None:
        reader = _Reader(store, is_destination, checks=not (allow_pickle or is_destination))
        root = reader.node(td, ())
        tensors = reader.tensors
        if looks is not None:
            tensors = {path: tensor.detach() for path, tensor in tensors.items()}
        captured = Captured(shared_spec(root), tensors, reader.values, {})
        if looks is not None:
            _RECALL.keep(looks, captured)
    found: Captured = captured
    is_plain = like is None or not (like.has_ragged or found.spec.has_ragged)
    return found if like is None or is_plain else conformed(found, like)


def capture_packed(
    td: Any, batch_size: tuple[int, ...], *, store: str = "", allow_pickle: bool = False
) -> tuple[Node, Any]:
    """Takes a tensordict apart into elements that describe themselves.

    Args:
        td: As of ``capture``.
        batch_size: Of the elements: the first dimensions of its own, or () for itself as the only one.
        store: Only for messages.
        allow_pickle: As of ``capture``.

    Returns:
        What is known of the elements, and the elements, as nested lists.

    Raises:
        NotSupportedError, InvalidSpecError: As ``capture``.
    """
    reader = _Reader(store, False, frozenset({()}), checks=not allow_pickle)
    return reader.node(td, (), batch_size), reader.values[()]


@lru_cache(maxsize=64)
def _device_name(device: torch.device) -> str:
    return str(device)


class _Reader:
    """One walk over one tensordict."""

    def __init__(
        self,
        store: str,
        is_destination: bool,
        packed: frozenset[Path] = frozenset(),
        *,
        checks: bool = True,
        encodes: bool = True,
    ) -> None:
        self.store = store
        self.checks = checks
        self.encodes = encodes
        self.is_destination = is_destination
        self.packed = packed
        self.tensors: dict[Path, torch.Tensor] = {}
        self.values: dict[Path, Any] = {}

    def node(self, td: Any, path: Path, above: tuple[int, ...] | None = None) -> Node:
        """Takes a node apart; ``above`` is the batch size of the one around it, None for the root."""
        if len(path) >= MAX_DEPTH:
            raise self._refusal("a tensordict", path, f"tensordicts may be nested {MAX_DEPTH} levels deep")
        plain, extra, tensorclass = (td, _NOTHING, None) if type(td) is TensorDict else self._unwrap(td, path)
        if path in self.packed:
            return self._packed(plain, extra, tensorclass, path, above)
        if isinstance(plain, LazyStackedTensorDict):
            return self._stack(plain, extra, tensorclass, path, above)
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
            elif issubclass(kind, (NonTensorData, NonTensorStack)):
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
        if isinstance(td, LazyStackedTensorDict) and not isinstance(td, NonTensorStack):
            return td, {}, None
        if isinstance(td, TensorDictBase):
            raise self._refusal(f"a {kind.__name__}", path, "convert it with .to_tensordict()")
        raise self._refusal(f"an object of {class_name(kind)}", path, "tensordicts and tensorclasses travel")

    def _child(self, item: Any, path: Path, batch_size: tuple[int, ...]) -> Node:
        node = self.node(item, path, batch_size)
        if node.batch_size[: len(batch_size)] != batch_size:
            raise self._contradiction(path, node.batch_size, batch_size)
        return node

    def _stack(
        self,
        td: LazyStackedTensorDict,
        extra: dict[str, Any],
        tensorclass: str | None,
        path: Path,
        above: tuple[int, ...] | None,
    ) -> Node:
        """A lazy stack: leaf by leaf where its rows have one structure, else packed."""
        names = _names(td)
        if not td.tensordicts:
            device = None if td.device is None else _device_name(td.device)
            return Node(tuple(td.batch_size), names, device, tensorclass, (), td.stack_dim)
        parts = []
        for row in td.tensordicts:
            reader = _Reader(self.store, self.is_destination, checks=self.checks, encodes=False)
            parts.append(Part(reader.node(row, path, ()), reader.tensors, reader.values))
        found = None if extra else stacked(parts, td.stack_dim, path=path, names=names)
        if found is None:
            return self._packed(td, extra, tensorclass, path, above, [part.root for part in parts])
        self.tensors.update(found.tensors)
        self.values.update(found.values)
        return found.root._replace(tensorclass=tensorclass)

    def _packed(
        self,
        td: Any,
        extra: dict[str, Any],
        tensorclass: str | None,
        path: Path,
        above: tuple[int, ...] | None,
        rows: list[Node] | None = None,
    ) -> Node:
        """A node whose elements describe themselves. ``rows`` are those of a stack, if they were looked at before."""
        can_list = not isinstance(td, LazyStackedTensorDict) or td.stack_dim == 0
        batch_size = tuple(td.batch_size[:1]) if above is None and can_list else above or ()
        if extra:
            td = td.copy()
            for key, value in extra.items():
                td.set_non_tensor(key, value)
        elements = elements_of(td, batch_size)
        stack_dim = None
        if rows is not None and not batch_size:
            stack_dim = td.stack_dim
        elif rows is None or len(batch_size) != 1 or not can_list:
            reader = _Reader(self.store, self.is_destination, checks=self.checks, encodes=False)
            rows = [reader.node(element, path, ()) for element in flat_elements(elements, len(batch_size))]
        inner, entries = known_of(rows, batch_size, stack_dim)
        self.values[path] = elements
        names = _names(td)
        names = None if names is None else names[: len(batch_size)]
        device = None if td.device is None else _device_name(td.device)
        names = None if names is None or not any(names) else names
        return Node(batch_size, names, device, tensorclass, entries, inner=inner)

    def _nested(self, item: torch.Tensor, path: Path, batch_size: tuple[int, ...]) -> ValueLeaf:
        jagged = Jagged.of(item)
        size = item.size(0) if jagged is None else len(jagged.offsets) - 1
        if batch_size and size != batch_size[0]:
            raise self._contradiction(path, (size,), batch_size)
        leaf, self.values[path] = nested_leaf(item, batch_size)
        return leaf

    def _tensor(self, item: torch.Tensor, kind: type, path: Path, batch_size: tuple[int, ...]) -> Entry:
        jagged = Jagged.of(item)
        dtype = FROM_TORCH.get((item if jagged is None else jagged.values).dtype)
        if dtype is not None and (jagged is not None or item.is_nested):
            return self._nested(item, path, batch_size)
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
        if isinstance(item, LiveEntry):
            item = item.now()
        own = tuple(item.batch_size)
        if own[: len(batch_size)] != batch_size:
            raise self._contradiction(path, own, batch_size)
        is_stack = isinstance(item, NonTensorStack)
        if path in self.packed or (is_stack and -1 in own):
            if self.checks:
                check_values(list(_singles(item)), key=show(path))
            self.values[path] = elements_of(item, batch_size)
            return ValueLeaf(batch_size, bool(batch_size), PACKED)
        value = values_of(item) if is_stack else item.data
        if is_stack and not _has_rows(value, own):
            raise self._refusal("a ragged NonTensorStack", path, f"it does not have one value per row of {own}")
        if self.checks and self.encodes and is_stack and len(own) == 1:
            value = EncodedValues(value, encode_many(value, key=show(path)))  # which checks them
        elif self.checks:
            check_values(_each(value, len(own)) if is_stack else (value,), key=show(path))
        self.values[path] = value
        return ValueLeaf(own, is_stack)

    def _bare_value(self, value: Any, path: Path, batch_size: tuple[int, ...]) -> ValueLeaf:
        if self.checks:
            check_values((value,), key=show(path))
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


def _singles(item: Any) -> Iterable[Any]:
    """Every value of stacks in stacks."""
    if not isinstance(item, NonTensorStack):
        return (item.data,)
    return [single for member in item.tensordicts for single in _singles(member)]


def _each(value: Any, num_dims: int) -> Sequence[Any]:
    if num_dims == 0:
        return (value,)
    if num_dims == 1:
        return list(value)
    return [single for row in value for single in _each(row, num_dims - 1)]
