"""tensordict's calls that load, on a client, with a store's name in place of the path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cached_property
from threading import Lock
from typing import Any
from weakref import ReferenceType, ref

import torch
from tensordict import is_tensor_collection

from tdserve.base.deadline import Deadline
from tdserve.base.errors import (
    InvalidRequestError,
    NotSupportedError,
    SpecMismatchError,
    WrongStateError,
)
from tdserve.client.content.fake_modes import fake_mode
from tdserve.client.content.padding import Pad, pad_ragged
from tdserve.client.content.read_content import Content, Destination, on_cpu
from tdserve.client.handles.handle import StoreHandle
from tdserve.client.handles.live_values import with_live_leaves
from tdserve.client.tensordicts.memmap.arguments import (
    check_mode,
    check_part,
    device_of,
    has_parameters,
    parse_device,
    split_name,
)
from tdserve.client.tensordicts.remote_calls import TensorDictClient
from tdserve.client.transfers.read_selection import require_content
from tdserve.structure.build import build, fill
from tdserve.structure.capture import capture
from tdserve.structure.entries import change_tensors, entry_at
from tdserve.structure.replace_content import take_over
from tdserve.structure.state import mark_of, mark_tensor, restore_state
from tdserve.structure.torch_private import FakeTensor, FakeTensorMode, unset_fake_temporarily
from tdserve.structure.torch_types import to_torch
from tdserve.structure.tree import Path, Spec


class LoadingClient(TensorDictClient):
    """A client with ``load_memmap`` and the calls around it.

    The calls take tensordict's arguments in tensordict's order. Arguments that only matter for local files have no
    effect: ``non_blocking`` (work on a GPU waits for the content there), ``robust_key`` (keys of all kinds are stored
    under safe names), ``num_threads`` (there is nothing to decompress).
    """

    def load_memmap(
        self,
        name: str,
        device: Any = None,
        non_blocking: bool = False,
        *,
        out: Any = None,
        robust_key: bool | None = True,
        subpath: Any = None,
        mode: str | None = None,
        num_threads: int = 0,
        allow_pickle: bool | None = None,
        pad: Pad = None,
        timeout_s: float | None = None,
        return_early: bool = False,
    ) -> Any:
        """Reads the content of a store into a local tensordict, or returns a future of it.

        With ``device="meta"``, and under a ``FakeTensorMode``, it has meta or fake tensors. Then only non-tensor values
        are fetched, and ragged tensors, whose sizes are unknown without their content.

        Args:
            name: Of the store; waits for it if it does not exist yet. ``"store/part"`` names a nested tensordict, as
                ``subpath`` does.
            device: Where the tensors are moved; None leaves them on the CPU.
            out: Receives the content in place if it fits. Otherwise its leaves are replaced, and keys that the store
                lacks are removed, as in tensordict. If it has a device, the content goes there.
            subpath: Of a nested tensordict, which alone is read and returned: a key, or parts joined by ``"/"``.
            mode: ``"r"`` and None return a copy. ``"r+"`` returns the store's memory, as of
                ``StoreHandle.map(writable=True)``, and needs the transport shm.
            allow_pickle: Whether pickled values are unpickled; None: as set for the client.
            pad: Pads ragged tensors, as in ``from_remote_init``.

        Raises:
            StoreNotFoundError: It does not exist, with ``timeout_s=0``.
            DeadlineExceededError: The store was not created in time.
            InvalidRequestError: There is not a tensordict at ``subpath``, ``mode`` is unknown, ``out`` is not a
                tensordict, or ``device`` differs from that of ``out``.
            SpecMismatchError: ``out`` is of another kind (a tensorclass, a lazy stack). Nothing was written to it.
            NotSupportedError: With ``mode="r+"``: this client may not write to the server's memory.
        """
        name, path = split_name(name, subpath)
        check_mode(mode, device)
        if allow_pickle is not None and not isinstance(allow_pickle, bool):
            raise InvalidRequestError(argument="allow_pickle", reason=f"{allow_pickle!r} is neither a bool nor None")
        if out is not None and not is_tensor_collection(out):
            raise InvalidRequestError(
                argument="out", reason=f"an object of {type(out).__qualname__} is not a tensordict"
            )
        wanted = device if out is None else device_of(out, device)
        deadline = self.deadline(timeout_s)
        fake = fake_mode()

        def load() -> Any:
            if out is not None and not (path or pad is not None or mode == "r+" or is_imitation(wanted, fake)):
                return self._receive_into(name, out, deadline, allow_pickle)
            handle = self._store(name, deadline, path) if path or mode == "r+" or is_imitation(wanted, fake) else None
            if handle is not None and is_imitation(wanted, fake):
                td = self._imitate(handle, path, deadline, device=wanted, mode=fake, pad=pad, trusts=allow_pickle)
            elif handle is not None and mode == "r+":
                td = _unlock(handle.map(writable=True, timeout_s=deadline.remaining_s))
            else:
                content = self._content(name, deadline, path, device=wanted, allow_pickle=allow_pickle)
                if out is not None:
                    return _put(out, _part(content.build(wanted, pad), path), store=name)
                td = self._show_content(name, content, wanted, pad)
            td = _part(td, path)
            return td if out is None else take_over(out, td, store=name)

        return self.perform(load, return_early)

    load = load_memmap

    def load_memmap_(
        self,
        td: Any,
        name: str,
        robust_key: bool | None = True,
        *,
        allow_pickle: bool | None = None,
        mode: str | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        """Fills a tensordict with what a store holds, and returns it; as ``load_memmap`` with ``out=td``.

        A tensordict from ``memmap_`` shows this store from then on, instead of its former one.
        """
        if isinstance(td, StoreHandle):
            return td.load_memmap_(name, allow_pickle=allow_pickle, timeout_s=timeout_s)
        if self._shows.name_of(td) is None:
            return self.load_memmap(name, out=td, allow_pickle=allow_pickle, mode=mode, timeout_s=timeout_s)
        check_mode(mode, None)
        deadline = self.deadline(timeout_s)
        handle = self._store(name, deadline)
        is_kept = mode != "r+" and has_parameters(td)
        source = None if is_kept else _map_or_none(handle, deadline, writable=mode == "r+")
        is_mapped = source is not None
        if not is_mapped:
            source = self._content(name, deadline, allow_pickle=allow_pickle).build()
        _unlock(td)
        try:
            _show(td, source, handle, is_mapped=is_mapped)
            self._shows.add(td, name)
        finally:
            td.lock_()
        return td

    load_ = load_memmap_

    def memmap_refresh_(self, td: Any, *, allow_pickle: bool | None = None, timeout_s: float | None = None) -> Any:
        """Makes a tensordict from ``memmap_`` show what its store holds now, including new keys; returns it, locked.

        If the client shares memory with the server its tensors show that anyway, until the store is created again, or
        gets new keys.

        Raises:
            WrongStateError: The tensordict shows no store; ``load_memmap_`` accepts a name.
            StoreNotFoundError: The store was deleted. The tensordict is unchanged.
        """
        if isinstance(td, StoreHandle):
            return td.memmap_refresh_()
        name = self._shows.name_of(td)
        if name is None:
            state = "the tensordict was not returned by memmap_() of this client (load_memmap_() takes a name)"
            raise WrongStateError(state=state, event="memmap_refresh_()")
        return self.load_memmap_(td, name, allow_pickle=allow_pickle, timeout_s=timeout_s)

    @cached_property
    def _shows(self) -> ShownStores:
        return ShownStores()

    def _store(self, name: str, deadline: Deadline, path: Path = ()) -> StoreHandle:
        """Returns the handle of a store that has a nested part at ``path``."""
        handle = self._handle(self.describe(name, timeout_s=deadline.remaining_s))
        if not isinstance(handle, StoreHandle):
            raise WrongStateError(state=f"store {name!r} is a replay", event="load_memmap()")
        check_part(handle.spec, path, store=name)
        return handle

    def _content(
        self,
        name: str,
        deadline: Deadline,
        path: Path = (),
        *,
        device: Any = None,
        allow_pickle: bool | None = None,
    ) -> Content:
        keys = (path,) if path else ()
        return require_content(self._fetch(name, deadline, keys=keys, device=device, allow_pickle=allow_pickle))

    def _receive_into(self, name: str, out: Any, deadline: Deadline, allow_pickle: bool | None) -> Any:
        """Receives the content in place where it fits, without another copy."""
        try:
            destination = Destination(out, store=name)
            self._fetch(name, deadline, destination=destination, allow_pickle=allow_pickle)
        except (SpecMismatchError, NotSupportedError):
            content = self._content(name, deadline, allow_pickle=allow_pickle)
            take_over(out, content.build(), store=name)
        return out

    def _imitate(
        self,
        handle: StoreHandle,
        path: Path,
        deadline: Deadline,
        *,
        device: Any,
        mode: FakeTensorMode | None,
        pad: Pad,
        trusts: bool | None,
    ) -> Any:
        def fetch_values(keys: Sequence[Path]) -> dict[Path, Any]:
            return require_content(self._fetch(handle.name, deadline, keys=keys, allow_pickle=trusts)).values

        spec = handle.spec.select((path,)) if path else handle.spec
        td = imitate(spec, fetch_values, device=device, mode=mode, pad=pad)
        return with_live_leaves(td, handle) if handle.shares_non_tensor else td


def _map_or_none(handle: StoreHandle, deadline: Deadline, *, writable: bool) -> Any:
    """Maps the store's memory, unlocked; None if that is not possible, and no write access is asked for."""
    try:
        td = _unlock(handle.map(writable=writable, timeout_s=deadline.remaining_s))
    except NotSupportedError:
        if writable:
            raise
        return None
    return td if writable or not td.is_locked else None


def _unlock(td: Any) -> Any:
    try:
        return td.unlock_()
    except RuntimeError:  # parameters below that have a lock of their own
        return td


def _show(td: Any, source: Any, store: StoreHandle, *, is_mapped: bool) -> None:
    """Makes an unlocked tensordict show what a store holds."""
    try:
        if is_mapped or store.spec.has_ragged:
            take_over(td, source, store=store.name)
        else:
            _put(td, source, store=store.name)
    except NotSupportedError:  # for example a TensorDictParams, which stays locked
        _put(td, source, store=store.name)
    if store.shares_non_tensor:
        with_live_leaves(td, store)


def _part(td: Any, path: Path) -> Any:
    return entry_at(td, path) if path else td


def _put(out: Any, td: Any, *, store: str) -> Any:
    """Copies into ``out`` what fits, and replaces what does not."""
    try:
        captured = capture(td, allow_pickle=True)
        fill(out, captured.spec, captured.tensors, captured.values)
    except (SpecMismatchError, NotSupportedError):
        take_over(out, td, store=store)
    return out


class ShownStores:
    """Names of stores by the tensordicts that show them. Does not keep these alive. Threads: safe.

    Tensordicts compare entry by entry, so they are identified by ``id``.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._names: dict[int, tuple[ReferenceType[Any], str]] = {}

    def add(self, td: Any, name: str) -> None:
        """Makes ``td`` show the store of that name, and no other."""
        number = id(td)
        with self._lock:
            self._names[number] = (ref(td, lambda gone: self._forget(number, gone)), name)

    def name_of(self, td: Any) -> str | None:
        """Returns the name of the store that it shows, if any."""
        with self._lock:
            found = self._names.get(id(td))
        return None if found is None or found[0]() is not td else found[1]

    def _forget(self, number: int, gone: ReferenceType[Any]) -> None:
        # No lock: this runs wherever the last reference is dropped, perhaps within add() of the same thread.
        found = self._names.get(number)
        if found is not None and found[0] is gone:
            self._names.pop(number, None)


FetchValues = Callable[[Sequence[Path]], "dict[Path, Any]"]
"""Reads the leaves of these paths that are stored value by value."""


def is_imitation(device: torch.device | str | int | None, mode: FakeTensorMode | None) -> bool:
    """Returns whether a tensordict on this device, under this mode, has tensors without content."""
    return mode is not None or (device is not None and parse_device(device).type == "meta")


def imitate(
    spec: Spec,
    fetch_values: FetchValues,
    *,
    device: torch.device | str | int | None,
    mode: FakeTensorMode | None,
    pad: Pad = None,
) -> Any:
    """Returns a tensordict with tensors without content, and with its non-tensor values.

    Args:
        spec: The structure.
        fetch_values: Reads non-tensor values, which cannot be imitated, and ragged tensors, whose sizes are part of
            their content.
        device: Apparent device of the tensors; None is the CPU.
        mode: Makes fake tensors; without one ``device`` is ``"meta"``.
        pad: As in ``load_memmap``.

    Raises:
        NotSupportedError: There is a nested tensor that torch, or this ``mode``, cannot make without content.
    """
    wanted = None if device is None else parse_device(device)
    with nullcontext() if mode is None else mode:
        tensors = {
            path: torch.empty(leaf.shape, dtype=to_torch(leaf.dtype), device=wanted) for path, leaf in spec.tensors
        }

    def without_content(leaf: torch.Tensor) -> torch.Tensor:
        if leaf.is_meta or isinstance(leaf, FakeTensor):
            return leaf
        if leaf.is_nested and leaf.layout is torch.strided:
            reason = "torch has none: store it in the layout torch.jagged, or load it with its content"
            raise NotSupportedError(feature="a strided nested tensor without content", reason=reason)
        if mode is None:
            return mark_tensor(leaf.to("meta"), *mark_of(leaf))
        if leaf.is_nested and mode.shape_env is None:
            reason = "its sizes are symbols: use FakeTensorMode(shape_env=ShapeEnv()), or device='meta'"
            raise NotSupportedError(feature="a jagged tensor under this FakeTensorMode", reason=reason)
        content = leaf.detach()  # its sizes are known, except those of a nested one
        return mark_tensor(mode.from_tensor(content, static_shapes=None if leaf.is_nested else True), *mark_of(leaf))

    with unset_fake_temporarily():  # else received content would be in fake memory
        values = fetch_values([path for path, _ in spec.values]) if spec.values else {}
        shown = on_cpu(spec) if wanted is None else spec.with_device(str(wanted))
        columns = pad_ragged(shown, tensors, values, pad)
        td = build(columns.spec.without_state, columns.tensors, columns.values)
        has_tensors = spec.has_ragged or any(leaf.is_unbatched for _, leaf in spec.values)
        td = change_tensors(td, without_content) if has_tensors else td
        return restore_state(td, columns.spec.root) if columns.spec.has_state else td
