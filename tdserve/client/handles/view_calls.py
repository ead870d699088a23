"""The calls that return views: they select from a store or rearrange it, and fetch nothing until the view is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tdserve.client.handles.skeletons import Skeleton
from tdserve.structure.tree import Path, Spec


class ViewCalls:
    """``select``, ``view``, ``split`` and the like, with tensordict's own arguments. A subclass makes the views."""

    spec: Spec

    def _skeleton(self) -> Skeleton:
        raise NotImplementedError

    def _then(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Returns a view of this after one more call."""
        raise NotImplementedError

    def _cut(self, dim: int, pieces: Sequence[int | slice], cut: Sequence[Any]) -> tuple[Any, ...]:
        """Returns views of parts of a dimension; ``cut`` are their skeletons."""
        raise NotImplementedError

    def _perform(self, name: str, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        """Performs a reading call on a local copy."""
        raise NotImplementedError

    def select(self, *keys: str | Path, inplace: bool = False, strict: bool = True, **kwargs: Any) -> Any:
        """Returns a view of these keys. Raises KeyNotFoundError, unless ``strict=False``."""
        return self._then("select", keys, {"inplace": inplace, "strict": strict, **kwargs})

    def exclude(self, *keys: str | Path, inplace: bool = False) -> Any:
        """Returns a view of all other keys."""
        return self._then("exclude", keys, {"inplace": inplace})

    def flatten_keys(
        self, separator: str = ".", inplace: bool = False, is_leaf: Callable[[type], bool] | None = None
    ) -> Any:
        """Returns a view with joined keys; with ``is_leaf`` a local tensordict."""
        if is_leaf is not None:
            return self._perform("flatten_keys", separator, inplace, is_leaf)
        return self._then("flatten_keys", (separator,), {"inplace": inplace})

    def unflatten_keys(self, separator: str = ".", inplace: bool = False) -> Any:
        """Returns a view with split keys."""
        return self._then("unflatten_keys", (separator,), {"inplace": inplace})

    def view(self, *shape: Any, **kwargs: Any) -> Any:
        """Returns a view of the same rows with another batch size; for a dtype, a local tensordict."""
        if any(isinstance(size, torch.dtype) for size in shape):
            return self._perform("view", *shape, **kwargs)
        return self._then("view", shape, kwargs)

    def reshape(self, *shape: Any, **kwargs: Any) -> Any:
        """Returns a view of the same rows with another batch size."""
        return self._then("reshape", shape, kwargs)

    def permute(self, *dims: Any, **kwargs: Any) -> Any:
        """Returns a view with the batch dimensions in another order."""
        return self._arrange("permute", dims, kwargs)

    def transpose(self, dim0: int, dim1: int) -> Any:
        """Returns a view with two batch dimensions exchanged."""
        return self._arrange("transpose", (dim0, dim1), {})

    def swapaxes(self, axis0: int, axis1: int) -> Any:
        """Does the same as ``transpose``."""
        return self._arrange("swapaxes", (axis0, axis1), {})

    def swapdims(self, axis0: int, axis1: int) -> Any:
        """Does the same as ``transpose``."""
        return self._arrange("swapdims", (axis0, axis1), {})

    def movedim(self, source: Any, destination: Any) -> Any:
        """Returns a view with batch dimensions moved."""
        return self._arrange("movedim", (source, destination), {})

    def moveaxis(self, source: Any, destination: Any) -> Any:
        """Does the same as ``movedim``."""
        return self._arrange("moveaxis", (source, destination), {})

    def squeeze(self, *dims: Any, **kwargs: Any) -> Any:
        """Returns a view without batch dimensions of size 1."""
        return self._then("squeeze", dims, kwargs)

    def unsqueeze(self, *dims: Any, **kwargs: Any) -> Any:
        """Returns a view with one more batch dimension."""
        return self._then("unsqueeze", dims, kwargs)

    def flatten(self, start_dim: int | None = None, end_dim: int | None = None, *, inplace: bool = False) -> Any:
        """Returns a view with batch dimensions joined."""
        return self._then("flatten", (start_dim, end_dim), {"inplace": inplace})

    def unflatten(self, dim: int, unflattened_size: Any, *, inplace: bool = False) -> Any:
        """Returns a view with a batch dimension split."""
        return self._arrange("unflatten", (dim, unflattened_size), {"inplace": inplace})

    def expand(self, *shape: Any, **kwargs: Any) -> Any:
        """Returns a view that repeats rows; it is read only."""
        return self._arrange("expand", shape, kwargs)

    def expand_as(self, other: Any) -> Any:
        """Expands to the batch size of another."""
        like = other._skeleton().td if isinstance(other, ViewCalls) else other
        return self._arrange("expand_as", (like,), {})

    def broadcast_to(self, shape: Any) -> Any:
        """Does the same as ``expand``."""
        return self._arrange("broadcast_to", (shape,), {})

    def split(self, split_size: int | list[int], dim: int = 0) -> tuple[Any, ...]:
        """Returns views of parts of a dimension, each of which fetches only its own rows."""
        return self._pieces("split", (split_size,), dim)

    def chunk(self, chunks: int, dim: int = 0) -> tuple[Any, ...]:
        """Splits into so many parts, as ``split`` does."""
        return self._pieces("chunk", (chunks,), dim)

    def tensor_split(self, indices_or_sections: Any, dim: int = 0) -> tuple[Any, ...]:
        """Splits at these places or into so many parts, as ``split`` does."""
        return self._pieces("tensor_split", (indices_or_sections,), dim)

    def unbind(self, dim: int = 0) -> tuple[Any, ...]:
        """Returns a view of each row."""
        if self._is_hidden(dim):
            rows: tuple[Any, ...] = self._perform("unbind", dim)
            return rows
        cut = self._skeleton().td.unbind(dim)
        return self._cut(dim % self._num_dims, range(len(cut)), cut)

    def narrow(self, dim: int, start: int, length: int) -> Any:
        """Returns a view of a part of a dimension."""
        if self._is_hidden(dim):
            return self._perform("narrow", dim, start, length)
        found = self._skeleton().td.narrow(dim, start, length)
        start = int(start) % self._skeleton().td.batch_size[dim] if start < 0 else int(start)
        return self._cut(dim % self._num_dims, [slice(start, start + length)], [found])[0]

    def _arrange(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Returns a view with other batch dimensions; a local tensordict if only the elements have some of them."""
        return self._perform(name, *args, **kwargs) if self.spec.root.inner else self._then(name, args, kwargs)

    def _is_hidden(self, dim: int) -> bool:
        """Returns whether only the elements have a dimension."""
        return bool(self.spec.root.inner) and not 0 <= dim < len(self._skeleton().td.batch_size)

    @property
    def _num_dims(self) -> int:
        return max(1, len(self._skeleton().td.batch_size))

    def _pieces(self, name: str, args: tuple[Any, ...], dim: int) -> tuple[Any, ...]:
        """Returns where torch would cut a dimension."""
        if self._is_hidden(dim):
            parts: tuple[Any, ...] = self._perform(name, *args, dim)
            return parts
        cut = getattr(self._skeleton().td, name)(*args, dim)
        dim %= self._num_dims
        numbers = getattr(torch.arange(self._skeleton().td.batch_size[dim]), name)(*args)
        bounds = [slice(int(part[0]), int(part[-1]) + 1) if len(part) else slice(0, 0) for part in numbers]
        return self._cut(dim, bounds, cut)


_RENAMED = {"split_size_or_sections": "split_size", "sizes": "unflattened_size", "size": "shape", "axis": "dim"}


def is_view_call(name: str) -> bool:
    """Returns whether a function of torch is one of these calls."""
    return not name.startswith("_") and name in vars(ViewCalls)


def rename_argument(argument: str) -> str:
    """Returns tensordict's name for an argument of a torch function."""
    return _RENAMED.get(argument, argument)
