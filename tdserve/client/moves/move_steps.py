"""The steps of moves and of checkpoints, as requests to one server.

``server/README.md`` has a reading order of moves.
"""

from __future__ import annotations

from typing import Any

from tdserve.base.deadline import Deadline
from tdserve.client.session.calls.timeouts import compute_answer_timeout_s
from tdserve.client.session.session import Session
from tdserve.client.session.session_client import SessionClient
from tdserve.v1 import control_pb2

MAX_ATTEMPTS = 4
"""How often what comes to a server is tried: a restart forgets what has come, and another client may move the store
meanwhile."""

UNDO_S = 1.2
"""How long a checkpoint, restore or move that has failed, perhaps because its time is over, waits for each answer of
the server while it takes back what it has begun."""


def request_step(
    client: SessionClient, name: str, *, deadline: Deadline | None = None, **step: Any
) -> control_pb2.MoveAnswer:
    """Asks a server for one step of the move of a store (``MoveRequest``); it is safe to repeat.

    Args:
        deadline: None: the client's default.
        **step: The step, and which move or incarnation it is of.
    """

    def attempt(session: Session, request: int, deadline: Deadline) -> control_pb2.MoveAnswer:
        asked = control_pb2.MoveRequest(store=name, timeout_s=deadline.remaining_s or 0.0, **step)
        pending = session.send(request, move=asked)
        return pending.wait(compute_answer_timeout_s(deadline), f"a step of the move of {name!r}").done.moved

    return client.call(attempt, deadline or client.make_deadline(None))


def request_checkpoint_step(
    client: SessionClient, *, deadline: Deadline, timeout_s: float | None = None, **step: Any
) -> control_pb2.CheckpointAnswer:
    """Asks a server for one step of a checkpoint (``CheckpointRequest``); it is safe to repeat.

    Args:
        timeout_s: What the step itself may wait; None: until the deadline.
        **step: The step, and which checkpoint it is of.
    """

    def attempt(session: Session, request: int, deadline: Deadline) -> control_pb2.CheckpointAnswer:
        asked = control_pb2.CheckpointRequest(timeout_s=timeout_s or deadline.remaining_s or 0.0, **step)
        pending = session.send(request, checkpoint=asked)
        return pending.wait(compute_answer_timeout_s(deadline), "a step of a checkpoint").done.checkpoint

    return client.call(attempt, deadline)
