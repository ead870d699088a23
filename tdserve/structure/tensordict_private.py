"""The private names of tensordict that tdserve uses, and how tensordicts are held inside. Those of torch are in
``torch_private.py``; no other module uses one.

All were seen in tensordict 0.14.3 and 0.15.3, except those that say otherwise.
``tests/unit/structure/test_tensordict_private.py`` looks for each, so that an upgrade that removes one fails there and
names it. Names on a hot path are bound here and called directly.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

import tensordict
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict
from tensordict._lazy import _CustomOpTensorDict as LazyView
from tensordict._td import _SubTensorDict as SubTensorDict
from tensordict.base import NO_DEFAULT
from tensordict.utils import _TENSORCLASS_MEMO as SEEN_CLASSES

__all__ = ["SEEN_CLASSES", "LazyView", "SubTensorDict"]

# Imported above, where no public name does the same:
# - LazyView, SubTensorDict: their entries are read one by one, since they hold none themselves.
# - SEEN_CLASSES: tensordict's only register of tensorclasses; names in messages never lead to an import.

new_tensordict: Any = TensorDict._new_unsafe
"""The constructor without checks, which take longer than everything else in a read."""

entries_of: Callable[[Any], dict[str, Any]] = attrgetter("_tensordict")
"""The entries of a TensorDict as it holds them: ``items()`` makes views, ``get`` unwraps, ``set`` converts."""

content_of: Callable[[Any], Any] = attrgetter("_tensordict")
"""The tensordict inside of an instance of a tensorclass."""

stored_fields: Callable[[Any], Any] = attrgetter("_non_tensordict")
"""The non-tensor fields of an instance of a tensorclass, which it keeps beside its tensordict; an entry of non-tensor
data is such an instance. A dict, or None."""

names_of: Callable[[Any], list[str | None] | None] = attrgetter("_td_dim_names")
"""Names of the dimensions of a TensorDict; None if none has one, which ``names`` shows only after a search."""

params_content: Callable[[Any], Any] = attrgetter("_param_td")
"""The tensordict inside of a TensorDictParams, with its parameters: its methods return their data."""

typed_content: Callable[[Any], Any] = attrgetter("_source")
"""The tensordict inside of a TypedTensorDict."""

shown_source: Callable[[Any], Any] = attrgetter("_source")
"""The tensordict whose rows a SubTensorDict shows."""


_KEEPS_NONE = str(tensordict.__version__).startswith("0.14.")
"""Whether an instance keeps the fields that are None beside its tensordict, and fails where one is missing."""


def get_inner_content(wrapper: Any, otherwise: Any = None) -> Any:
    """Returns ``content_of`` an instance; ``otherwise`` for anything else."""
    return getattr(wrapper, "_tensordict", otherwise)


def get_fields(instance: Any) -> dict[str, Any]:
    """Returns ``stored_fields``; none if there are none."""
    return getattr(instance, "_non_tensordict", None) or {}


def get_set_fields(instance: Any) -> dict[str, Any]:
    """Returns ``get_fields`` without those that are None: 0.15 does not keep them."""
    fields = get_fields(instance)
    return {name: value for name, value in fields.items() if value is not None} if fields else fields


def set_content(instance: Any, td: Any) -> None:
    """Puts a tensordict into an instance of a tensorclass, even a frozen one."""
    object.__setattr__(instance, "_tensordict", td)


def set_contents(instance: Any, td: Any, fields: dict[str, Any]) -> None:
    """Makes a new instance of a tensorclass hold these.

    Bypasses ``__setattr__``, since frozen classes refuse it; reading ``__dict__`` would slow every later attribute
    access.
    """
    if _KEEPS_NONE:
        unset = (name for name in type(instance).__dataclass_fields__ if name not in td.keys())  # noqa: SIM118 (a tensordict)
        fields = {**dict.fromkeys(unset), **fields}
    object.__setattr__(instance, "_tensordict", td)
    object.__setattr__(instance, "_non_tensordict", fields)


def make_value(td: Any, value: Any) -> Any:
    """Makes a NonTensorData of this value around an empty tensordict: its constructor converts some values."""
    entry = NonTensorData.__new__(NonTensorData)
    object.__setattr__(entry, "_tensordict", td)
    object.__setattr__(entry, "_non_tensordict", make_value_fields(value))
    return entry


def make_value_fields(value: Any) -> dict[str, Any]:
    """Returns the fields of a NonTensorData of this value."""
    return {"data": value, "_metadata": None, "_is_non_tensor": True}


def is_value_class(kind: type) -> bool:
    """Returns whether instances are non-tensor data."""
    return getattr(kind, "_is_non_tensor", False)


def is_transparent_class(kind: type) -> bool:
    """Returns whether instances are treated as what they hold."""
    return getattr(kind, "_is_non_tensor", False) or getattr(kind, "_pass_through", False)


def read_names(td: Any) -> list[str | None] | None:
    """Returns the names of the dimensions of any tensordict; None if none has one, or if 0.14 cannot tell: it asks the
    first row of a lazy stack, which may have none."""
    try:
        names: list[str | None] | None = names_of(td) if type(td) is TensorDict else td.names
    except IndexError:
        return None
    return names


def get_held_entry(td: Any, key: str) -> Any:
    """Returns an entry as any tensordict holds it, without unwrapping it."""
    return td._get_str(key, NO_DEFAULT)


def set_batch_size(td: Any, batch_size: torch.Size) -> None:
    """Sets the batch size without checking every entry, after rows of a lazy stack were exchanged."""
    td._batch_size = batch_size


def take_form(td: TensorDict, source: TensorDict) -> None:
    """Gives a TensorDict the batch size and names of another, whose entries it has received."""
    form: Any = source
    to: Any = td
    _forget_consolidated(to)
    to._batch_size = form._batch_size
    to._td_dim_names = None if form._td_dim_names is None else list(form._td_dim_names)


def _forget_consolidated(td: Any) -> None:
    """Makes a tensordict forget the buffer of all its entries, which are replaced."""
    if hasattr(td, "_mark_consolidated_stale"):  # 0.15; 0.14 keeps a buffer that has become wrong
        td._mark_consolidated_stale()
    elif is_consolidated(td):
        del td._consolidated


def take_stack_form(td: Any, source: Any) -> None:
    """Gives a lazy stack the dimension, batch size and name of another, whose rows it has received."""
    td.stack_dim, td._batch_size, td._td_dim_name = source.stack_dim, source._batch_size, source._td_dim_name


def is_consolidated(td: Any) -> bool:
    """Returns whether a tensordict keeps one buffer of all its entries beside them."""
    return getattr(td, "_consolidated", None) is not None


def check_unlock(td: Any) -> None:
    """Raises RuntimeError if a tensordict is part of a locked one; ``unlock_`` would unlock some and then raise."""
    td._check_unlock()


def has_hooks(params: Any) -> bool:
    """Returns whether a TensorDictParams was made with hooks, which are code."""
    return bool(params._get_post_hook)


def has_locked_content(params: Any) -> bool:
    """Returns whether a TensorDictParams was made with ``lock=True``."""
    return bool(params._lock_content)


def get_array(td: Any, key: Any) -> Any:
    """Returns the array of a PersistentTensorDict: its public methods read all of it."""
    return td._get_array(key)


def get_array_dtype(td: Any, key: str) -> torch.dtype:
    """Returns the dtype of an array of a PersistentTensorDict as a tensor."""
    dtype: torch.dtype = td._get_metadata(key)["dtype"]
    return dtype


def is_tensor_array(td: Any, array: Any) -> bool:
    """Returns whether an array of a PersistentTensorDict is that of a tensor."""
    return td._backend.is_array(array) and not td._backend.is_non_tensor(array)


# --- subclasses of tensordict's classes ---


class LiveEntryHooks:
    """Methods that tensordict calls on an entry in place of the public ones: live entries write to their source.

    A class lists it before tensordict's own, and defines the methods that it calls.
    """

    def _update(self: Any, value: Any, clone: bool = False, inplace: bool = False, **_: Any) -> Any:
        return self.change(value, inplace=inplace)

    def _update_(self: Any, value: Any = None, clone: bool = False, **_: Any) -> Any:
        return self.update_(value)

    def _update_at_(self: Any, value: Any, idx: Any, clone: bool = False, **_: Any) -> Any:
        return self.update_at_(value, idx)

    def _clone(self: Any, recurse: bool = True, **_: Any) -> Any:
        return self.clone(recurse)

    def _memmap_(self: Any, **options: Any) -> Any:
        return self.to_plain()._memmap_(**options)


class LiveDataHooks(LiveEntryHooks):
    """``LiveEntryHooks`` for a NonTensorData, whose inner tensordict keeps batch size, device and names."""

    never_inside = ("_tensordict", "_value_source", "data")
    """Attributes that are not looked up in its tensordict if it lacks them itself."""

    @property
    def _non_tensordict(self: Any) -> dict[str, Any]:
        return make_value_fields(self.data)

    @property
    def frame(self: Any) -> Any:
        """The tensordict that has the batch size, device and names."""
        return self._tensordict

    @property
    def own_names(self: Any) -> list[str | None] | None:
        """Returns the names of the dimensions; None if none has one."""
        return list(self.names) if self._tensordict._has_names() else None

    @classmethod
    def _from_tensordict(cls, *args: Any, **kwargs: Any) -> Any:
        return NonTensorData._from_tensordict(*args, **kwargs)

    def _unbind(self: Any, dim: int) -> Any:
        return self.unbind(dim)


class LiveStackHooks(LiveEntryHooks):
    """``LiveEntryHooks`` for a NonTensorStack.

    Its lock is kept here: keeping it in the rows would mean building them.
    """

    _is_locked: bool | None

    @property
    def is_locked(self) -> bool:
        """Whether the tensordict around it is locked."""
        return bool(self._is_locked)

    def _propagate_lock(self, *_: Any, **__: Any) -> None:
        self._is_locked = True

    def _propagate_unlock(self) -> list[Any]:
        self._is_locked = False
        return []

    @property
    def _lock_parents_weakrefs(self) -> list[weakref.ref[Any]]:
        return []

    @property
    def _is_shared(self) -> bool:
        return False

    @property
    def _is_memmap(self) -> bool:
        return False

    def _has_names(self: Any) -> bool:
        return self.own_names is not None

    def _repr_parts(self: Any) -> list[str]:
        return [f"    {self.format_value()}", f"    batch_size={self.batch_size}", f"    device={self.device}"]

    if not hasattr(NonTensorStack, "_repr_parts"):  # 0.14

        def __repr__(self) -> str:
            return f"{type(self).__name__}(\n" + ",\n".join(self._repr_parts()) + ")"

    @classmethod
    def _new_lazy_unsafe(cls, *args: Any, **kwargs: Any) -> Any:
        return NonTensorStack._new_lazy_unsafe(*args, **kwargs)

    def begin(self: Any, batch_size: torch.Size) -> None:
        """Sets what the constructor of a stack would set."""
        self.__dict__.update(UNMADE_STATE)
        self._is_locked = False
        self._batch_size = batch_size
        self.stack_dim = 0


class BesideHooks(LazyStackedTensorDict):
    """A lazy stack that has more entries than its rows, and copies itself."""

    def _get_str(self: Any, key: Any, default: Any = NO_DEFAULT, **options: Any) -> Any:
        entry = self.find_beside(key)
        return super()._get_str(key, default, **options) if entry is None else entry

    def _clone(self: Any, recurse: bool = True) -> Any:
        return self.make_clone(recurse)


class UnmadeHooks(LazyStackedTensorDict):
    """A lazy stack whose rows are not built yet. It becomes a plain one, so it needs the layout of one in memory."""

    @property
    def _batch_size(self: Any) -> Any:  # type: ignore[override]  # it stands for an attribute
        return self.find_batch_size()


UNMADE_STATE: Mapping[str, Any] = dict.fromkeys(("_is_locked", "_hook_out", "_hook_in", "hook_out", "hook_in"))
"""Attributes that tensordict looks up in the ``__dict__`` of a lazy stack before it needs rows: 0.15 has the hooks
behind properties, 0.14 under the public names."""


def become(stack: Any, other: Any, kind: type) -> None:
    """Turns an unbuilt stack into ``other``, an instance of ``kind``.

    It is a plain stack from then on, and later calls cost nothing extra.
    """
    stack.__dict__.update(other.__dict__)
    object.__setattr__(stack, "__class__", kind)


def show_as(kind: type, plain: type) -> None:
    """Gives a class the name of what its instances become, for messages and reprs of tensordict."""
    kind.__name__ = plain.__name__
