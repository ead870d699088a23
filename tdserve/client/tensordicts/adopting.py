"""Asks the server to adopt a folder of the user in place."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from tdserve.base.deadline import Deadline
from tdserve.base.errors import NotLocalError
from tdserve.base.ids import check_store_name
from tdserve.client.session.calls import SessionClient
from tdserve.client.session.session import Session
from tdserve.client.session.timeouts import compute_answer_timeout_s
from tdserve.v1 import control_pb2


def adopt_folder(
    client: SessionClient,
    path: str | os.PathLike[str],
    name: str,
    *,
    read_only: bool,
    exists_ok: bool,
    deadline: Deadline,
) -> None:
    """Makes a store of a folder; see ``Client.adopt``.

    Any folder is adopted only for a client whose session has proved that it shares the root. A client with another
    transport proves it by a second session.
    """
    asked = control_pb2.AdoptRequest(
        name=check_store_name(name), path=os.path.abspath(os.fspath(path)), read_only=read_only, exists_ok=exists_ok
    )

    def attempt(session: Session, request: int, deadline: Deadline) -> Any:
        pending = session.send(request, adopt=asked)
        return pending.wait(compute_answer_timeout_s(deadline), f"the adoption of {asked.path!r}")

    if client.session(deadline).transport != "shm" and client.transport != "auto":
        beside = replace(client.recipe, transport="shm", device=None).make()
        try:
            beside.call(attempt, deadline, request=beside.requests.begin_change())
            return
        except NotLocalError:  # the server decides by the path alone
            pass
        finally:
            beside.close()
    client.call(attempt, deadline, request=client.requests.begin_change())
