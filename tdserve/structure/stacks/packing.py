"""Entries of any kind as plain values, and back: what is stored of one element of a packed node or leaf.

An entry is a tuple that begins with the number of its kind; tensors are their dtype, shape and bytes. Elements say
everything about themselves, so that those of one batch may differ in batch size, keys and kind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    TypedTensorDict,
    UnbatchedTensor,
    is_tensorclass,
)
from tensordict.nn import TensorDictParams

from tdserve.base.errors import NotSupportedError, RemoteProtocolError, TDServeError
from tdserve.structure.dtypes import ITEMSIZE
from tdserve.structure.instances import class_name, find_tensorclass, instance_of
from tdserve.structure.nodes import Form, Params, Ragged, TensorKind, ValueLeaf
from tdserve.structure.pieces import Pieces, jagged
from tdserve.structure.stacks.elements import flat_elements
from tdserve.structure.stacks.row_structure import Note, from_content, to_content
from tdserve.structure.state import PLAIN, mark_of, marked, params_around, params_of
from tdserve.structure.tensordict_private import (
    content_of,
    entries_of,
    is_transparent_class,
    names_of,
    new_tensordict,
    new_value,
    params_content,
    set_value_names,
    stored_fields,
    typed_content,
)
from tdserve.structure.torch_private import jagged_parts
from tdserve.structure.torch_types import from_torch, to_torch

_DENSE, _STACK, _EMPTY_STACK, _CLASS, _TENSOR, _VALUE, _VALUES, _VALUE_STACK, _JAGGED, _NESTED, _LOCKED = range(11)
_MARKED, _PARAMS, _UNBATCHED, _NOTED = 11, 12, 13, 14

_HOSTILE = (TypeError, ValueError, IndexError, KeyError, AttributeError, RuntimeError, OverflowError)
"""What content that is no entry leads to."""


class Exact(NamedTuple):
    """An entry whose value also tells what does not count for content, as of ``capture``.

    Attributes:
        entry: Itself.
        keeps_locks: Whether it tells what is locked; else that is noted elsewhere.
        note: What it is an element of, if it tells that.
    """

    entry: Any
    keeps_locks: bool
    note: Note | None = None


def mark_exact(elements: Any, num_dims: int, *, keeps_locks: bool) -> Any:
    """(Nested lists of) elements as exact ones."""
    if not num_dims:
        return Exact(elements, keeps_locks)
    return [mark_exact(element, num_dims - 1, keeps_locks=keeps_locks) for element in elements]


def holds_exact(elements: Any) -> bool:
    """Whether any of (nested lists of) elements is an exact one."""
    return isinstance(elements, Exact) or (isinstance(elements, list) and any(map(holds_exact, elements)))


def without_marks(elements: Any) -> Any:
    """(Nested lists of) elements, of exact ones what they are of."""
    if isinstance(elements, list):
        return [without_marks(element) for element in elements]
    return elements.entry if isinstance(elements, Exact) else elements


def pack(entry: Any) -> tuple[Any, ...]:
    """The plain value of a tensordict, tensorclass instance, tensor, or non-tensor entry.

    Raises:
        NotSupportedError: It holds what cannot travel.
    """
    if type(entry) is not Exact:
        return _pack(entry, None)
    plain = _pack(entry.entry, entry)
    return plain if entry.note is None else (_NOTED, entry.note.position, to_content(entry.note.spec), plain)


def _pack(entry: Any, state: Exact | None) -> tuple[Any, ...]:
    kind = type(entry)
    if kind is NonTensorData:
        return (_VALUE, tuple(entry.batch_size), entry.data)
    if isinstance(entry, torch.Tensor) and kind is not TensorDictParams:
        return _pack_leaf(entry, state)
    if isinstance(entry, NonTensorStack):
        return _pack_values(entry)
    if isinstance(entry, NonTensorData):
        return (_VALUE, tuple(entry.batch_size), entry.data)
    if state is not None and state.keeps_locks and getattr(entry, "is_locked", False):
        return (_LOCKED, _pack(entry, state._replace(keeps_locks=False)))
    if kind is TensorDict:
        return _pack_dense(entry, state)
    if isinstance(entry, LazyStackedTensorDict):
        names = _names(entry)
        if not entry.tensordicts:
            return (_EMPTY_STACK, tuple(entry.batch_size), entry.stack_dim, names, _device(entry))
        name = None if names is None else names[entry.stack_dim]
        return (_STACK, entry.stack_dim, name, [_pack(row, state) for row in entry.tensordicts])
    return _pack_wrapper(entry, kind, state)


def _pack_leaf(tensor: torch.Tensor, state: Exact | None) -> tuple[Any, ...]:
    if type(tensor) is UnbatchedTensor:
        return (_UNBATCHED, _pack_tensor(tensor.detach().as_subclass(torch.Tensor)))
    how = PLAIN if state is None else mark_of(tensor)
    plain = _pack_tensor(tensor)
    return plain if how == PLAIN else (_MARKED, how[0].value, how[1], plain)


def _pack_wrapper(entry: Any, kind: type, state: Exact | None) -> tuple[Any, ...]:
    if isinstance(entry, TensorDictParams):
        content = _pack(params_content(entry), state)
        return content if state is None else (_PARAMS, tuple(params_of(entry)[:4]), content)
    if is_tensorclass(kind) and not is_transparent_class(kind):
        beside = {key: (_VALUE, (), value) for key, value in (stored_fields(entry) or {}).items()}
        return (_CLASS, class_name(kind), _pack(content_of(entry), state), beside)
    if isinstance(entry, TypedTensorDict):
        return (_CLASS, class_name(kind), _pack(typed_content(entry), state), {})
    if isinstance(entry, TensorDictBase):
        return _pack(entry.to_tensordict(), state)
    raise NotSupportedError(feature=f"a {class_name(kind)}", reason="tensordicts, tensors and non-tensor data travel")


def unpack(value: Any) -> Any:
    """The entry of a plain value; its tensors, and tensordicts that had a device, are on the CPU. One with a note is an
    exact one.

    Raises:
        RemoteProtocolError: It is no value that ``pack`` makes.
        NotSupportedError: A tensorclass is not known in this process.
    """
    try:
        if value[0] == _NOTED:
            return _read_noted(*value[1:])
        return _READERS[value[0]](*value[1:])
    except TDServeError:
        raise
    except _HOSTILE as error:
        raise RemoteProtocolError(expected="an entry of a tensordict", received=f"{error!r}"[:200]) from None


def _pack_dense(td: TensorDict, state: Exact | None) -> tuple[Any, ...]:
    entries = entries_of(td)
    return (
        _DENSE,
        tuple(td.batch_size),
        _names(td),
        _device(td),
        list(entries),
        [_pack(entry, state) for entry in entries.values()],
    )


def _pack_tensor(tensor: torch.Tensor) -> tuple[Any, ...]:
    dtype = from_torch(tensor.dtype)
    if tensor.is_nested:
        parts: Any = tensor.detach()
        components = [pack(part) for part in parts.unbind()]
        if tensor.layout is not torch.jagged:
            return (_NESTED, dtype, components)
        at = jagged_parts(parts)[3] - 1
        shape = tuple(-1 if dim == at else int(size) for dim, size in enumerate(tensor.shape[1:]))
        return (_JAGGED, dtype, shape, parts.lengths() is not None, components)
    if tensor.layout is not torch.strided or tensor.is_meta:
        raise NotSupportedError(feature=f"a {tensor.layout} tensor", reason="dense and nested tensors travel")
    plain = tensor.detach().cpu().resolve_neg().resolve_conj().contiguous()
    return (_TENSOR, dtype, tuple(tensor.shape), plain.view(-1).view(torch.uint8).numpy().tobytes())


def _pack_values(stack: NonTensorStack) -> tuple[Any, ...]:
    members = stack.tensordicts
    if members and all(type(member) is NonTensorData and not member.batch_size for member in members):
        return (_VALUES, [member.data for member in members])
    return (_VALUE_STACK, stack.stack_dim, tuple(stack.batch_size), [pack(member) for member in members])


def _names(td: TensorDictBase) -> tuple[str | None, ...] | None:
    names = names_of(td) if type(td) is TensorDict else td.names
    return None if names is None or all(name is None for name in names) else tuple(names)


def _device(td: TensorDictBase) -> str | None:
    return None if td.device is None else str(td.device)


def _read_dense(
    batch_size: tuple[int, ...],
    names: tuple[str | None, ...] | None,
    device: str | None,
    keys: list[str],
    entries: list[Any],
) -> TensorDict:
    if len(keys) != len(entries) or not all(type(key) is str for key in keys):
        raise _damaged_error("as many keys as entries")
    source: Any = {key: _READERS[entry[0]](*entry[1:]) for key, entry in zip(keys, entries, strict=True)}
    size = torch.Size(batch_size)
    for entry in source.values():
        if type(entry) is UnbatchedTensor:
            entry.batch_size = size
            continue
        is_strided = isinstance(entry, torch.Tensor) and entry.is_nested and entry.layout is not torch.jagged
        sizes = (entry.size(0),) if is_strided else tuple(entry.shape)  # it has no shape
        if sizes[: len(size)] != batch_size[: len(sizes)]:
            raise _damaged_error("entries of its batch size")
    where = None if device is None else torch.device("cpu")
    own_names: Any = None if names is None else list(names)
    if names is not None:
        _name_values(source, names)
    found: TensorDict = new_tensordict(source, batch_size=size, device=where, names=own_names, nested=False)
    return found


def _name_values(source: Any, names: tuple[str | None, ...]) -> None:
    """Gives values the names of the tensordict that holds them, which are packed once for all."""
    for entry in source.values():
        if isinstance(entry, NonTensorStack):
            entry.names = [*names, *(None,) * len(entry.batch_size)][: len(entry.batch_size)]
        if type(entry) is NonTensorData:
            num_dims = len(entry.batch_size)
            set_value_names(entry, [*names, *(None,) * num_dims][:num_dims])


def _read_stack(stack_dim: int, name: str | None, rows: list[Any]) -> LazyStackedTensorDict:
    members = [_READERS[row[0]](*row[1:]) for row in rows]
    return LazyStackedTensorDict(*members, stack_dim=stack_dim, stack_dim_name=name)


def _read_empty_stack(
    batch_size: tuple[int, ...], stack_dim: int, names: tuple[str | None, ...] | None, device: str | None
) -> LazyStackedTensorDict:
    return make_empty_stack(batch_size, stack_dim, None if device is None else torch.device("cpu"))


def make_empty_stack(batch_size: tuple[int, ...], stack_dim: int, device: torch.device | None) -> LazyStackedTensorDict:
    """A lazy stack without rows; ``batch_size`` has 0 at ``stack_dim``."""
    rest = [max(size, 0) for size in batch_size[:stack_dim] + batch_size[stack_dim + 1 :]]
    return LazyStackedTensorDict(batch_size=rest, stack_dim=stack_dim, device=device)


def _read_class(name: str, td: Any, beside: dict[str, Any]) -> Any:
    inner = _READERS[td[0]](*td[1:])
    return instance_of(find_tensorclass(str(name), (), set()), inner, {key: item[2] for key, item in beside.items()})


def _read_noted(position: int, content: bytes, entry: Any) -> Exact:
    return Exact(_READERS[entry[0]](*entry[1:]), keeps_locks=False, note=from_content(content, position))


def _read_locked(entry: Any) -> Any:
    return _READERS[entry[0]](*entry[1:]).lock_()


def _read_marked(kind: str, requires_grad: bool, tensor: Any) -> torch.Tensor:
    return marked(_READERS[tensor[0]](*tensor[1:]), TensorKind(kind), bool(requires_grad))


def _read_params(how: tuple[Any, ...], content: Any) -> TensorDictParams:
    return params_around(_READERS[content[0]](*content[1:]), Params(*how))


def _read_unbatched(tensor: Any) -> Any:
    make: Any = UnbatchedTensor
    return make(_READERS[tensor[0]](*tensor[1:]))


def _read_tensor(dtype: str, shape: tuple[int, ...], data: bytes) -> torch.Tensor:
    kind = to_torch(dtype)
    if not data:
        return torch.empty(shape, dtype=kind)
    if dtype == "bool" and max(data) > 1:
        raise _damaged_error("booleans that are 0 or 1")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(kind).view(shape)


def _read_value(batch_size: tuple[int, ...], value: Any) -> Any:
    return make_single_value(value, batch_size, None, None)


def unpack_unbatched(value: Any, batch_size: tuple[int, ...]) -> Any:
    """The ``UnbatchedTensor`` of a packed one, in a tensordict of this batch size.

    Raises:
        RemoteProtocolError: It is none.
    """
    found = unpack(value)
    if type(found) is not UnbatchedTensor:
        raise _damaged_error("an unbatched tensor")
    found.batch_size = torch.Size(batch_size)
    return found


def find_shared_value(values: Any, leaf: ValueLeaf) -> Any:
    """The one value of rows that share it.

    Raises:
        NotSupportedError: Rows have been given values of their own.
    """
    found = flat_elements(values, len(leaf.batch_size))
    if not found or any(value != found[0] for value in found):
        reason = "one unbatched tensor is for all rows; write it whole, not by rows"
        raise NotSupportedError(feature="rows that differ in an UnbatchedTensor, or none", reason=reason)
    return found[0]


def make_single_value(value: Any, batch_size: tuple[int, ...], device: torch.device | None, names: Any) -> Any:
    """One value for a batch, without the conversions that the constructor makes of some values."""
    td = new_tensordict({}, batch_size=torch.Size(batch_size), device=device, names=names)
    return new_value(td, value)


def _read_values(values: list[Any]) -> Any:
    return NonTensorStack(*[make_single_value(value, (), None, None) for value in values])


def _read_value_stack(stack_dim: int, batch_size: tuple[int, ...], members: list[Any]) -> Any:
    if not members:
        return NonTensorStack(make_single_value(None, batch_size[1:], None, None))[0:0]
    return NonTensorStack(*[_READERS[member[0]](*member[1:]) for member in members], stack_dim=stack_dim)


def _read_jagged(dtype: str, shape: tuple[int, ...], has_lengths: bool, components: list[Any]) -> torch.Tensor:
    ragged = Ragged(Form.JAGGED, dtype, tuple(shape), bool(has_lengths))
    return jagged(Pieces.of([_read_tensor(*component[1:]) for component in components], ragged), ragged)


def _read_nested(dtype: str, components: list[Any]) -> torch.Tensor:
    return make_nested([_read_tensor(*component[1:]) for component in components], dtype)


def make_nested(components: list[torch.Tensor], dtype: str) -> torch.Tensor:
    """The strided nested tensor of these components."""
    if dtype not in ITEMSIZE:
        raise _damaged_error("a dtype")
    return torch.nested.nested_tensor(components, dtype=to_torch(dtype))


def _damaged_error(expected: str) -> RemoteProtocolError:
    return RemoteProtocolError(expected=expected, received="something else")


_READERS: tuple[Callable[..., Any], ...] = (
    _read_dense,
    _read_stack,
    _read_empty_stack,
    _read_class,
    _read_tensor,
    _read_value,
    _read_values,
    _read_value_stack,
    _read_jagged,
    _read_nested,
    _read_locked,
    _read_marked,
    _read_params,
    _read_unbatched,
)
