"""Publishing and pulling versions of weights."""

from __future__ import annotations

from typing import Any, NamedTuple

from tensordict import TensorDict
from torch import nn

from tdserve.client.calls import SessionClient, answer_timeout_s
from tdserve.client.local_versions import version_here
from tdserve.client.outgoing import Outgoing, Target
from tdserve.client.reading import Content, Destination, finish_read
from tdserve.client.session import Session
from tdserve.client.table import check_count
from tdserve.client.writing import write
from tdserve.content import read_layout
from tdserve.deadline import Deadline
from tdserve.errors import RemoteProtocolError, TDServeError
from tdserve.ids import check_store_name
from tdserve.spec import codec
from tdserve.spec.capture import capture
from tdserve.spec.tree import Spec
from tdserve.v1 import control_pb2
from tdserve.values import decode_bytes, encode_bytes


class Weights(NamedTuple):
    """One version of weights.

    Attributes:
        version: Grows by one with every publish.
        data: The tensordict, or the ``out=`` that was filled.
        metadata: What the publisher said of it.
    """

    version: int
    data: Any
    metadata: dict[str, Any]


def publish(
    client: SessionClient, name: str, td: Any, *, metadata: dict[str, Any] | None, keep: int, deadline: Deadline
) -> int:
    """Stores the next version; see ``Client.publish``."""
    check_store_name(name)
    content = TensorDict.from_module(td) if isinstance(td, nn.Module) else td
    captured = capture(content, store=name, allow_pickle=client.allow_pickle)
    spec = captured.spec
    said = encode_bytes(dict(metadata or {}), key="metadata")
    if keep != 0:
        check_count("keep", keep)

    def make_outgoing(session: Session) -> Outgoing:
        return Outgoing(
            [captured], Target(name, spec.fingerprint, is_packed=True, allow_pickle=client.allow_pickle), session
        )

    def make_body(session: Session, outgoing: Outgoing, deadline: Deadline) -> dict[str, Any]:
        request = control_pb2.PublishRequest(
            store=name, content=outgoing.message, keep=keep, timeout_s=deadline.remaining_s, metadata=said
        )
        if spec.fingerprint not in session.known_specs:
            session.known_specs.add(spec.fingerprint)
            request.spec.CopyFrom(codec.encode(spec))
        return {"publish": request}

    return write(client, make_outgoing, make_body, deadline=deadline, what=f"a publish of {name!r}").version


def latest(
    client: SessionClient,
    name: str,
    *,
    newer_than: int | None,
    out: Any,
    device: Any,
    copy: bool,
    known: dict[str, Spec],
    deadline: Deadline,
) -> Weights | None:
    """The newest version; see ``Client.latest``."""
    check_store_name(name)

    def attempt(session: Session, request: int, deadline: Deadline) -> Weights | None:
        spec = known.get(name)
        asked = control_pb2.LatestRequest(
            store=name,
            newer_than=None if newer_than is None else max(newer_than, 0),  # there is no version 0
            timeout_s=deadline.remaining_s,
            fingerprint=spec.fingerprint if spec is not None else b"",
        )
        pending = session.send(request, latest=asked)
        destination, mismatch = _destination(out, name)  # looked at while the server works
        answer = pending.wait(answer_timeout_s(deadline), f"a version of {name!r}")
        if answer.HasField("done") and answer.done.nothing_newer:
            if mismatch is not None:
                raise mismatch
            return None
        accepted = answer.accepted if answer.HasField("accepted") else answer.done.accepted
        if session.local is not None and mismatch is not None:
            raise mismatch
        if accepted.HasField("spec"):
            spec = known[name] = codec.decode(accepted.spec)
        if spec is None:
            raise RemoteProtocolError(expected=f"the structure of {name!r}", received="none")
        if session.local is not None:
            content = version_here(client, session.local, spec, accepted, destination, copy=copy)
            return _weights(content, accepted, out, device)
        content = finish_read(
            client,
            session,
            request,
            pending,
            answer=answer,
            spec=spec,
            layout=read_layout(spec, is_packed=True),
            deadline=deadline,
            destination=destination,
            mismatch=mismatch,
        )
        return _weights(content, accepted, out, device)

    return client.call(attempt, deadline)


def _weights(content: Content, accepted: control_pb2.Accepted, out: Any, device: Any) -> Weights:
    data = content.build(device) if out is None else out
    return Weights(accepted.version, data, decode_bytes(accepted.metadata) if accepted.metadata else {})


def _destination(out: Any, name: str) -> tuple[Destination | None, TDServeError | None]:
    """Where a version goes, or why it cannot go there: its content, which may be on its way, is taken first."""
    if out is None:
        return None, None
    try:
        return Destination(out, store=name), None
    except TDServeError as error:
        return None, error
