"""Reads: ask, be told what comes, receive it, put it together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tdserve.client.calls import SessionClient, answer_timeout_s, transfer_timeout_s
from tdserve.client.incoming import Posted, Received, receive
from tdserve.client.leaves import Leaves, leaves_of
from tdserve.client.session import ANSWER_GRACE_S, Pending, Session
from tdserve.client.value_blocks import decode_values
from tdserve.content import read_layout, selected_spec
from tdserve.deadline import Deadline
from tdserve.errors import DeadlineExceededError, RemoteProtocolError, TDServeError, TransportError
from tdserve.layout import Layout
from tdserve.selection import Selection
from tdserve.session import tag_of
from tdserve.spec import codec
from tdserve.spec.build import build, fill
from tdserve.spec.capture import capture
from tdserve.spec.tree import Path, Spec, check_matches
from tdserve.v1 import content_pb2, control_pb2

_NOTHING_SAID = control_pb2.Accepted()


@dataclass(frozen=True)
class Content:
    """What a read brought.

    Attributes:
        spec: Its structure.
        received: Its columns.
        values: Its non-tensor values by path.
        version: Content version of the store.
        accepted: What the server said of it.
    """

    spec: Spec
    received: Received
    values: dict[Path, Any]
    version: int
    accepted: control_pb2.Accepted

    def build(self, device: torch.device | str | int | None = None) -> Any:
        """The tensordict (or tensorclass instance); its leaves are views of one buffer, moved if a device is named."""
        td = build(on_cpu(self.spec), self.received.leaves(), self.values)
        return td if device is None else td.to(device)


def on_cpu(spec: Spec) -> Spec:
    """The structure of content that lies on the CPU, wherever its tensors were when they were stored."""
    device = spec.root.device
    return spec if device is None or device == "cpu" else spec.with_device("cpu")


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

    def check(self, spec: Spec) -> None:
        """Raises SpecMismatchError unless content of this structure fits; nothing was written."""
        check_matches(spec, self._captured.spec, store=self._store)

    def places(self, layout: Layout) -> Leaves | None:
        """The leaves in the layout's order; None when they cannot be received into."""
        leaves = leaves_of(self._captured, layout)
        return None if leaves.contents is None else leaves

    def finish(self, content: Content, *, was_direct: bool) -> None:
        """Copies what was not received in place."""
        if not was_direct or content.values:
            fill(self.out, content.spec, content.received.leaves(), content.values)


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
) -> Content:
    """Receives what an answer announces (or holds), and checks that it is whole.

    A destination that does not fit is found out before a byte is written to it, after the content was taken off the
    channel.

    Args:
        mismatch: Why there is no destination, raised then.
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
    try:
        received = receive(
            layout,
            session,
            tag_of(request),
            pool=client.pool,
            timeout_s=timeout_s,
            inline=inline,
            into=places,
        )
    except (TransportError, DeadlineExceededError) as error:
        raise session.failure_of(pending, error) from error
    if mismatch is not None:
        raise mismatch
    version = received.version
    spec, values = decode_values(spec, accepted.values)
    content = Content(spec, received, values, version or accepted.version, accepted)
    if destination is not None:
        destination.finish(content, was_direct=places is not None)
    return content


def finish_posted(
    session: Session, pending: Pending, posted: Posted, *, spec: Spec, layout: Layout, deadline: Deadline
) -> Content | None:
    """Waits for content whose receives began with the request; None when the server has nothing to grant now."""
    try:
        received = posted.finish(layout, transfer_timeout_s(deadline))
    except (TransportError, DeadlineExceededError) as error:
        raise session.failure_of(pending, error) from error
    if received.is_void:
        pending.wait(ANSWER_GRACE_S, "a refused read")
        return None
    return Content(spec, received, {}, received.version, _NOTHING_SAID)


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
) -> Content | None:
    """Reads a selection of a tensordict store as of one moment; None when there is nothing newer.

    Args:
        spec: The store's structure if it is known; otherwise the server sends it along.
    """

    def attempt(session: Session, request: int, deadline: Deadline) -> Content | None:
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
        chosen = selected_spec(stored, selection, keys, store=name)
        return finish_read(
            client,
            session,
            request,
            pending,
            answer=answer,
            spec=chosen,
            layout=read_layout(chosen),
            deadline=deadline,
            destination=destination,
        )

    return client.call(attempt, deadline)
