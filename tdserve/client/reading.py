"""Reads: ask, be told what comes, receive it, put it together."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tdserve.client.calls import SessionClient, answer_timeout_s, transfer_timeout_s
from tdserve.client.devices import to_device
from tdserve.client.incoming import Posted, Received, receive
from tdserve.client.leaves import Leaves, leaves_of
from tdserve.client.local.end import LocalEnd
from tdserve.client.local.reads import copy_selection
from tdserve.client.pending import Pending
from tdserve.client.session import Session
from tdserve.client.tables.padding import Pad, padded
from tdserve.client.value_blocks import decode_values
from tdserve.client.weights.relay_taking import receive_linked
from tdserve.content import read_layout, selected_spec
from tdserve.data.opened import OpenStore
from tdserve.data.values import ReadBlock
from tdserve.deadline import Deadline
from tdserve.errors import (
    DeadlineExceededError,
    LocalProtocolError,
    RemoteProtocolError,
    TDServeError,
    TransferAbortedError,
    TransportError,
)
from tdserve.layout import Layout
from tdserve.selection import Selection
from tdserve.session import tag_of
from tdserve.spec import codec
from tdserve.spec.blank import META, is_blank
from tdserve.spec.build import build, fill
from tdserve.spec.capture import capture
from tdserve.spec.state import restored
from tdserve.spec.tree import Path, Spec, check_matches
from tdserve.v1 import content_pb2, control_pb2

MAX_LOCAL_TRIES = 100
"""Copies of a selection that writers keep changing; each lasts about as long as one of their writes."""


@dataclass(frozen=True)
class Content:
    """What a read brought.

    Attributes:
        spec: Its structure.
        leaves: Its tensors by path.
        values: Its non-tensor values by path.
        version: Content version of the store.
        accepted: What the server said of it.
        received: The columns that came, where it was received or copied by rows.
        fault: Why its values could not be decoded, for a caller who needs the rest nevertheless.
        stored: The store's whole structure, where it is another than the caller knew.
        is_blank: Whether the store was made of meta tensors, and nobody has written it yet.
    """

    spec: Spec
    leaves: dict[Path, torch.Tensor]
    values: dict[Path, Any]
    version: int
    accepted: control_pb2.Accepted = field(default_factory=control_pb2.Accepted)
    received: Received | None = None
    fault: TDServeError | None = None
    stored: Spec | None = None
    is_blank: bool = False

    @property
    def columns(self) -> Received:
        """All that was received, what the service has added too."""
        if self.received is None:
            raise LocalProtocolError(reason="nothing was received with these leaves")
        return self.received

    def build(self, device: torch.device | str | int | None = None, pad: Pad = None) -> Any:
        """The tensordict (or tensorclass instance); its leaves are views of one buffer, moved if a device is named;
        meta tensors of a store that holds nothing yet, if none is.

        ``pad`` as of ``padded``.
        """
        if device is None and self.is_blank:
            device = META
        spec, leaves, values = padded(on_cpu(self.spec), self.leaves, self.values, pad)
        if device is None or not spec.has_state:
            return to_device(build(spec, leaves, values), device)
        # a parameter that is moved is no parameter, but the result of a computation
        return restored(to_device(build(spec.without_state, leaves, values), device), spec.root)

    def of(self, stored: Spec) -> Content:
        """The same content, of a store of this structure."""
        return self if stored.root.device != META else replace(self, is_blank=is_blank(stored, self.version))


def on_cpu(spec: Spec) -> Spec:
    """The structure of content that lies on the CPU, wherever its tensors were when they were stored."""
    device = spec.root.device
    return spec.on_cpu if device is None or device == "cpu" else spec.with_device("cpu")


def only(td: Any, keys: Sequence[Path], spec: Spec) -> Any:
    """What was read of some keys, without what came along because it is stored with them; no keys are all of them."""
    if not any(key[:depth] in spec.packed for key in keys for depth in range(len(key))):
        return td
    return td.select(*keys, *(("masks", *key) for key in keys), strict=False)


class Destination:
    """The caller's ``out=``: received into directly where its leaves are contiguous and on the CPU, else copied into.

    Args:
        out: A tensordict of the same structure.
        store: Name, for errors.
    """

    def __init__(self, out: Any, *, store: str) -> None:
        self.out = out
        self._store = store
        self._captured = capture(out, store=store, is_destination=True)
        self._fitting: Spec | None = None
        self._placed: tuple[Layout, Leaves | None] | None = None

    def check(self, spec: Spec) -> None:
        """Raises SpecMismatchError unless content of this structure fits; nothing was written."""
        if spec is self._fitting:
            return
        if spec.has_ragged:
            self._captured = capture(self.out, store=self._store, is_destination=True, like=spec)
            self._placed = None
        self._check(spec)
        self._fitting = spec

    def _check(self, spec: Spec) -> None:
        check_matches(spec, self._captured.spec, store=self._store)

    def places(self, layout: Layout) -> Leaves | None:
        """The leaves in the layout's order; None when they cannot be received into."""
        if self._captured.spec.has_ragged:
            return None  # of a lazy stack a capture has copies
        if self._placed is None or self._placed[0] is not layout:
            leaves = leaves_of(self._captured, layout)
            self._placed = layout, None if leaves.contents is None else leaves
        return self._placed[1]

    def finish(self, content: Content, *, was_direct: bool) -> None:
        """Copies what was not received in place."""
        if not was_direct or content.values:
            fill(self.out, content.spec, content.leaves, content.values)


def finish_read(
    client: SessionClient,
    session: Session,
    request: int,
    pending: Pending,
    *,
    answer: control_pb2.ServerMessage,
    spec: Spec,
    layout: Layout,
    deadline: Deadline,
    destination: Destination | None = None,
    mismatch: TDServeError | None = None,
    keeps_fault: bool = False,
    device: Any = None,
    allow_pickle: bool | None = None,
) -> Content:
    """Receives what an answer announces (or holds), and checks that it is whole.

    A destination that does not fit is found out before a byte is written to it, after the content was taken off the
    channel.

    Args:
        mismatch: Why there is no destination, raised then.
        keeps_fault: Whether values that cannot be decoded are no error here; the content says so.
        device: Where the content will be moved, as of ``receive``.
        allow_pickle: Whether pickled values are unpickled; None: as the client says.
    """
    accepted = answer.accepted if answer.HasField("accepted") else answer.done.accepted
    inline = answer.done.inline if answer.HasField("done") else None
    places = None
    if destination is not None:
        try:
            destination.check(spec)
            places = destination.places(layout)
        except TDServeError as error:
            mismatch = error
    timeout_s = transfer_timeout_s(deadline)
    block = _room(client, accepted)
    if mismatch is not None and accepted.is_relayed:  # nothing is on its way to this client
        session.relays.give_up(accepted.link)
        raise mismatch
    try:
        if accepted.link:
            received = receive_linked(
                client, session, request, accepted, layout=layout, spec=spec, timeout_s=timeout_s, into=places
            )
        else:
            received = receive(
                layout,
                session,
                tag_of(request),
                pool=client.pool,
                timeout_s=timeout_s,
                inline=inline,
                into=places,
                values=block,
                device=device if destination is None else None,
            )
    except (TransportError, DeadlineExceededError) as error:
        raise session.failure_of(pending, error) from error
    if mismatch is not None:
        raise mismatch
    version = received.version
    encoded = accepted.values if block is None else block.numpy().tobytes()
    spec, values, fault = decoded(client, spec, encoded, keeps_fault=keeps_fault, allow_pickle=allow_pickle)
    content = Content(spec, received.leaves(), values, version or accepted.version, accepted, received, fault)
    if destination is not None:
        destination.finish(content, was_direct=places is not None)
    return content


def decoded(
    client: SessionClient,
    spec: Spec,
    encoded: bytes | ReadBlock,
    *,
    keeps_fault: bool,
    allow_pickle: bool | None = None,
) -> tuple[Spec, dict[Path, Any], TDServeError | None]:
    """``decode_values``; with ``keeps_fault`` the error comes back instead of being raised, and no values with it."""
    trusts = client.allow_pickle if allow_pickle is None else allow_pickle
    try:
        return *decode_values(spec, encoded, allow_pickle=trusts), None
    except TDServeError as error:
        if not keeps_fault:
            raise
        return spec, {}, error


def _room(client: SessionClient, accepted: control_pb2.Accepted) -> torch.Tensor | None:
    """Memory for a block of values that follows behind the leaves; None when there is none."""
    return client.pool.take(accepted.values_nbytes) if accepted.values_nbytes else None


def finish_posted(
    session: Session, pending: Pending, posted: Posted, *, spec: Spec, layout: Layout, deadline: Deadline
) -> Content | None:
    """Waits for content whose receives began with the request; None when the server has nothing to grant now."""
    try:
        received = posted.finish(layout, transfer_timeout_s(deadline))
    except (TransportError, DeadlineExceededError) as error:
        raise session.failure_of(pending, error) from error
    if received.is_void:
        pending.wait(answer_timeout_s(deadline), "a read that found nothing to grant")
        return None
    return Content(spec, received.leaves(), {}, received.version, received=received)


def read_selection(
    client: SessionClient,
    name: str,
    selection: Selection,
    *,
    keys: Sequence[Path] = (),
    spec: Spec | None = None,
    newer_than: int | None = None,
    deadline: Deadline,
    destination: Destination | None = None,
    device: Any = None,
    allow_pickle: bool | None = None,
) -> Content | None:
    """Reads a selection of a tensordict store as of one moment; None when there is nothing newer.

    Args:
        spec: The store's structure if it is known; otherwise the server sends it along.
        device: Where the content will be moved, as of ``receive``.
        allow_pickle: Whether pickled values are unpickled; None: as the client says.
    """

    def attempt(session: Session, request: int, deadline: Deadline) -> Content | None:
        if session.local is not None and spec is not None and newer_than is None:
            known = session.local.known(name, spec)
            if known is not None:
                content = read_here(client, known, selection, keys, destination=destination, allow_pickle=allow_pickle)
                if content is not None:
                    return content
        asked = control_pb2.ReadRequest(
            store=name,
            selection=selection.to_message(),
            keys=[content_pb2.Path(parts=path) for path in keys],
            fingerprint=spec.fingerprint if spec is not None else b"",
            newer_than=None if newer_than is None or newer_than < 0 else newer_than,
            timeout_s=deadline.remaining_s,
        )
        pending = session.send(request, read=asked)
        answer = pending.wait(answer_timeout_s(deadline), f"a read of {name!r}")
        if answer.HasField("done") and answer.done.nothing_newer:
            return None
        accepted = answer.accepted if answer.HasField("accepted") else answer.done.accepted
        stored = codec.decode(accepted.spec) if accepted.HasField("spec") else spec
        if stored is None:
            raise RemoteProtocolError(expected=f"the structure of {name!r}", received="none")
        if session.local is not None:
            content = _read_granted(
                client, session.local, name, stored, selection, keys, accepted, destination, allow_pickle=allow_pickle
            )
            return content if stored is spec else replace(content, stored=stored)
        chosen = selected_spec(stored, selection, keys, store=name)
        content = finish_read(
            client,
            session,
            request,
            pending,
            answer=answer,
            spec=chosen,
            layout=read_layout(chosen),
            deadline=deadline,
            destination=destination,
            device=device,
            allow_pickle=allow_pickle,
        )
        content = content.of(stored)
        return content if stored is spec else replace(content, stored=stored)

    return client.call(attempt, deadline)


def brought(content: Content | None) -> Content:
    """The content of a read that asked for nothing newer than it knew, which always brings some."""
    if content is None:
        raise LocalProtocolError(reason="a read without newer_than brought nothing")
    return content


def _read_granted(
    client: SessionClient,
    local: LocalEnd,
    name: str,
    stored: Spec,
    selection: Selection,
    keys: Sequence[Path],
    accepted: control_pb2.Accepted,
    destination: Destination | None,
    *,
    allow_pickle: bool | None,
) -> Content:
    """Reads a store that the server has let a local client read."""
    store = local.store(name, accepted.uid, stored, structure=accepted.structure)
    if not local.lacks_values or not stored.values:
        local.grant(store)
    for _ in range(MAX_LOCAL_TRIES):
        content = read_here(
            client,
            store,
            selection,
            keys,
            values=accepted.values,
            destination=destination,
            allow_pickle=allow_pickle,
        )
        if content is not None:
            return content
        time.sleep(0)  # lets the writer go on
    raise TransferAbortedError(
        transfer=0, reason=f"rows of {name!r} were written, again and again, while they were read"
    )


def read_here(
    client: SessionClient,
    store: OpenStore,
    selection: Selection,
    keys: Sequence[Path],
    *,
    values: bytes = b"",
    destination: Destination | None = None,
    allow_pickle: bool | None = None,
) -> Content | None:
    """Copies a selection out of a mapped store; None when it is being written, or the store was deleted."""
    places = None
    if destination is not None:
        chosen = selected_spec(store.spec, selection, keys, store=store.name)
        destination.check(chosen)
        places = destination.places(read_layout(chosen))
    found = copy_selection(store, selection.to_message(), keys, values=values, pool=client.pool, into=places)
    if found is None:
        return None
    trusts = client.allow_pickle if allow_pickle is None else allow_pickle
    spec, decoded = decode_values(found.spec, found.values, allow_pickle=trusts)
    content = Content(spec, found.leaves, decoded, found.version).of(store.spec)
    if destination is not None:
        destination.finish(content, was_direct=places is not None)
    return content
