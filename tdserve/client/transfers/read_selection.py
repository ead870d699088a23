"""Reads the part of a tensordict store that an index selects, over a channel or from mapped files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from tdserve.base.deadline import Deadline
from tdserve.base.errors import LocalProtocolError, RemoteProtocolError
from tdserve.client.content.fake_modes import check_real
from tdserve.client.content.read_content import Content, Destination
from tdserve.client.session.calls.timeouts import compute_answer_timeout_s
from tdserve.client.session.requests.client_mover import WantedSelection
from tdserve.client.session.requests.known_stores import KnownStore
from tdserve.client.session.requests.pending import Reply
from tdserve.client.session.session import Session
from tdserve.client.session.session_client import SessionClient
from tdserve.messages.selection.selection import EVERYTHING, Selection
from tdserve.structure.trees import codec
from tdserve.structure.trees.tree import Path, Spec


def read_selection(
    client: SessionClient,
    name: str,
    selection: Selection = EVERYTHING,
    *,
    keys: Sequence[Path] = (),
    spec: Spec | None = None,
    newer_than: int | None = None,
    deadline: Deadline,
    destination: Destination | None = None,
    device: Any = None,
    allow_pickle: bool | None = None,
) -> Content | None:
    """Reads a selection of a tensordict store as of one moment; None if there is nothing newer.

    Args:
        spec: The store's structure if it is known; otherwise the server sends it.
        device: Where the content will be moved, as in ``receive_content``.
        allow_pickle: Whether pickled values are unpickled; None: as set for the client.
    """
    check_real("reading a store")
    known = client.known_stores.find(name) if spec is None else None
    wanted = WantedSelection(name, selection, tuple(keys), spec, newer_than, destination, device, allow_pickle, known)
    return client.call(partial(_attempt, client, wanted), deadline, store=name)


def _attempt(
    client: SessionClient, wanted: WantedSelection, session: Session, request: int, deadline: Deadline
) -> Content | None:
    spec = wanted.spec if wanted.known is None else wanted.known.spec
    if spec is not None and wanted.newer_than is None:
        content = session.movers.reads.read_known(wanted, spec, request, deadline)
        if content is not None:
            return content if wanted.known is None else replace(content, stored=spec)
    pending = session.send(request, read=wanted.make_message(deadline))
    warn = partial(client.catalog.missing_names.warn, wanted.name) if wanted.spec is None else None
    answer = pending.wait(compute_answer_timeout_s(deadline), f"a read of {wanted.name!r}", on_slow=warn)
    if answer.HasField("done") and answer.done.nothing_newer:
        return None
    reply = Reply(request, pending, answer, deadline)
    accepted = reply.accepted
    stored = codec.decode(accepted.spec) if accepted.HasField("spec") else spec
    if accepted.identity and stored is not None:
        client.known_stores.learn(wanted.name, KnownStore(accepted.identity, stored))
    if stored is None:
        raise RemoteProtocolError(expected=f"the structure of {wanted.name!r}", received="none")
    content = session.movers.reads.take_selection(reply, wanted, stored)
    return content if stored is wanted.spec else replace(content, stored=stored)


def require_content(content: Content | None) -> Content:
    """Returns the content of a read without ``newer_than``, which always has some."""
    if content is None:
        raise LocalProtocolError(reason="a read without newer_than returned no content")
    return content
