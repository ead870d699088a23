"""How a store answers each of tensordict's methods: one table of what works, and of what is refused and why.

Every public name of ``TensorDictBase`` is answered. A handle has methods of its own for some; each other name is in one
of the sets here, or reads the content and runs on the copy (:func:`find_kind`). Other names raise AttributeError.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from enum import Enum

from tensordict import TensorDictBase

from tdserve.base.errors import NotSupportedError

_STRUCTURE = "set, update, pop, del and rename_key_ of the store's own handle change its keys"
_NAMES = "names are given when the store is made; rename the dimensions of what is read"
_MEMORY = "its memory is the server's; read it, or map() it on the same machine"
_CONTENT = "write content with update_, or with set"
_RECEIVE = "receive into a local tensordict, and write that with update_"

REFUSED: Mapping[str, str] = {
    "all_reduce": "reduce what to_tensordict() returns, and write that with update_",
    "arecv": _RECEIVE,
    "auto_batch_size_": "the batch size of a store is fixed; use view, reshape or to_tensordict()",
    "auto_device_": "what is read has the device that to_tensordict(device=) names",
    "broadcast": "broadcast what to_tensordict() returns, and write that with update_",
    "cat_tensors": f"call it on what to_tensordict() returns; {_STRUCTURE}",
    "clear": f"client.delete(name) deletes the store; {_STRUCTURE}",
    "clear_device_": "call it on what to_tensordict() returns",
    "create_nested": _STRUCTURE,
    "data_ptr": _MEMORY,
    "del_": _STRUCTURE,
    "filter_empty_": _STRUCTURE,
    "irecv": _RECEIVE,
    "lock_": "lock the store by its own handle",
    "make_memmap": _STRUCTURE,
    "make_memmap_from_storage": _STRUCTURE,
    "make_memmap_from_tensor": _STRUCTURE,
    "memmap_": "it is memory-mapped on the server; memmap(prefix) writes it to a local folder",
    "pin_memory_": "call pin_memory() for a local copy in pinned memory",
    "pop": _STRUCTURE,
    "popitem": _STRUCTURE,
    "recv": _RECEIVE,
    "reduce": "reduce what to_tensordict() returns, and write that with update_",
    "rename_": _NAMES,
    "rename_key_": _STRUCTURE,
    "requires_grad_": "call it on what to_tensordict() returns: no gradient flows into a store",
    "separates": "it removes keys from the tensordict that it splits; use select and exclude, or split_keys",
    "setdefault": _STRUCTURE,
    "share_memory_": _MEMORY,
    "stack_tensors": f"call it on what to_tensordict() returns; {_STRUCTURE}",
    "unlock_": "unlock the store by its own handle",
    "update": f"update_ replaces values; {_STRUCTURE}",
}
"""Name -> what to do instead. A handle may have a method of this name; then only views refuse it."""

ASSIGNED: Mapping[str, str] = {
    "batch_size": REFUSED["auto_batch_size_"],
    "data": _CONTENT,
    "device": REFUSED["auto_device_"],
    "grad": REFUSED["requires_grad_"],
    "is_locked": REFUSED["lock_"],
    "names": _NAMES,
    "shape": REFUSED["auto_batch_size_"],
}
"""Properties of tensordicts that can be assigned -> what to do instead. A handle may have a setter of this name."""

OF_STRUCTURE = frozenset(
    {
        "batch_dims",
        "depth",
        "dim",
        "dtype",
        "entry_class",
        "get_item_shape",
        "is_consolidated",
        "is_empty",
        "is_floating_point",
        "is_locked",
        "is_memmap",
        "is_non_tensor",
        "is_shared",
        "ndimension",
        "numel",
        "requires_grad",
        "size",
        "sorted_keys",
    }
)
"""Answered from the structure alone: nothing is fetched."""

CONSTANTS: Mapping[str, bool] = {"is_cuda": False, "is_meta": False}
"""Properties that have the same value for every store."""

UNCHANGED = frozenset({"clear_refs_for_compile_", "detach_", "memmap_refresh_"})
"""In-place calls that do nothing for a store: no gradient flows into it, and every read is of its current content."""

REWRITING = frozenset({"load_state_dict"})
"""In-place calls besides those with a trailing underscore: performed on a copy, written back by one ``update_``."""

OUT_OF_PROCESSES = frozenset({"map"})
"""Calls whose ``out=`` is written by other processes, which needs shared memory."""

_FOR_ANOTHER = frozenset({"to_module"})
"""Calls whose ``inplace=`` does not mean the tensordict."""


class Kind(Enum):
    """How a name is answered if a handle has no method for it."""

    CONSTRUCTOR = "of TensorDict itself: makes a local tensordict"
    STRUCTURE = "by the structure, nothing is fetched"
    READ = "on a local copy"
    UNCHANGED = "nothing to do"
    REWRITE = "on a local copy, written back with one update_: not atomic"
    REFUSED = "refused, with what to do instead"


_PUBLIC = frozenset(name for name in dir(TensorDictBase) if not name.startswith("_"))
_STATIC = {name: inspect.getattr_static(TensorDictBase, name) for name in _PUBLIC}


def find_kind(name: str) -> Kind | None:
    """Returns how a name is answered; None if no tensordict has it."""
    if name not in _PUBLIC:
        return None
    if name in REFUSED:
        return Kind.REFUSED
    if name in UNCHANGED:
        return Kind.UNCHANGED
    if name in OF_STRUCTURE or name in CONSTANTS:
        return Kind.STRUCTURE
    if isinstance(_STATIC[name], (classmethod, staticmethod)):
        return Kind.CONSTRUCTOR
    return Kind.REWRITE if name.endswith("_") or name in REWRITING else Kind.READ


def make_unassignable(name: str) -> NotSupportedError:
    """Returns the error of an assignment to an attribute of a store."""
    return NotSupportedError(feature=f"assigning {name} of a store", reason=ASSIGNED.get(name, "it is read only"))


def is_property(name: str) -> bool:
    """Returns whether a public name is a property of tensordicts."""
    return isinstance(_STATIC.get(name), property)


def is_inplace_wanted(name: str, args: tuple[object, ...], kwargs: Mapping[str, object]) -> bool:
    """Returns whether a call passes ``inplace=True``, by position or by name."""
    given = None if name in _FOR_ANOTHER else find_argument(name, "inplace", args, kwargs)
    return given is not None and given is not False


def find_argument(name: str, argument: str, args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
    """Returns what a call passes for an argument, by position or by name; None if nothing."""
    method = _STATIC.get(name)
    if argument in kwargs or not args or not callable(method):
        return kwargs.get(argument)  # some methods accept it without naming it
    try:
        return inspect.signature(method).bind(None, *args, **kwargs).arguments.get(argument)
    except TypeError:
        return None  # the call itself raises a better error
