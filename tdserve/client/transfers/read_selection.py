"""Reads of what an index expression selects of a tensordict store: sent by the server, or copied from mapped files."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tdserve.base.deadline import Deadline
from tdserve.base.errors import LocalProtocolError, RemoteProtocolError, TransferAbortedError
from tdserve.client.content.read_content import Content, Destination
from tdserve.client.content.value_blocks import decode_values
from tdserve.client.local.end import LocalEnd
from tdserve.client.local.reads import copy_selection
from tdserve.client.session.calls import SessionClient
from tdserve.client.session.pending import accepted_in
from tdserve.client.session.session import Session
from tdserve.client.session.timeouts import answer_timeout_s, may_expect
from tdserve.client.transfers.download import post
from tdserve.client.transfers.read import finish_posted, finish_read
from tdserve.data.opened import MappedStore
from tdserve.messages.content import read_layout, selected_spec
from tdserve.messages.selection.selection import Selection
from tdserve.rules.tags import tag_of
from tdserve.structure import codec
from tdserve.structure.tree import Path, Spec
from tdserve.v1 import content_pb2, control_pb2

MAX_EXPECTED_BYTES = 16 * 1024 * 1024
"""Of content that is waited for before it is announced: of more the announcement takes a hundredth of the time, and as
many bytes would come void where the store has changed."""

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
    wanted = _Wanted(name, selection, tuple(keys), spec, newer_than, destination, device, allow_pickle)
    return client.call(partial(_attempt, client, wanted), deadline)


@dataclass(frozen=True)
class _Wanted:
    """Arguments of ``read_selection``."""

    name: str
    selection: Selection
    keys: tuple[Path, ...]
    spec: Spec | None
    newer_than: int | None
    destination: Destination | None
    device: Any
    allow_pickle: bool | None

    def request(self, deadline: Deadline) -> control_pb2.ReadRequest:
        return control_pb2.ReadRequest(
            store=self.name,
            selection=self.selection.to_message(),
            keys=[content_pb2.Path(parts=path) for path in self.keys],
            fingerprint=self.spec.fingerprint if self.spec is not None else b"",
            newer_than=None if self.newer_than is None or self.newer_than < 0 else self.newer_than,
            timeout_s=deadline.remaining_s,
        )


def _attempt(
    client: SessionClient, wanted: _Wanted, session: Session, request: int, deadline: Deadline
) -> Content | None:
    spec = wanted.spec
    if spec is not None and wanted.newer_than is None:
        content = _read_known(client, wanted, spec, session, request, deadline)
        if content is not None:
            return content
    pending = session.send(request, read=wanted.request(deadline))
    warn = partial(client.missing_names.warn, wanted.name) if spec is None else None
    answer = pending.wait(answer_timeout_s(deadline), f"a read of {wanted.name!r}", on_slow=warn)
    if answer.HasField("done") and answer.done.nothing_newer:
        return None
    accepted = accepted_in(answer)
    stored = codec.decode(accepted.spec) if accepted.HasField("spec") else spec
    if stored is None:
        raise RemoteProtocolError(expected=f"the structure of {wanted.name!r}", received="none")
    if session.local is not None:
        content = _read_granted(client, session.local, wanted, stored, accepted)
    else:
        chosen = selected_spec(stored, wanted.selection, wanted.keys, store=wanted.name)
        content = finish_read(
            client,
            session,
            request,
            pending,
            answer=answer,
            spec=chosen,
            layout=read_layout(chosen),
            deadline=deadline,
            destination=wanted.destination,
            device=wanted.device,
            allow_pickle=wanted.allow_pickle,
        ).of(stored)
    return content if stored is spec else replace(content, stored=stored)


def _read_known(
    client: SessionClient, wanted: _Wanted, stored: Spec, session: Session, request: int, deadline: Deadline
) -> Content | None:
    """Reads a store whose structure is known: mapped files without a question; else asks, and waits for the content
    itself, two messages less than with an answer before it. None where that cannot be: it is to be asked for as ever.
    """
    if session.local is not None:
        store = session.local.known(wanted.name, stored)
        return None if store is None else _read_here(client, store, wanted)
    if wanted.destination is not None or not may_expect(deadline) or session.is_renewing:
        return None
    chosen = selected_spec(stored, wanted.selection, wanted.keys, store=wanted.name)
    if chosen.values:
        return None
    layout = read_layout(chosen)
    if not session.inline_bytes < sum(layout.message_nbytes) <= MAX_EXPECTED_BYTES:
        return None
    asked = wanted.request(deadline)
    asked.message_nbytes.extend(layout.message_nbytes)
    pending = session.send(request, content=session.content, read=asked)
    posted = post(layout, session, pending, tag_of(request), client.pool, device=wanted.device)
    content = finish_posted(session, pending, posted, spec=chosen, layout=layout, deadline=deadline)
    return None if content is None else content.of(stored)


def brought(content: Content | None) -> Content:
    """The content of a read that asked for nothing newer than it knew, which always brings some."""
    if content is None:
        raise LocalProtocolError(reason="a read without newer_than brought nothing")
    return content


def _read_granted(
    client: SessionClient, local: LocalEnd, wanted: _Wanted, stored: Spec, accepted: control_pb2.Accepted
) -> Content:
    """Reads a store that the server has let a local client read."""
    name = wanted.name
    store = local.store(name, accepted.uid, stored, structure=accepted.structure)
    if not local.lacks_values or not stored.values:
        local.grant(store)
    for _ in range(MAX_LOCAL_TRIES):
        content = _read_here(client, store, wanted, values=accepted.values)
        if content is not None:
            return content
        time.sleep(0)  # lets the writer go on
    raise TransferAbortedError(
        transfer=0, reason=f"rows of {name!r} were written, again and again, while they were read"
    )


def _read_here(client: SessionClient, store: MappedStore, wanted: _Wanted, *, values: bytes = b"") -> Content | None:
    """Copies a selection out of a mapped store; None when it is being written, or the store was deleted."""
    selection, keys, destination, places = wanted.selection, wanted.keys, wanted.destination, None
    if destination is not None:
        chosen = selected_spec(store.spec, selection, keys, store=store.name)
        destination.check(chosen)
        places = destination.places(read_layout(chosen))
    found = copy_selection(store, selection, keys, values=values, pool=client.pool, into=places)
    if found is None:
        return None
    trusts = client.allow_pickle if wanted.allow_pickle is None else wanted.allow_pickle
    spec, decoded = decode_values(found.spec, found.values, allow_pickle=trusts)
    content = Content(spec, found.leaves, decoded, found.version).of(store.spec)
    if destination is not None:
        destination.finish(content, was_direct=places is not None)
    return content
