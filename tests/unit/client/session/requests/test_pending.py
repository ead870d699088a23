from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Event, Thread
from typing import NoReturn

import pytest

from tdserve.base.errors import DeadlineExceededError, PeerLostError, StoreNotFoundError, TransferAbortedError
from tdserve.client.session.requests import pending as pending_module
from tdserve.client.session.requests.pending import Announced, Answer, Pending, WaitOutcome, check_answer
from tdserve.control.status import encode_failure
from tdserve.transport.loopback import LoopbackChannel
from tdserve.v1 import control_pb2

WAIT_S = 20.0
FAILURE = control_pb2.ServerMessage(failure=encode_failure(StoreNotFoundError(name="x")))


def test_wait_when_answered_then_in_order() -> None:
    pending = Pending(on_silence=lambda: None)
    for request in (1, 2):
        pending.put(control_pb2.ServerMessage(request=request))
    assert [pending.wait(1.0, "").request for _ in range(2)] == [1, 2]
    assert not pending.has_failed


def test_put_when_an_answer_announces_content_then_its_receives_begin_before_anybody_waits() -> None:
    channel, _ = LoopbackChannel.make_pair()
    receives = Announced([], None, [], channel)
    announced: list[int] = []

    def begin(pending: Pending, accepted: control_pb2.Accepted) -> Announced:
        announced.append(accepted.num_rows)
        return receives

    pending, refused = (Pending(on_silence=lambda: None, on_announced=begin) for _ in range(2))
    pending.put(control_pb2.ServerMessage(accepted=control_pb2.Accepted(num_rows=4)))
    assert (announced, pending.announced) == ([4], receives)
    assert pending.wait(1.0, "").accepted.num_rows == 4
    refused.put(FAILURE)
    assert (announced, refused.announced) == ([4], None)


def test_wait_when_the_answer_comes_later_in_another_thread_then_returned_whatever_the_poll() -> None:
    pending = Pending(on_silence=lambda: None)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(pending.wait, None, "an answer")  # no main thread: it polls once an hour
        pending.put(control_pb2.ServerMessage(request=3))
        assert waiting.result(WAIT_S).request == 3


def test_wait_when_nothing_comes_then_deadline_and_silence_is_reported() -> None:
    reported: list[str] = []
    pending = Pending(on_silence=lambda: reported.append("silence"))
    with pytest.raises(DeadlineExceededError, match="an answer to a miracle"):
        pending.wait(0.01, "a miracle")
    assert reported == ["silence"]


def test_wait_when_nothing_comes_and_nothing_is_owed_then_no_silence_is_reported() -> None:
    pending = Pending(on_silence=lambda: pytest.fail("nothing was owed"))
    with pytest.raises(DeadlineExceededError):
        pending.wait(0.01, "a courtesy", is_owed=False)


def test_put_when_the_answer_and_the_loss_of_the_session_come_at_once_then_only_one_of_them_is_reported() -> None:
    reported: list[Answer] = []
    answer, loss = control_pb2.ServerMessage(request=5), PeerLostError(peer="it", reason="gone")

    def on_answer(brought: Answer) -> None:
        reported.append(brought)
        pending.put(loss)  # by another thread, while this one is about the answer

    pending = Pending(on_answer, on_silence=lambda: None)
    pending.put(answer)
    assert reported == [answer]


def test_disown_when_called_then_no_callback_runs_and_nothing_is_written() -> None:
    def fail(_: object) -> NoReturn:
        pytest.fail("it was told")

    pending = Pending(fail, on_silence=lambda: None, on_permit=fail)
    pending.disown()
    pending.put(FAILURE)
    with pytest.raises(TransferAbortedError):
        pending.write_in_place(control_pb2.Accepted())


@pytest.mark.parametrize("is_in_time", [True, False])
def test_put_when_the_wait_has_just_ended_then_either_the_waiting_or_the_putting_thread_handles_it(
    is_in_time: bool,
) -> None:
    found: list[Answer | None] = []

    def on_silence() -> None:
        if is_in_time:
            pending.put(FAILURE)
        found.append(pending.take_late())

    pending = Pending(on_silence=on_silence)
    with pytest.raises(DeadlineExceededError):
        pending.wait(0.0, "an answer")
    assert found == [FAILURE if is_in_time else None]
    assert pending.outcome is WaitOutcome.GIVEN_UP


def test_wait_when_it_is_slow_then_that_is_reported_once_and_the_answer_still_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pending_module, "SLOW_S", 0.01)
    pending = Pending(on_silence=lambda: None)
    reported: list[str] = []

    def on_slow(left_s: float) -> None:
        reported.append("slow")
        pending.put(control_pb2.ServerMessage(request=4))

    assert pending.wait(None, "", on_slow=on_slow).request == 4
    with pytest.raises(DeadlineExceededError):
        pending.wait(0.02, "", on_slow=lambda left_s: reported.append(f"again, {left_s <= 0.01}"))
    assert reported == ["slow", "again, True"]


@pytest.mark.parametrize(
    ("answer", "error"), [(FAILURE, StoreNotFoundError), (PeerLostError(peer="a", reason="b"), PeerLostError)]
)
def test_wait_when_it_failed_then_raised(
    answer: control_pb2.ServerMessage | PeerLostError, error: type[Exception]
) -> None:
    pending = Pending(on_silence=lambda: None)
    pending.put(answer)
    with pytest.raises(error):
        pending.wait(1.0, "")
    assert pending.has_failed
    with pytest.raises(error):
        check_answer(answer)


def test_put_when_a_callback_takes_the_answers_then_at_once() -> None:
    taken: list[object] = []
    pending = Pending(taken.append, on_silence=lambda: None)
    pending.put(FAILURE)
    assert taken == [FAILURE]


def test_permit_when_it_is_a_write_then_the_content_is_put_in_place() -> None:
    written = control_pb2.Written(columns=[b"c"])
    seen: list[control_pb2.Accepted] = []

    def write(accepted: control_pb2.Accepted) -> control_pb2.Written:
        seen.append(accepted)
        return written

    pending = Pending(on_silence=lambda: None, on_permit=write)
    accepted = control_pb2.Accepted(uid="u")
    assert pending.takes_permit
    assert pending.write_in_place(accepted) is written
    assert seen == [accepted]
    assert not Pending(on_silence=lambda: None).takes_permit


def test_permit_when_the_caller_gave_up_before_then_nothing_is_written() -> None:
    seen: list[control_pb2.Accepted] = []

    def write(accepted: control_pb2.Accepted) -> control_pb2.Written:
        seen.append(accepted)
        return control_pb2.Written()

    pending = Pending(on_silence=lambda: None, on_permit=write)
    pending.withdraw()
    pending.withdraw()
    assert pending.takes_permit  # a permit that comes now is still answered
    with pytest.raises(TransferAbortedError, match="stopped waiting"):
        pending.write_in_place(control_pb2.Accepted())
    assert seen == []


def test_withdraw_when_the_content_is_being_written_then_returns_only_behind_that() -> None:
    begun, may_end, withdrawn = Event(), Event(), Event()

    def write(accepted: control_pb2.Accepted) -> control_pb2.Written:
        begun.set()
        assert may_end.wait(WAIT_S)
        assert not withdrawn.is_set()
        return control_pb2.Written()

    pending = Pending(on_silence=lambda: None, on_permit=write)

    def withdraw() -> None:
        pending.withdraw()
        withdrawn.set()

    with ThreadPoolExecutor(1) as thread:
        writing = thread.submit(pending.write_in_place, control_pb2.Accepted())
        assert begun.wait(WAIT_S)
        withdrawing = Thread(target=withdraw)
        withdrawing.start()
        withdrawing.join(0.05)
        assert not withdrawn.is_set()
        may_end.set()
        writing.result(WAIT_S)
        withdrawing.join(WAIT_S)
    assert withdrawn.is_set()
