"""What a module saves in its ``state_dict()`` besides parameters and buffers: its extra state.

It is content under the module's path and ``_extra_state``, where the ``state_dict()`` has it: a tensor, a value, or a
node, of a dict with tensors in it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

from tdserve.base.errors import NotSupportedError
from tdserve.structure.torch_private import modules_of, save_own_state
from tdserve.structure.trees.nodes import Node, Path
from tdserve.structure.trees.tree import Spec

EXTRA_STATE = "_extra_state"
"""The name under which torch saves what ``get_extra_state`` of a module returns."""

_PLAIN_SAVE = save_own_state(nn.Module)


def find_stateful(root: nn.Module) -> dict[Path, nn.Module]:
    """Returns the modules in a module, and itself, that save extra state and load it, by their paths."""
    return _find(root, _has_extra_state)


def add_extra_state(module: nn.Module, *, store: str) -> TensorDict | None:
    """Returns the tensordict of a module with its extra state; None if it has none that can be loaded again.

    Args:
        module: The module; its tensors are not copied.
        store: Name, for errors.

    Raises:
        NotSupportedError: Its ``state_dict()`` has something else that no parameter or buffer has, as that of a
            quantized module does; the error names the key.
    """
    saving = _find(module, lambda kind: _has_extra_state(kind) or save_own_state(kind) is not _PLAIN_SAVE)
    if not saving:
        return None
    for path, each in saving.items():
        _check_own_state(path, each, store)
    states = {path: each.get_extra_state() for path, each in saving.items() if _has_extra_state(type(each))}
    if not states:
        return None
    td: TensorDict = TensorDict.from_module(module).data.clone(recurse=False)
    for path, state in states.items():
        _set(td, (*path, EXTRA_STATE), state)
    return td


def leave_out_extra_state(spec: Spec, own: Spec) -> Spec:
    """Returns the structure of content without the extra state of modules, if a place for it has none at all, as that
    of ``TensorDict.from_module``; else the same object."""
    rest: Spec | None = spec.memo.get(EXTRA_STATE)  # walks through thousands of leaves take milliseconds
    if rest is None:
        root = _leave_out(spec.root)
        rest = spec.memo[EXTRA_STATE] = spec if root is spec.root else Spec(root)
    return spec if rest is spec or _leave_out(own.root) is not own.root else rest


def split_extra_state(path: Path) -> Path | None:
    """Returns the path of the module whose extra state a path of content belongs to; None if it belongs to none."""
    return path[: path.index(EXTRA_STATE)] if EXTRA_STATE in path else None


def join_extra_state(prefix: Path, content: Mapping[Path, Any]) -> Any:
    """Returns the extra state of the module at a path, from content by paths; a tensor of it is a copy."""
    key = (*prefix, EXTRA_STATE)
    state: dict[str, Any] = {}
    for path, item in content.items():
        if path[: len(key)] != key:
            continue
        owned = item.clone() if isinstance(item, torch.Tensor) else item
        if path == key:
            return owned
        branch = state
        for part in path[len(key) : -1]:
            branch = branch.setdefault(part, {})
        branch[path[-1]] = owned
    return state


def _leave_out(node: Node) -> Node:
    """Returns a node without extra state anywhere below; the same object if there is none."""
    if node.inner is not None:
        return node
    entries = [
        (key, _leave_out(entry) if isinstance(entry, Node) else entry)
        for key, entry in node.entries
        if key != EXTRA_STATE
    ]
    is_whole = len(entries) == len(node.entries)
    if is_whole and all(left[1] is entry for left, (_, entry) in zip(entries, node.entries, strict=True)):
        return node
    return node._replace(entries=tuple(entries))


def _has_extra_state(kind: type[nn.Module]) -> bool:
    """Returns whether modules of a class save extra state and load it: torch itself loads no other."""
    plain = nn.Module
    return kind.get_extra_state is not plain.get_extra_state and kind.set_extra_state is not plain.set_extra_state


def _find(root: nn.Module, is_wanted: Callable[[type[nn.Module]], bool]) -> dict[Path, nn.Module]:
    """Returns the modules in a module, and itself, of classes for which a function returns True, by their paths."""
    if not any(map(is_wanted, _list_classes(root))):  # as in nearly all models; paths of thousands take a millisecond
        return {}
    return {path: module for path, module in _iter_modules(root, ()) if is_wanted(type(module))}


def _list_classes(root: nn.Module) -> list[type[nn.Module]]:
    """Returns the classes of the modules in a module, and its own."""
    found: dict[type[nn.Module], bool] = {}
    waiting: list[nn.Module | None] = [root]
    for module in waiting:
        if module is None:
            continue
        kind = type(module)
        is_tensordict = found.get(kind)
        if is_tensordict is None:
            found[kind] = is_tensordict = issubclass(kind, TensorDictBase)
        if not is_tensordict:
            waiting += modules_of(module).values()
    return [kind for kind, is_tensordict in found.items() if not is_tensordict]


def _iter_modules(module: nn.Module, path: Path) -> Iterator[tuple[Path, nn.Module]]:
    yield path, module
    for name, child in modules_of(module).items():
        if child is not None and not isinstance(child, TensorDictBase):
            yield from _iter_modules(child, (*path, name))


def _check_own_state(path: Path, module: nn.Module, store: str) -> None:
    """Raises NotSupportedError if a module itself saves what is neither parameter, buffer nor extra state."""
    saved: dict[str, Any] = OrderedDict()
    save_own_state(type(module))(module, saved, "", True)
    parameters, buffers = (
        list(name_all(remove_duplicate=False)) for name_all in (module.named_parameters, module.named_buffers)
    )
    known = {name for name, _ in (*parameters, *buffers)} | {EXTRA_STATE}
    key = next((name for name, item in saved.items() if item is not None and name not in known), None)
    if key is not None:
        raise NotSupportedError(
            feature=f"a {type(module).__qualname__} with {'.'.join((*path, key))!r} in weights {store!r}",
            reason="its state_dict() has what is no parameter, buffer or extra state; publish the module as it is "
            "before it is quantized or packed, or without that state, as TensorDict.from_module(module)",
        )


def _set(td: TensorDict, path: Path, state: Any) -> None:
    if isinstance(state, torch.Tensor):
        td.set(path, state.detach())
    elif _has_tensors(state):
        for key, item in state.items():
            _set(td, (*path, key), item)
    else:
        td.set_non_tensor(path, state)


def _has_tensors(state: Any) -> bool:
    """Returns whether this is a dict with a tensor in it that can be a node, and be restored."""
    if type(state) is not dict or not all(isinstance(key, str) for key in state):
        return False
    return any(isinstance(item, torch.Tensor) or _has_tensors(item) for item in state.values())
