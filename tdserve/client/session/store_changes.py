"""Requests the creation and the deletion of stores, and the end of their filling; each is carried out once, even if it
is sent several times."""

from __future__ import annotations

import logging
from typing import Any

from tdserve.base.deadline import Deadline
from tdserve.base.ids import check_store_name
from tdserve.client.session.calls.timeouts import compute_answer_timeout_s
from tdserve.client.session.catalog.description import StoreDescription, from_message
from tdserve.client.session.session import Session
from tdserve.client.session.session_client import SessionClient
from tdserve.structure.trees import codec
from tdserve.structure.trees.tree import Spec
from tdserve.v1 import control_pb2

_log = logging.getLogger("tdserve.client")


def create_store(
    client: SessionClient, request: control_pb2.CreateStoreRequest, spec: Spec, deadline: Deadline | None = None
) -> tuple[StoreDescription, bool]:
    """Creates a store of this structure; returns its description, and whether it did not exist before.

    Args:
        deadline: By default that of every call.
    """
    made = _change(client, f"the creation of {request.name!r}", deadline, create_store=request).created_store
    if made.changed_settings:
        _log.info(
            "table %r, from a checkpoint, has taken the settings of this call: %s", request.name, made.changed_settings
        )
    if not made.description.HasField("spec"):  # it is the requested one
        made.description.spec.CopyFrom(codec.encode(spec))
    return from_message(made.description), bool(made.created)


def end_filling(client: SessionClient, name: str, identity: str, *, filling: str = "", gives_up: bool = False) -> None:
    """Makes a hidden store visible, or deletes it; only the session that has created it can.

    Args:
        filling: With ``gives_up``, in place of the identity: what the request of its creation has named it.

    Raises:
        StoreNotFoundError: That session has ended, and the store with it.
    """
    asked = control_pb2.EndFillingRequest(store=name, identity=identity, filling=filling, gives_up=gives_up)
    _change(client, f"the end of the filling of {name!r}", None, end_filling=asked)


def delete_store(
    client: SessionClient,
    name: str,
    *,
    uid: str = "",
    deletes_record: bool = False,
    deadline: Deadline | None = None,
) -> None:
    """Deletes a store; see ``Client.delete``.

    Args:
        uid: Its incarnation, beside which none is deleted; "" for any.
        deletes_record: Whether it may be the record of a store that servers share, whose parts are deleted, too.
        deadline: None: the client's default.
    """
    asked = control_pb2.DeleteStoreRequest(name=check_store_name(name), deletes_record=deletes_record, uid=uid)
    _change(client, f"the deletion of {name!r}", deadline, delete_store=asked)


def _change(client: SessionClient, what: str, deadline: Deadline | None, **body: Any) -> control_pb2.Done:
    def attempt(session: Session, request: int, deadline: Deadline) -> control_pb2.Done:
        return session.send(request, **body).wait(compute_answer_timeout_s(deadline), what).done

    return client.call(attempt, deadline or client.make_deadline(None), request=client.requests.begin_change())
