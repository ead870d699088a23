"""From a spec, tensors and values to a tensordict or tensorclass instance; the reverse of ``capture``.

On the hot path of every read, so it uses tensordict's unchecked constructors: the spec was checked when it came in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from tensordict.nn import TensorDictParams
from tensordict.utils import _TENSORCLASS_MEMO

from tdserve.errors import LocalProtocolError, NotSupportedError, SpecMismatchError
from tdserve.spec.capture import capture, class_name
from tdserve.spec.nodes import Node, Path, TensorLeaf, ValueLeaf
from tdserve.spec.tree import Spec, check_matches, quote, show
from tdserve.values import encode_bytes


class _Recipe(NamedTuple):
    """A node, prepared for building it many times.

    Attributes:
        steps: Key, path, and at most one of: the non-tensor leaf, the recipe of a child. Neither: a tensor.
        num_classes: Types that tensordict had seen when the tensorclasses in here were looked up, 0 without any: so
            that a class that was defined again (as in a notebook) is looked up again.
    """

    batch_size: torch.Size
    names: Any
    device: torch.device | None
    tensorclass: Any
    steps: tuple[tuple[str, Path, ValueLeaf | None, _Recipe | None], ...]
    num_classes: int


def build(spec: Spec, tensors: Mapping[Path, torch.Tensor], values: Mapping[Path, Any]) -> Any:
    """Puts a tensordict (or an instance of the root's tensorclass) together; copies nothing.

    ``__post_init__`` of tensorclasses does not run, as it does not when unpickling: what was captured had seen it.

    Args:
        spec: The structure.
        tensors: Every tensor leaf, of the dtype and shape that the spec says; not checked here.
        values: Every non-tensor leaf, as ``capture`` gives them.

    Raises:
        NotSupportedError: A tensorclass of the spec is not known in this process; says which module to import.
        LocalProtocolError: A leaf is missing: the caller's bug.
    """
    recipe = spec.memo.get(_Recipe)
    if recipe is None or recipe.num_classes not in (0, len(_TENSORCLASS_MEMO)):
        recipe = spec.memo[_Recipe] = _prepare(spec.root, ())
    try:
        return _build(recipe, tensors, values)
    except KeyError as error:
        raise LocalProtocolError(reason=f"no content was given for the leaf {error}") from None


def fill(td: Any, spec: Spec, tensors: Mapping[Path, torch.Tensor], values: Mapping[Path, Any]) -> None:
    """Copies into an existing tensordict in place.

    Args:
        td: Destination; its structure must match, devices and names of dimensions may differ. A locked one is filled
            too, unless a non-tensor value would change.
        spec: The structure of what comes.
        tensors: Every tensor leaf of the spec.
        values: Every non-tensor leaf of the spec.

    Raises:
        SpecMismatchError: The destination, or a tensor, does not fit. Nothing was written.
        NotSupportedError: The destination cannot be written through. Nothing was written.
    """
    target = capture(td, is_destination=True)
    check_matches(spec, target.spec, store="")
    is_per_row = {path: leaf.per_row for path, leaf in target.spec.values}
    slots = [
        (_slot(td, path), leaf, path)
        for path, leaf in spec.values
        if leaf.per_row != is_per_row[path] or encode_bytes(target.values[path]) != encode_bytes(values[path])
    ]
    for path, tensor_leaf in spec.tensors:
        shape = tuple(tensors[path].shape)
        if shape != tensor_leaf.shape:
            raise SpecMismatchError(key=show(path), expected=str(list(tensor_leaf.shape)), actual=str(list(shape)))
    for path, destination in target.tensors.items():
        destination.copy_(tensors[path])
    for (owner, beside), leaf, path in slots:
        if path[-1] in beside:
            beside[path[-1]] = values[path]
        else:
            owner._tensordict[path[-1]] = _value(leaf, values[path], owner.device, owner._td_dim_names)


def _slot(td: Any, path: Path) -> tuple[TensorDict, dict[str, Any]]:
    """The tensordict that holds a non-tensor leaf, and the fields beside it when a tensorclass is around it."""
    for depth in range(len(path)):
        beside: dict[str, Any] = {}
        while type(td) is not TensorDict:
            beside = beside or getattr(td, "_non_tensordict", None) or {}
            td = td._param_td if isinstance(td, TensorDictParams) else td._tensordict
        if depth < len(path) - 1:
            td = td._tensordict[path[depth]]
    if td.is_locked:
        reason = "the destination is locked; unlock it with .unlock_(), or leave out=None"
        raise NotSupportedError(feature=f"replacing the non-tensor value at key {quote(path)}", reason=reason)
    return td, beside


def _prepare(node: Node, path: Path) -> _Recipe:
    tensorclass = None if node.tensorclass is None else _find_tensorclass(node, path)
    steps: list[tuple[str, Path, ValueLeaf | None, _Recipe | None]] = []
    for key, entry in node.entries:
        below = (*path, key)
        if isinstance(entry, Node):
            steps.append((key, below, None, _prepare(entry, below)))
        elif isinstance(entry, TensorLeaf):
            steps.append((key, below, None, None))
        else:
            steps.append((key, below, entry, None))
    return _Recipe(
        torch.Size(node.batch_size),
        None if node.names is None else list(node.names),
        None if node.device is None else torch.device(node.device),
        tensorclass,
        tuple(steps),
        len(_TENSORCLASS_MEMO) if tensorclass or any(child.num_classes for *_, child in steps if child) else 0,
    )


def _build(recipe: _Recipe, tensors: Mapping[Path, torch.Tensor], values: Mapping[Path, Any]) -> Any:
    batch_size, names, device, tensorclass, steps, _ = recipe
    source: Any = {}
    for key, path, leaf, child in steps:
        if child is not None:
            source[key] = _build(child, tensors, values)
        elif leaf is None:
            source[key] = tensors[path]
        else:
            source[key] = _value(leaf, values[path], device, names)
    # the list becomes the tensordict's own; one list for all of them would let a change of one rename the others
    td = TensorDict._new_unsafe(
        source, batch_size=batch_size, device=device, names=None if names is None else names.copy(), nested=False
    )
    return td if tensorclass is None else _instance(tensorclass, td, {})


def _instance(tensorclass: Any, td: TensorDict, non_tensordict: dict[str, Any]) -> Any:
    instance = tensorclass.__new__(tensorclass)
    # past __setattr__: frozen classes refuse it, and reading __dict__ would slow every later attribute access
    object.__setattr__(instance, "_tensordict", td)
    object.__setattr__(instance, "_non_tensordict", non_tensordict)
    return instance


def _value(leaf: ValueLeaf, value: Any, device: torch.device | None, names: Any) -> Any:
    own_names = None if names is None else names + [None] * (len(leaf.batch_size) - len(names))
    return (
        _rows(value, leaf.batch_size, device, own_names)
        if leaf.per_row
        else _single(value, leaf.batch_size, device, own_names)
    )


def _single(value: Any, batch_size: tuple[int, ...], device: torch.device | None, names: Any) -> Any:
    td = TensorDict._new_unsafe({}, batch_size=torch.Size(batch_size), device=device, names=names)
    # what the constructor sets, without its conversions of the value
    return _instance(NonTensorData, td, {"data": value, "_metadata": None, "_is_non_tensor": True})


def _rows(value: Any, batch_size: tuple[int, ...], device: torch.device | None, names: Any) -> Any:
    if not batch_size:
        return _single(value, (), device, None)
    inner_names = None if names is None else names[1:]
    if batch_size[0] == 0:  # tensordict makes empty stacks by indexing only
        one = NonTensorStack(_placeholder(batch_size[1:], device))
        return one[0:0]
    rows = [_rows(row, batch_size[1:], device, inner_names) for row in value]
    return NonTensorStack(*rows, stack_dim=0, stack_dim_name=None if names is None else names[0])


def _placeholder(batch_size: tuple[int, ...], device: torch.device | None) -> Any:
    return _single(None, batch_size, device, None)


def _find_tensorclass(node: Node, path: Path) -> Any:
    """The registered class of that name; the newest, when a class was defined again. Never imports."""
    name = str(node.tensorclass)
    found = None
    for cls, is_tensorclass in list(_TENSORCLASS_MEMO.items()):
        if is_tensorclass and class_name(cls) == name and _holds_tensors(cls):
            found = cls
    where = f" at key {quote(path)}" if path else ""
    if found is None:
        module = name.rpartition(".")[0]
        raise NotSupportedError(
            feature=f"tensorclass {name}{where}",
            reason=f"it is not defined in this process: import module {module} first",
        )
    unknown = {key for key, _ in node.entries} - found.__expected_keys__
    if unknown:
        raise NotSupportedError(
            feature=f"tensorclass {name}{where}", reason=f"this process's definition has no fields {sorted(unknown)}"
        )
    return found


def _holds_tensors(cls: type) -> bool:
    return not getattr(cls, "_is_non_tensor", False) and not getattr(cls, "_pass_through", False)
