"""The methods that handles and views share: all of tensordict's that follow from reading, writing and structure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection

from tdserve.base.deadline import Deadline
from tdserve.base.errors import KeyNotFoundError, NotSupportedError, UnsupportedAttributeError
from tdserve.client.content.outer_modes import leave_modes_in_calls
from tdserve.client.handles.key_list import KeyList
from tdserve.client.handles.key_paths import NO_DEFAULT
from tdserve.client.handles.local_values import to_local
from tdserve.client.handles.operators import on_copy, on_copy_of_one, on_copy_written_back, refuse_truth
from tdserve.client.handles.tensordict_names import (
    ASSIGNED,
    CONSTANTS,
    OUT_OF_PROCESSES,
    REFUSED,
    Kind,
    find_argument,
    find_kind,
    is_inplace_wanted,
    is_property,
    make_unassignable,
)
from tdserve.client.handles.view_calls import is_view_call, rename_argument
from tdserve.client.handles.write_calls import WriteCalls
from tdserve.structure.tensordicts.instances import find_fields
from tdserve.structure.trees.tree import Path


@leave_modes_in_calls
class TensorDictCalls(WriteCalls):
    """The methods of a tensordict, for rows on a server. Three rules cover them.

    - Calls that select or rearrange (``select``, ``view``, ``split``, ...) return views. Nothing is fetched until a
      view is read, and then only the keys and rows that are asked for.
    - Any other method reads what it needs with one call, and runs on that local copy.
    - An in-place method (with a trailing underscore) does the same, and writes the copy back with one ``update_``. It
      is *not atomic*: of two clients that do so at once the later one wins. ``zero_``, ``fill_``, ``copy_``,
      ``copy_at_`` and ``masked_fill_`` read nothing.

    ``tensordict_names.REFUSED`` lists what is refused, and why.
    """

    # ------------------------------------------------------------------------------- operators

    __hash__ = object.__hash__  # as keys of a dict or members of a set, only identical objects are equal
    __bool__ = refuse_truth
    __eq__, __ne__, __lt__, __le__, __gt__, __ge__ = on_copy("eq", "ne", "lt", "le", "gt", "ge")
    __add__, __sub__, __mul__, __truediv__, __mod__ = on_copy("add", "sub", "mul", "truediv", "mod")
    __radd__, __rsub__, __rmul__, __rtruediv__ = on_copy("radd", "rsub", "rmul", "rtruediv")
    __pow__, __rpow__, __and__, __rand__ = on_copy("pow", "rpow", "and", "rand")
    __or__, __ror__, __xor__, __rxor__ = on_copy("or", "ror", "xor", "rxor")
    __abs__, __neg__, __invert__ = on_copy_of_one("abs", "neg", "invert")
    __iadd__, __isub__, __imul__ = on_copy_written_back("add_", "sub_", "mul_")
    __itruediv__, __ipow__ = on_copy_written_back("div_", "pow_")

    # ------------------------------------------------------------------------------- defined by handles and views

    def to_tensordict(self, *, device: torch.device | str | None = None, timeout_s: float | None = None) -> Any:
        """Reads everything into a local tensordict."""
        raise NotImplementedError

    def get_at(self, key: str | Path, index: Any, default: Any = NO_DEFAULT, *, timeout_s: float | None = None) -> Any:
        """Reads rows of a leaf or nested part."""
        raise NotImplementedError

    def set(self, key: str | Path, value: Any) -> Any:
        """Writes a leaf or nested part."""
        raise NotImplementedError

    def _read_item(self, index: Any) -> Any:
        """Reads an entry or rows, as ``__getitem__`` does, into tensors and tensordicts."""
        raise NotImplementedError

    def __getitem__(self, index: Any) -> Any:
        """Reads a leaf or nested part (``store["key"]``, ``store["a", "b"]``).

        Any other index reads rows of everything.
        """
        return self._store.hand_over(self._read_item(index))

    # ------------------------------------------------------------------------------- structure

    @property
    def batch_size(self) -> torch.Size:
        """Batch size, with -1 where rows differ; a handle asks the server for it, as for ``len``.

        ``spec.batch_size`` of a handle is that of the store which it last read.
        """
        self._renew_structure()
        return torch.Size(self.spec.root.shown_batch_size)

    @batch_size.setter
    def batch_size(self, value: Any) -> None:
        raise make_unassignable("batch_size")

    @property
    def shape(self) -> torch.Size:
        """Same as ``batch_size``."""
        return self.batch_size

    @property
    def ndim(self) -> int:
        """Number of batch dimensions."""
        return len(self.spec.root.shown_batch_size)

    @property
    def device(self) -> torch.device | None:
        """Device of what is read: the CPU if the stored tensordict had a device, else None."""
        return None if self.spec.root.device is None else torch.device("cpu")

    @property
    def is_cpu(self) -> bool:
        """Whether what is read has the CPU as its device."""
        return self.device is not None

    @property
    def names(self) -> list[str | None]:
        """Names of the batch dimensions."""
        return list(self.spec.root.names or [None] * self.ndim)

    @names.setter
    def names(self, value: Any) -> None:
        raise make_unassignable("names")

    def __len__(self) -> int:
        sizes = self.batch_size
        num_rows = sizes[0] if sizes else 0
        return num_rows if num_rows >= 0 else len(self.to_tensordict())  # a store in one piece has it only inside

    def keys(
        self,
        include_nested: bool = False,
        leaves_only: bool = False,
        is_leaf: Callable[[type], bool] | None = None,
        *,
        sort: bool = False,
    ) -> KeyList:
        """Lists the keys, as ``TensorDict.keys`` does, with its set operations; nothing is fetched.

        A handle asks the server for them, since other clients may have changed them.
        """
        self._renew_structure()
        if is_leaf is not None:
            return KeyList(self._get_skeleton().td.keys(include_nested, leaves_only, is_leaf, sort=sort))
        return KeyList(self.spec.keys(include_nested, leaves_only, sort=sort))

    def __contains__(self, key: object) -> bool:
        self._renew_structure()
        return key in self.spec.keys(include_nested=True)

    def bytes(self, *, count_duplicates: bool = True) -> int:
        """Counts the bytes of the tensors; reads ragged ones and non-tensor values for it."""
        if self.spec.values:
            return int(self.to_tensordict().bytes(count_duplicates=count_duplicates))
        return self.spec.nbytes

    def is_contiguous(self) -> bool:
        """Returns True: what is read is contiguous."""
        return True

    # ------------------------------------------------------------------------------- read at once

    def get_non_tensor(self, key: str | Path, default: Any = None, *, timeout_s: float | None = None) -> Any:
        """Returns the value of a non-tensor leaf; for any other entry what ``get`` returns."""
        path, deadline = key if isinstance(key, tuple) else (key,), self._store.make_deadline(timeout_s)
        self._renew_structure(deadline)
        if (path[0] if len(path) == 1 else path) not in self.spec.keys(include_nested=True):
            return default
        return self.select(path)._read_all(deadline).get_non_tensor(path)

    def gather(self, dim: int, index: torch.Tensor, out: Any = None, **kwargs: Any) -> Any:
        """Picks elements along a dimension, as ``torch.gather`` does; fetches only these."""
        sizes = self._get_skeleton().td.batch_size
        dims = len(sizes)
        is_plain = (
            out is None and not kwargs and not self.spec.has_ragged and index.ndim == dims and -dims <= dim < dims
        )
        if not is_plain or (index.numel() and not 0 <= int(index.min()) <= int(index.max()) < sizes[dim]):
            return self._perform("gather", dim, index, out, **kwargs)
        index = index.cpu()
        sizes = index.shape
        grid: list[Any] = [torch.arange(size).reshape([-1] + [1] * (dims - at - 1)) for at, size in enumerate(sizes)]
        grid[dim] = index
        found = self._read_item(tuple(part.expand(sizes) for part in grid))
        found.names = self.names
        return found

    def masked_select(self, mask: torch.Tensor, **kwargs: Any) -> Any:
        """Selects the rows where a mask is true; fetches only these."""
        is_plain = (
            isinstance(mask, torch.Tensor) and mask.dtype == torch.bool and not kwargs and not self.spec.has_ragged
        )
        return self._read_item(mask) if is_plain and mask.ndim else self._perform("masked_select", mask, **kwargs)

    def to(self, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        """Returns a local copy on a device, of a dtype, ...: accepts what ``TensorDict.to`` accepts."""
        is_device = len(args) == 1 and not kwargs and isinstance(args[0], (str, torch.device, int))
        if is_device and not isinstance(args[0], bool):
            return self.to_tensordict(device=torch.device(args[0]), timeout_s=timeout_s)
        return self._perform("to", *args, timeout_s=timeout_s, **kwargs)

    def cpu(self, *, timeout_s: float | None = None, **kwargs: Any) -> Any:
        """Returns a local copy on the CPU."""
        return self._perform("cpu", timeout_s=timeout_s, **kwargs)

    def empty(self, recurse: bool = False, **kwargs: Any) -> Any:
        """Returns a local tensordict of the same batch size without leaves.

        ``recurse`` reads and keeps non-tensor values.
        """
        if recurse or self.spec.root.inner:
            return self._perform("empty", recurse, **kwargs)
        found = self._get_skeleton().td.empty(recurse, **kwargs)
        return found if self.device is None or "device" in kwargs else found.to(self.device)

    def numpy(self, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        """Returns a dict of NumPy arrays, as ``TensorDict.numpy`` does."""
        found = self._perform("numpy", *args, timeout_s=timeout_s, **kwargs)
        return _Arrays(found) if type(found) is dict else found

    # ------------------------------------------------------------------------------- in place

    def zero_(self, *, timeout_s: float | None = None) -> Any:
        """Sets every tensor to zero, with one write."""
        if self.spec.has_ragged:
            return self._rewrite("zero_", timeout_s=timeout_s)
        return self.update_at_(0, ..., timeout_s=timeout_s)

    def masked_fill_(self, mask: torch.Tensor, value: Any, *, timeout_s: float | None = None) -> Any:
        """Fills the rows where a mask is true with a number, in every tensor, with one write."""
        self._check_number(value, "")
        if self.spec.has_ragged:
            return self._rewrite("masked_fill_", mask, value, timeout_s=timeout_s)
        return self.update_at_(value, mask, timeout_s=timeout_s)

    def refine_names(self, *names: Any) -> Any:
        """Returns itself if the batch dimensions have these names. Names are given when a store is created.

        Raises:
            NotSupportedError: They have other names. Nothing was changed.
        """
        found: Any = TensorDict({}, [max(size, 0) for size in self.batch_size])
        found.names = self.names
        if found.refine_names(*names).names != self.names:
            raise make_unassignable("names")
        return self

    # ------------------------------------------------------------------------------- all the rest

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets a field of a tensorclass (``handle.field = value``), as for an instance.

        Else an attribute of this object.

        Raises:
            NotSupportedError: The assignment would not reach the store. Nothing was changed.
        """
        if name.startswith("_") or getattr(getattr(type(self), name, None), "fset", None) is not None:
            object.__setattr__(self, name, value)
        elif name in ASSIGNED or is_property(name):
            raise make_unassignable(name)
        elif self.spec.root.tensorclass is None:
            object.__setattr__(self, name, value)
        else:
            self._set_field(name, value)

    def _set_field(self, name: str, value: Any) -> None:
        fields = find_fields(str(self.spec.root.tensorclass))
        if fields and name not in fields:
            raise UnsupportedAttributeError(
                feature=f"assigning {name!r} of store {self.name!r}", reason=f"its fields are {sorted(fields)}"
            )
        if hasattr(type(self), name) or name in vars(self):
            reason = f"handles have an attribute of that name: use set({name!r}, value)"
            raise UnsupportedAttributeError(
                feature=f"assigning the field {name!r} of store {self.name!r}", reason=reason
            )
        self.set(name, value)

    def __getattr__(self, name: str) -> Any:
        kind = find_kind(name)
        if kind is None and not name.startswith("_") and self._is_field(name):
            return self._get_field(name)
        if kind is None and hasattr(TensorDictBase, name):
            what = "a store where tensordict needs a local tensordict" if name.startswith("_") else f"{name} of a store"
            reason = "pass what its to_tensordict() returns, and write a result back with its update_()"
            raise UnsupportedAttributeError(feature=what, reason=reason)
        if kind is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if kind is Kind.CONSTRUCTOR:
            return getattr(TensorDict, name)
        if kind is Kind.STRUCTURE and self.spec.root.inner and name not in CONSTANTS:
            return getattr(self.to_tensordict(), name)  # only the elements have all of their dimensions
        if kind is Kind.STRUCTURE:
            return CONSTANTS[name] if name in CONSTANTS else getattr(self._get_skeleton().td, name)
        if kind is Kind.READ and is_property(name):
            return getattr(self.to_tensordict(), name)
        answers: Mapping[Kind, Callable[..., Any]] = {
            Kind.READ: self._perform,
            Kind.REWRITE: self._rewrite,
            Kind.UNCHANGED: self._leave,
            Kind.REFUSED: self._refuse,
        }
        answer = answers[kind]

        def call(*args: Any, **kwargs: Any) -> Any:
            return answer(name, *args, **kwargs)

        call.__name__ = name
        return call

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Reads the content and passes it to torch functions that tensordict supports, such as ``torch.stack``.

        Raises:
            NotSupportedError: The store is an argument of another call, such as ``td + store``.
        """
        name = getattr(func, "__name__", str(func))
        options = dict(kwargs or {})
        given = [*args, *options.values()][func is torch.where :]  # its first argument is the condition
        subject = given[0] if given else None
        if isinstance(subject, TensorDictCalls) and "out" not in options and (name.endswith("_") or is_view_call(name)):
            method = getattr(subject, name)
            return method(
                *args[1:], **{rename_argument(key): item for key, item in options.items() if item is not subject}
            )
        among = subject if isinstance(subject, (list, tuple)) else [subject, options.get("out")]
        if not any(isinstance(item, TensorDictCalls) or is_tensor_collection(item) for item in among):
            raise NotSupportedError(feature=f"a store within {name}", reason="put the result of to_tensordict() there")
        return _call_and_fill(options.get("out"), args, options, func)

    def _perform(self, name: str, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        """Performs a reading call on a local copy. A store or view as ``out=`` is written with one ``update_``."""
        if is_inplace_wanted(name, args, kwargs):
            reason = "write what it returns without that: update_ what fits; else del_ the key, and set it"
            raise NotSupportedError(feature=f"{name}(inplace=True) on a store", reason=reason)
        out = find_argument(name, "out", args, kwargs)
        if isinstance(out, TensorDictCalls) and name in OUT_OF_PROCESSES:
            reason = "other processes write into it: give it a memory-mapped tensordict, and write that with update_"
            raise NotSupportedError(feature=f"{name}(out=) of a store", reason=reason)
        deadline = self._store.make_deadline(timeout_s)
        return _call_and_fill(out, args, kwargs, getattr(self._read_all(deadline), name), deadline)

    def _rewrite(self, name: str, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        """Performs an in-place call on a local copy, and writes the copy back."""
        deadline = self._store.make_deadline(timeout_s)
        args, kwargs = to_local(args, deadline), to_local(kwargs, deadline)
        td = self._read_all(deadline)
        result = getattr(td, name)(*args, **kwargs)
        self._update_at(td, ..., deadline)
        return self if result is td else result

    def _is_field(self, name: str) -> bool:
        tensorclass = self.spec.root.tensorclass if "_store" in vars(self) else None
        return tensorclass is not None and (name in find_fields(tensorclass) or name in dict(self.spec.root.entries))

    def _get_field(self, name: str) -> Any:
        try:
            return self[name]
        except KeyNotFoundError:  # it is empty
            return None

    def _leave(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return self

    def _refuse(self, name: str, *args: Any, **kwargs: Any) -> Any:
        raise NotSupportedError(feature=f"{name} of a store", reason=REFUSED[name])


def _call_and_fill(
    out: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    call: Callable[..., Any],
    deadline: Deadline | None = None,
) -> Any:
    """Performs a call with local arguments; writes back what the call fills, if that is a store or view."""
    if not isinstance(out, TensorDictCalls):
        return call(*to_local(args, deadline), **to_local(dict(kwargs), deadline))
    deadline = out._store.make_deadline(None) if deadline is None else deadline
    copy = out._read_all(deadline)
    args = tuple(copy if item is out else to_local(item, deadline) for item in args)
    options = {key: copy if item is out else to_local(item, deadline) for key, item in kwargs.items()}
    result = call(*args, **options)
    out._update(copy, deadline)
    return out if result is copy else result


class _Arrays(dict[str, Any]):
    """A dict that refuses to be an array: tensordict takes whatever has ``numpy()`` for one."""

    @property
    def dtype(self) -> Any:
        feature = "a store as an entry of a local tensordict"
        raise NotSupportedError(feature=feature, reason="put the result of to_tensordict() there")


MutableMapping.register(TensorDictCalls)  # as for tensordicts: TensorDict(store) checks for it
