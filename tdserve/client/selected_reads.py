"""Reads of what an index expression selects of a tensordict store: sent by the server, or copied from mapped files."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tdserve.client.calls import SessionClient, answer_timeout_s
from tdserve.client.local.end import LocalEnd
from tdserve.client.local.reads import copy_selection
from tdserve.client.reading import Content, Destination, finish_read
from tdserve.client.session import Session
from tdserve.client.value_blocks import decode_values
from tdserve.content import read_layout, selected_spec
from tdserve.data.opened import OpenStore
from tdserve.deadline import Deadline
from tdserve.errors import LocalProtocolError, RemoteProtocolError, TransferAbortedError
from tdserve.selection import Selection
from tdserve.spec import codec
from tdserve.spec.tree import Path, Spec
from tdserve.v1 import content_pb2, control_pb2

MAX_LOCAL_TRIES = 100
"""Copies of a selection that writers keep changing; each lasts about as long as one of their writes."""


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
