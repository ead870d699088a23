"""What handles and views share: everything that tensordicts have and that follows from reading, writing, structure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase, is_tensor_collection

from tdserve.client.handles.key_list import KeyList
from tdserve.client.handles.operators import Operators
from tdserve.client.handles.tensordict_names import CONSTANTS, REFUSED, Kind, is_property, kind_of, wants_inplace
from tdserve.client.handles.view_calls import ViewCalls
from tdserve.client.keys import NO_DEFAULT
from tdserve.errors import NotSupportedError
from tdserve.spec.tree import Path, Spec


class TensorDictCalls(ViewCalls, Operators):
    """The methods of a tensordict by three rules, for rows that live on a server.

    - What narrows or arranges (``select``, ``view``, ``split``, ...) gives views: nothing is fetched until they are
      read, and then only the keys and rows that are asked for.
    - Any other method reads what it needs with one call, and runs on that local copy.
    - A method in place (with an underscore at the end) does so too, and writes the copy back with one ``update_``: it
      is *not atomic*, of two clients that do so at once the later one wins. ``zero_``, ``fill_``, ``copy_``,
      ``copy_at_``, ``masked_fill_`` read nothing.

    What is refused, and why, stands in ``tensordict_names.REFUSED``.
    """

    name: str
    spec: Spec

    # ------------------------------------------------------------------------------- what handles and views say

    def to_tensordict(self, *, device: torch.device | str | None = None, timeout_s: float | None = None) -> Any:
        """Everything, as a local tensordict."""
        raise NotImplementedError

    def get_at(self, key: str | Path, index: Any, default: Any = NO_DEFAULT, *, timeout_s: float | None = None) -> Any:
        """Rows of one leaf or nested part."""
        raise NotImplementedError

    def set_at_(self, key: str | Path, value: Any, index: Any, *, timeout_s: float | None = None) -> Any:
        """Writes rows of one leaf or nested part."""
        raise NotImplementedError

    def update_at_(self, values: Any, index: Any, *, timeout_s: float | None = None) -> Any:
        """Writes rows of the leaves that ``values`` has."""
        raise NotImplementedError

    def __getitem__(self, index: Any) -> Any:
        raise NotImplementedError

    # ------------------------------------------------------------------------------- structure

    @property
    def batch_size(self) -> torch.Size:
        """Batch size, -1 where rows differ."""
        return torch.Size(self.spec.root.shown_batch_size)

    @batch_size.setter
    def batch_size(self, value: Any) -> None:
        raise NotSupportedError(feature="assigning batch_size of a store", reason=REFUSED["auto_batch_size_"])

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
        raise NotSupportedError(feature="assigning names of a store", reason=REFUSED["rename_"])

    def __len__(self) -> int:
        num_rows = self.batch_size[0] if self.batch_size else 0
        return num_rows if num_rows >= 0 else len(self.to_tensordict())  # one piece, which knows it alone

    def keys(
        self,
        include_nested: bool = False,
        leaves_only: bool = False,
        is_leaf: Callable[[type], bool] | None = None,
        *,
        sort: bool = False,
    ) -> KeyList:
        """The keys, as ``TensorDict.keys`` lists them, with its set operations; nothing is fetched."""
        if is_leaf is not None:
            return KeyList(self._skeleton().td.keys(include_nested, leaves_only, is_leaf, sort=sort))
        return KeyList(self.spec.keys(include_nested, leaves_only, sort=sort))

    def __contains__(self, key: object) -> bool:
        return key in self.spec.keys(include_nested=True)

    def bytes(self, *, count_duplicates: bool = True) -> int:
        """Bytes of the tensors; ragged ones and non-tensor values are read for it."""
        if self.spec.values:
            return int(self.to_tensordict().bytes(count_duplicates=count_duplicates))
        return self.spec.nbytes

    def is_contiguous(self) -> bool:
        """True: what is read is."""
        return True

    # ------------------------------------------------------------------------------- at once

    def get_non_tensor(self, key: str | Path, default: Any = None, *, timeout_s: float | None = None) -> Any:
        """The value of a non-tensor leaf; of any other, what ``get`` gives."""
        path = key if isinstance(key, tuple) else (key,)
        if (path[0] if len(path) == 1 else path) not in self:
            return default
        return self.select(path).to_tensordict(timeout_s=timeout_s).get_non_tensor(path)

    def gather(self, dim: int, index: torch.Tensor, out: Any = None, **kwargs: Any) -> Any:
        """Elements picked along a dimension, as of ``torch.gather``; only those are fetched."""
        sizes = self._skeleton().td.batch_size
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
        found = self[tuple(part.expand(sizes) for part in grid)]
        found.names = self.names
        return found

    def masked_select(self, mask: torch.Tensor, **kwargs: Any) -> Any:
        """The rows where a mask is true; only those are fetched."""
        is_plain = (
            isinstance(mask, torch.Tensor) and mask.dtype == torch.bool and not kwargs and not self.spec.has_ragged
        )
        return self[mask] if is_plain and mask.ndim else self._perform("masked_select", mask, **kwargs)

    def to(self, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        """A local copy on a device, of a dtype, ...: whatever ``TensorDict.to`` takes."""
        is_device = len(args) == 1 and not kwargs and isinstance(args[0], (str, torch.device, int))
        if is_device and not isinstance(args[0], bool):
            return self.to_tensordict(device=torch.device(args[0]), timeout_s=timeout_s)
        return self._perform("to", *args, timeout_s=timeout_s, **kwargs)

    def cpu(self, *, timeout_s: float | None = None, **kwargs: Any) -> Any:
        """A local copy on the CPU."""
        return self._perform("cpu", timeout_s=timeout_s, **kwargs)

    def empty(self, recurse: bool = False, **kwargs: Any) -> Any:
        """A local tensordict of the same batch size without leaves; ``recurse`` reads and keeps non-tensor values."""
        if recurse:
            return self._perform("empty", recurse, **kwargs)
        found = self._skeleton().td.empty(recurse, **kwargs)
        return found if self.device is None or "device" in kwargs else found.to(self.device)

    def numpy(self, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        """A dict of NumPy arrays, or what else ``TensorDict.numpy`` makes."""
        found = self._perform("numpy", *args, timeout_s=timeout_s, **kwargs)
        return _Arrays(found) if type(found) is dict else found

    # ------------------------------------------------------------------------------- in place

    def zero_(self, *, timeout_s: float | None = None) -> Any:
        """Zero in every tensor, with one write."""
        if self.spec.has_ragged:
            return self._rewrite("zero_", timeout_s=timeout_s)
        return self.update_at_(0, ..., timeout_s=timeout_s)

    def fill_(self, key: str | Path, value: Any, *, timeout_s: float | None = None) -> Any:
        """One number in all of a leaf, or of a nested part, with one write."""
        return self.set_at_(key, value, ..., timeout_s=timeout_s)

    def set_non_tensor(self, key: str | Path, value: Any, *, timeout_s: float | None = None) -> Any:
        """One value for all rows of a non-tensor leaf, with one write."""
        wrapped = NonTensorData(value, batch_size=self._skeleton().td.batch_size)
        return self.set_at_(key, wrapped, ..., timeout_s=timeout_s)

    def copy_(self, tensordict: Any, non_blocking: bool = False, *, timeout_s: float | None = None) -> Any:
        """Same as ``update_``."""
        return self.update_at_(as_local(tensordict), ..., timeout_s=timeout_s)

    def copy_at_(
        self,
        tensordict: Any,
        idx: Any,
        non_blocking: bool = False,
        *,
        fast: bool = True,
        timeout_s: float | None = None,
    ) -> Any:
        """Same as ``update_at_``."""
        return self.update_at_(as_local(tensordict), idx, timeout_s=timeout_s)

    def masked_fill_(self, mask: torch.Tensor, value: Any, *, timeout_s: float | None = None) -> Any:
        """A number in every tensor of the rows where a mask is true, with one write."""
        if self.spec.has_ragged:
            return self._rewrite("masked_fill_", mask, value, timeout_s=timeout_s)
        return self.update_at_(value, mask, timeout_s=timeout_s)

    # ------------------------------------------------------------------------------- all the rest

    def __getattr__(self, name: str) -> Any:
        kind = kind_of(name)
        if kind is None:
            is_inner = hasattr(TensorDictBase, name)
            advice = "; a local tensordict takes what to_tensordict() returns, not the store" if is_inner else ""
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{advice}")
        if kind is Kind.CONSTRUCTOR:
            return getattr(TensorDict, name)
        if kind is Kind.STRUCTURE:
            return CONSTANTS[name] if name in CONSTANTS else getattr(self._skeleton().td, name)
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
        """Functions of torch that tensordict has (``torch.stack`` and its like) are given the content.

        Raises:
            NotSupportedError: The store is an argument of something else, such as ``td + store``.
        """
        first = next(iter([*args, *(kwargs or {}).values()]), None)
        among = first if isinstance(first, (list, tuple)) else [first]
        if not any(isinstance(item, TensorDictCalls) or is_tensor_collection(item) for item in among):
            name = getattr(func, "__name__", str(func))
            raise NotSupportedError(feature=f"a store within {name}", reason="put the result of to_tensordict() there")
        return func(*as_local(args), **as_local(dict(kwargs or {})))

    def _perform(self, name: str, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        """A call that reads: on a local copy."""
        if wants_inplace(name, args, kwargs):
            raise NotSupportedError(
                feature=f"{name}(inplace=True) on a store", reason="write what it returns with update_"
            )
        args, kwargs = as_local(args), as_local(kwargs)
        return getattr(self.to_tensordict(timeout_s=timeout_s), name)(*args, **kwargs)

    def _rewrite(self, name: str, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        """A call in place: on a local copy, which is then written back."""
        args, kwargs = as_local(args), as_local(kwargs)
        td = self.to_tensordict(timeout_s=timeout_s)
        result = getattr(td, name)(*args, **kwargs)
        self.update_at_(td, ..., timeout_s=timeout_s)
        return self if result is td else result

    def _operate(self, name: str, *args: Any) -> Any:
        return self._perform(name, *args)

    def _leave(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return self

    def _refuse(self, name: str, *args: Any, **kwargs: Any) -> Any:
        raise NotSupportedError(feature=f"{name} of a store", reason=REFUSED[name])


class _Arrays(dict[str, Any]):
    """A dict that tells tensordict, which takes whatever has ``numpy()`` for an array, what it was given."""

    @property
    def dtype(self) -> Any:
        feature = "a store as an entry of a local tensordict"
        raise NotSupportedError(feature=feature, reason="put the result of to_tensordict() there")


MutableMapping.register(TensorDictCalls)  # as tensordicts are: TensorDict(store) looks for it


def as_local(value: Any) -> Any:
    """Handles and views among arguments as local tensordicts."""
    if isinstance(value, TensorDictCalls):
        return value.to_tensordict()
    if type(value) in (list, tuple):
        return type(value)(map(as_local, value))
    return {key: as_local(item) for key, item in value.items()} if type(value) is dict else value


def kept_keys(values: Any, keys: Sequence[str | Path] | None) -> Any:
    """What ``keys_to_update`` leaves of values to write: those that are there."""
    values = as_local(values)
    if keys is None:
        return values
    if not is_tensor_collection(values):
        values = TensorDict(values)
    return values.select(*keys, strict=False)
