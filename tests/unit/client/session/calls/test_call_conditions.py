from __future__ import annotations

import pytest

from tdserve.base.deadline import Deadline
from tdserve.base.errors import ConnectError, DeadlineExceededError, PeerLostError, TransportError
from tdserve.client.session.calls.call_conditions import explain_late


def test_late_when_the_server_has_answered_that_a_process_is_missing_then_it_was_waited_for() -> None:
    error = PeerLostError(peer="data worker 0", reason="it is starting")
    error.note_request("5-7")
    late = explain_late(error, "somewhere:7707", Deadline.after(0.5))
    assert isinstance(late, DeadlineExceededError)
    assert (late.request_id, late.__cause__) == ("5-7", error)
    assert str(late) == (
        "an answer of somewhere:7707, where data worker 0 is missing (it is starting), did not happen within 0.5 s"
    )


@pytest.mark.parametrize("error", [PeerLostError(peer="it", reason="it has ended"), ConnectError()])
def test_late_when_the_server_has_not_answered_then_the_error_itself(error: TransportError) -> None:
    assert explain_late(error, "somewhere:7707", Deadline.after(0.5)) is error
