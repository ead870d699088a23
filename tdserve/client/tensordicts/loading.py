"""Loads of a store by tensordict's memmap family: into a new tensordict, or into one that shows a store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import InitVar, dataclass
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
)
from tdserve.base.ids import check_store_name
from tdserve.client.content.fake_modes import find_fake_mode
from tdserve.client.content.padding import Pad, pad_ragged
from tdserve.client.content.read_content import Content, Destination, on_cpu
from tdserve.client.handles.handle import StoreHandle
from tdserve.client.handles.live_stores import show_stored, with_live_leaves
from tdserve.client.handles.mapped_leaves import map_store
from tdserve.client.session.session_client import SessionClient
from tdserve.client.tensordicts.memmap_arguments import (
    check_device,
    check_mode,
    check_part,
    has_parameters,
    parse_device,
    split_name,
)
from tdserve.client.tensordicts.reading import open_store, show_content
from tdserve.client.transfers.read_selection import read_selection, require_content
from tdserve.structure.building.build import build, fill
from tdserve.structure.building.replace_content import take_over
from tdserve.structure.captures.capture import capture
from tdserve.structure.tensordicts.entries import change_tensors, get_entry
from tdserve.structure.tensordicts.state import mark_tensor, read_mark, restore_state
from tdserve.structure.tensors.torch_types import to_torch
from tdserve.structure.torch_private import FakeTensor, FakeTensorMode, unset_fake_temporarily
from tdserve.structure.trees.tree import Path, Spec


@dataclass
class Loading:
    """One call of ``load_memmap``, whose arguments these are.

    Raises:
        InvalidRequestError: An argument is invalid.
    """

    client: SessionClient
    name: str
    deadline: Deadline
    device: Any
    out: Any
    subpath: InitVar[Any]
    mode: InitVar[str | None]
    allow_pickle: bool | None
    pad: Pad

    def __post_init__(self, subpath: Any, mode: str | None) -> None:
        self.name, self.path = split_name(self.name, subpath)
        check_mode(mode, self.device)
        if self.allow_pickle is not None and not isinstance(self.allow_pickle, bool):
            reason = f"{self.allow_pickle!r} is neither a bool nor None"
            raise InvalidRequestError(argument="allow_pickle", reason=reason)
        if self.out is not None:
            if not is_tensor_collection(self.out):
                reason = f"an object of {type(self.out).__qualname__} is not a tensordict"
                raise InvalidRequestError(argument="out", reason=reason)
            self.device = check_device(self.out, self.device)
        self._is_mapped = mode == "r+"
        self._fake = find_fake_mode()

    def load(self) -> Any:
        """Reads the store and returns ``out``, or a new tensordict."""
        name, out, path = self.name, self.out, self.path
        is_imitated = is_imitation(self.device, self._fake)
        if out is not None and not (path or self.pad is not None or self._is_mapped or is_imitated):
            return self._receive()
        if is_imitated:
            td = self._imitate(self._find())
        elif self._is_mapped:
            td = _unlock(_map(self.client, self._find(), self.deadline, writable=True))
        else:
            if path:
                self._find()
            content = self._fetch(device=self.device)
            if out is not None:
                return _put(out, _get_part(content.build(self.device, self.pad), path), store=name)
            td = show_content(self.client, name, content, self.device, self.pad, self.deadline)
        td = _get_part(td, path)
        return td if out is None else take_over(out, td, store=name)

    def _find(self) -> StoreHandle:
        """Returns the handle of the store, which has a nested part at the path."""
        handle = _find_store(self.client, self.name, self.deadline)
        check_part(handle.spec, self.path, store=self.name)
        return handle

    def _fetch(
        self, keys: Sequence[Path] = (), *, device: Any = None, destination: Destination | None = None
    ) -> Content:
        found = read_selection(
            self.client,
            check_store_name(self.name),
            keys=keys or ((self.path,) if self.path else ()),
            deadline=self.deadline,
            destination=destination,
            device=device,
            allow_pickle=self.allow_pickle,
        )
        return require_content(found)

    def _receive(self) -> Any:
        """Receives the content in place where it fits, without another copy."""
        try:
            self._fetch(destination=Destination(self.out, store=self.name))
        except (SpecMismatchError, NotSupportedError):
            take_over(self.out, self._fetch().build(), store=self.name)
        return self.out

    def _imitate(self, handle: StoreHandle) -> Any:
        spec = handle.spec.select((self.path,)) if self.path else handle.spec

        def fetch_values(keys: Sequence[Path]) -> dict[Path, Any]:
            return self._fetch(keys).values

        td = imitate(spec, fetch_values, device=self.device, mode=self._fake, pad=self.pad)
        return with_live_leaves(td, handle) if handle.shares_non_tensor else td


def _find_store(client: SessionClient, name: str, deadline: Deadline) -> StoreHandle:
    return open_store(client, client.catalog.describe_awaited(name, deadline), "load_memmap()")


def _map(client: SessionClient, handle: StoreHandle, deadline: Deadline, *, writable: bool = False) -> Any:
    """Does what ``handle.map`` does, as a step of a call with this deadline."""
    td = map_store(client, handle.name, handle.spec, writable=writable, deadline=deadline)
    return with_live_leaves(td, handle) if handle.shares_non_tensor else td


def _map_or_none(client: SessionClient, handle: StoreHandle, deadline: Deadline, *, writable: bool) -> Any:
    """Maps the store's memory, unlocked; None if that is not possible, and no write access is asked for."""
    try:
        td = _unlock(_map(client, handle, deadline, writable=writable))
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


def _get_part(td: Any, path: Path) -> Any:
    return get_entry(td, path) if path else td


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
        """Makes ``td`` known as one that shows the store of that name, and no other."""
        number = id(td)
        with self._lock:
            self._names[number] = (ref(td, lambda gone: self._forget(number, gone)), name)

    def find_name(self, td: Any) -> str | None:
        """Returns the name of the store that it shows, if any."""
        with self._lock:
            found = self._names.get(id(td))
        return None if found is None or found[0]() is not td else found[1]

    def show(self, client: SessionClient, td: Any, handle: StoreHandle, deadline: Deadline) -> Any:
        """Makes a tensordict that was just stored show what its store holds; returns it, locked."""
        try:
            mapped = _map(client, handle, deadline)
        except NotSupportedError:
            mapped = None
        shown = show_stored(td, handle, mapped=mapped, is_live=handle.shares_non_tensor)
        self.add(shown, handle.name)
        return shown

    def load(
        self,
        client: SessionClient,
        td: Any,
        name: str,
        deadline: Deadline,
        *,
        allow_pickle: bool | None,
        mode: str | None,
    ) -> Any:
        """Makes a tensordict that shows a store show another one, or the newest content; returns it, locked."""
        check_mode(mode, None)
        handle = _find_store(client, name, deadline)
        is_kept = mode != "r+" and has_parameters(td)
        source = None if is_kept else _map_or_none(client, handle, deadline, writable=mode == "r+")
        is_mapped = source is not None
        if not is_mapped:
            source = require_content(read_selection(client, name, deadline=deadline, allow_pickle=allow_pickle)).build()
        _unlock(td)
        try:
            _show(td, source, handle, is_mapped=is_mapped)
            self.add(td, name)
        finally:
            td.lock_()
        return td

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

    def drop_content(leaf: torch.Tensor) -> torch.Tensor:
        if leaf.is_meta or isinstance(leaf, FakeTensor):
            return leaf
        if leaf.is_nested and leaf.layout is torch.strided:
            reason = "torch has none: store it in the layout torch.jagged, or load it with its content"
            raise NotSupportedError(feature="a strided nested tensor without content", reason=reason)
        if mode is None:
            return mark_tensor(leaf.to("meta"), *read_mark(leaf))
        if leaf.is_nested and mode.shape_env is None:
            reason = "its sizes are symbols: use FakeTensorMode(shape_env=ShapeEnv()), or device='meta'"
            raise NotSupportedError(feature="a jagged tensor under this FakeTensorMode", reason=reason)
        content = leaf.detach()  # its sizes are known, except those of a nested one
        return mark_tensor(mode.from_tensor(content, static_shapes=None if leaf.is_nested else True), *read_mark(leaf))

    with unset_fake_temporarily():  # else received content would be in fake memory
        values = fetch_values([path for path, _ in spec.values]) if spec.values else {}
        shown = on_cpu(spec) if wanted is None else spec.with_device(str(wanted))
        columns = pad_ragged(shown, tensors, values, pad)
        td = build(columns.spec.without_state, columns.tensors, columns.values)
        has_tensors = spec.has_ragged or any(leaf.is_unbatched for _, leaf in spec.values)
        td = change_tensors(td, drop_content) if has_tensors else td
        return restore_state(td, columns.spec.root) if columns.spec.has_state else td
