"""The calls that fetch nothing: they return views of a store, or batches, which fetch what is read of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tdserve.base.deadline import Deadline
from tdserve.base.errors import WrongStateError
from tdserve.client.content.devices import resolve_device
from tdserve.client.content.fake_modes import check_real
from tdserve.client.content.outer_modes import leave_modes_in_calls
from tdserve.client.content.padding import Pad
from tdserve.client.datasets.dataset import add_index, check_index_free
from tdserve.client.datasets.epoch_batches import EpochBatches, plan_epoch
from tdserve.client.handles.skeletons import Skeleton
from tdserve.client.handles.store_client import StoreClient
from tdserve.structure.trees.tree import Path, Spec


@leave_modes_in_calls
class ViewCalls:
    """``select``, ``view``, ``split`` and the like, with tensordict's own arguments, and batches of an epoch.

    A subclass makes the views.
    """

    _store: StoreClient

    @property
    def name(self) -> str:
        """Name of the store."""
        return self._store.name

    @property
    def spec(self) -> Spec:
        """The structure."""
        raise NotImplementedError

    @property
    def _what(self) -> str:
        """Names the rows, for messages."""
        return f"store {self.name!r}"

    def _renew_structure(self, deadline: Deadline | None = None) -> None:
        """Asks the server for the structure if it may have changed; that of a view never does.

        Args:
            deadline: Deadline of the call; None: the client's default timeout begins now.
        """

    def _read_batch(self, rows: Any, numbered_in: tuple[int, ...], pad: Pad, deadline: Deadline) -> Any:
        """Reads rows of everything, by a slice or an array of numbers in a store, or view, of this batch size."""
        raise NotImplementedError

    def _read_all(self, deadline: Deadline, *, device: torch.device | str | None = None) -> Any:
        """Reads everything into a local tensordict, as a step of a call with this deadline."""
        raise NotImplementedError

    def _read_entry(self, path: Path, index: Any, default: Any, deadline: Deadline, pad: Pad = None) -> Any:
        """Reads rows of an entry, as ``get_at`` does, into tensors and tensordicts."""
        raise NotImplementedError

    def _update_at(self, values: Any, index: Any, deadline: Deadline) -> None:
        """Writes rows, as ``update_at_`` does; the values are local."""
        raise NotImplementedError

    def _update(self, values: Any, deadline: Deadline) -> None:
        """Replaces leaves, as ``update_`` does; the values are local."""
        raise NotImplementedError

    def _get_skeleton(self) -> Skeleton:
        raise NotImplementedError

    def _add_step(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
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
        return self._add_step("select", keys, {"inplace": inplace, "strict": strict, **kwargs})

    def exclude(self, *keys: str | Path, inplace: bool = False) -> Any:
        """Returns a view of all other keys."""
        return self._add_step("exclude", keys, {"inplace": inplace})

    def flatten_keys(
        self, separator: str = ".", inplace: bool = False, is_leaf: Callable[[type], bool] | None = None
    ) -> Any:
        """Returns a view with joined keys; with ``is_leaf`` a local tensordict."""
        if is_leaf is not None:
            return self._perform("flatten_keys", separator, inplace, is_leaf)
        return self._add_step("flatten_keys", (separator,), {"inplace": inplace})

    def unflatten_keys(self, separator: str = ".", inplace: bool = False) -> Any:
        """Returns a view with split keys."""
        return self._add_step("unflatten_keys", (separator,), {"inplace": inplace})

    def view(self, *shape: Any, **kwargs: Any) -> Any:
        """Returns a view of the same rows with another batch size; for a dtype, a local tensordict."""
        if any(isinstance(size, torch.dtype) for size in shape):
            return self._perform("view", *shape, **kwargs)
        return self._add_step("view", shape, kwargs)

    def reshape(self, *shape: Any, **kwargs: Any) -> Any:
        """Returns a view of the same rows with another batch size."""
        return self._add_step("reshape", shape, kwargs)

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
        return self._add_step("squeeze", dims, kwargs)

    def unsqueeze(self, *dims: Any, **kwargs: Any) -> Any:
        """Returns a view with one more batch dimension."""
        return self._add_step("unsqueeze", dims, kwargs)

    def flatten(self, start_dim: int | None = None, end_dim: int | None = None, *, inplace: bool = False) -> Any:
        """Returns a view with batch dimensions joined."""
        return self._add_step("flatten", (start_dim, end_dim), {"inplace": inplace})

    def unflatten(self, dim: int, unflattened_size: Any, *, inplace: bool = False) -> Any:
        """Returns a view with a batch dimension split."""
        return self._arrange("unflatten", (dim, unflattened_size), {"inplace": inplace})

    def expand(self, *shape: Any, **kwargs: Any) -> Any:
        """Returns a view that repeats rows; it is read only."""
        return self._arrange("expand", shape, kwargs)

    def expand_as(self, other: Any) -> Any:
        """Expands to the batch size of another."""
        like = other._get_skeleton().td if isinstance(other, ViewCalls) else other
        return self._arrange("expand_as", (like,), {})

    def broadcast_to(self, shape: Any) -> Any:
        """Does the same as ``expand``."""
        return self._arrange("broadcast_to", (shape,), {})

    def split(self, split_size: int | list[int], dim: int = 0) -> tuple[Any, ...]:
        """Returns views of parts of a dimension, each of which fetches only its own rows."""
        return self._find_pieces("split", (split_size,), dim)

    def chunk(self, chunks: int, dim: int = 0) -> tuple[Any, ...]:
        """Splits into this many parts, as ``split`` does."""
        return self._find_pieces("chunk", (chunks,), dim)

    def tensor_split(self, indices_or_sections: Any, dim: int = 0) -> tuple[Any, ...]:
        """Splits at these places or into this many parts, as ``split`` does."""
        return self._find_pieces("tensor_split", (indices_or_sections,), dim)

    def unbind(self, dim: int = 0) -> tuple[Any, ...]:
        """Returns a view of each row."""
        if self._is_hidden(dim):
            rows: tuple[Any, ...] = self._perform("unbind", dim)
            return rows
        cut = self._get_skeleton().td.unbind(dim)
        return self._cut(dim % self._num_dims, range(len(cut)), cut)

    def narrow(self, dim: int, start: int, length: int) -> Any:
        """Returns a view of a part of a dimension."""
        if self._is_hidden(dim):
            return self._perform("narrow", dim, start, length)
        found = self._get_skeleton().td.narrow(dim, start, length)
        start = int(start) % self._get_skeleton().td.batch_size[dim] if start < 0 else int(start)
        return self._cut(dim % self._num_dims, [slice(start, start + length)], [found])[0]

    def batches(
        self,
        num_rows: int,
        *,
        sampler: Any = None,
        epoch: int = 0,
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = False,
        start: int = 0,
        prefetch: int = 4,
        with_index: bool = False,
        device: Any = None,
        pad: Pad = None,
        numpy: bool | None = None,
        timeout_s: float | None = None,
    ) -> EpochBatches:
        """Returns an iterator over one reader's part of an epoch, which reads ahead while the caller works.

        ``world_size`` readers with the same arguments except ``rank`` see each row exactly once, whatever the numbers
        of rows and readers are: nothing is padded, and no row is repeated. The order is computed here, from the
        sampler's seed, the epoch and the number of rows. The server keeps nothing, so that any store can be used, even
        a read-only one; a view has the rows and keys that it shows. If rows do not divide evenly, some readers get one
        row more than others, and perhaps one batch more; ``drop_last`` gives all of them the same number of full
        batches.

        Each batch is as of the moment when it is read, which is before it is returned.

        Args:
            num_rows: Rows of each batch; the last one has the rest.
            sampler: ``tdserve.WithoutReplacement(seed=)`` for a random order, which differs by seed and epoch; None or
                ``tdserve.Fifo()`` for the rows as they are numbered.
            epoch: At least 0; for the next one, call again.
            rank: Rank of this reader, from 0.
            world_size: Number of readers.
            drop_last: Leaves out batches that only some readers would have, and those that are not full.
            start: Batches that this reader has had before; continues after them.
            prefetch: Batches under way or waiting, at most.
            with_index: Adds the row numbers under ``"index"``, int64 ``[num_rows, *others]`` with the other
                batch dimensions; in a view the numbers of its own rows.
            device: Where batches are moved.
            pad: Pads ragged tensors to the longest of the batch, as in ``get``.
            numpy: True returns dicts of NumPy arrays; None is the client's setting.
            timeout_s: Seconds that one batch may take; after that ``next`` raises, and the next call returns the same
                batch.

        Returns:
            An iterator with a ``len``, over plain tensordicts (or the stored class); a context manager.

        Raises:
            InvalidRequestError: An argument is invalid, or the sampler has no order that visits each row once.
            WrongStateError: The store, or view, has no batch dimension.
            SpecMismatchError: Of ``next``: the store was replaced by one with another number of rows.
        """
        check_real("reading a store")
        self._renew_structure(self._store.make_deadline(timeout_s))
        batch_size = self.spec.batch_size
        if not batch_size:
            raise WrongStateError(state=f"{self._what} has no batch dimension", event="batches()")
        if with_index:
            check_index_free(self.name, self.spec.keys())
        plan = plan_epoch(
            batch_size[0],
            num_rows,
            sampler=sampler,
            epoch=epoch,
            rank=rank,
            world_size=world_size,
            drop_last=drop_last,
        )

        def read(rows: Any) -> Any:
            td = self._read_batch(rows, batch_size, pad, self._store.make_deadline(timeout_s))
            return self._store.hand_over(add_index(td, rows) if with_index else td, numpy, device)

        return EpochBatches(self.name, read, plan, start=start, prefetch=prefetch, device=resolve_device(device))

    def _arrange(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Returns a view with other batch dimensions; a local tensordict if only the elements have some of them."""
        return self._perform(name, *args, **kwargs) if self.spec.root.inner else self._add_step(name, args, kwargs)

    def _is_hidden(self, dim: int) -> bool:
        """Returns whether only the elements have a dimension."""
        return bool(self.spec.root.inner) and not 0 <= dim < len(self._get_skeleton().td.batch_size)

    @property
    def _num_dims(self) -> int:
        return max(1, len(self._get_skeleton().td.batch_size))

    def _find_pieces(self, name: str, args: tuple[Any, ...], dim: int) -> tuple[Any, ...]:
        """Returns where torch would cut a dimension."""
        if self._is_hidden(dim):
            parts: tuple[Any, ...] = self._perform(name, *args, dim)
            return parts
        cut = getattr(self._get_skeleton().td, name)(*args, dim)
        dim %= self._num_dims
        numbers = getattr(torch.arange(self._get_skeleton().td.batch_size[dim]), name)(*args)
        bounds = [slice(int(part[0]), int(part[-1]) + 1) if len(part) else slice(0, 0) for part in numbers]
        return self._cut(dim, bounds, cut)


_RENAMED = {"split_size_or_sections": "split_size", "sizes": "unflattened_size", "size": "shape", "axis": "dim"}


def is_view_call(name: str) -> bool:
    """Returns whether a function of torch is one of these calls."""
    return not name.startswith("_") and name in vars(ViewCalls)


def rename_argument(argument: str) -> str:
    """Returns tensordict's name for an argument of a torch function."""
    return _RENAMED.get(argument, argument)
