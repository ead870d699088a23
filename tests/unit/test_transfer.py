from __future__ import annotations

import itertools

import pytest

from tdserve.errors import InvalidRequestError, RemoteProtocolError, WrongStateError
from tdserve.transfer import TRANSITIONS, RequestLog, TransferEvent, TransferProtocol, TransferState

_LEGAL = {
    ("planned", "offer", "offered"),
    ("offered", "move", "moving"),
    ("moving", "complete", "complete"),
    ("planned", "abort", "aborted"),
    ("offered", "abort", "aborted"),
    ("moving", "abort", "aborted"),
}
_WAY = [TransferEvent.OFFER, TransferEvent.MOVE, TransferEvent.COMPLETE]
_NUM_STEPS = {"planned": 0, "offered": 1, "moving": 2, "complete": 3, "aborted": 1}

_ANN, _BOB = b"ann", b"bob"


def _in(state: TransferState) -> TransferProtocol:
    transfer = TransferProtocol(9)
    for event in _WAY[: _NUM_STEPS[state.value]]:
        transfer.on(event)
    if state is TransferState.ABORTED:
        transfer.on(TransferEvent.ABORT)
    assert transfer.state is state
    return transfer


@pytest.mark.parametrize(("state", "event"), list(itertools.product(TransferState, TransferEvent)))
def test_event_when_in_any_state_then_as_the_book_says(state: TransferState, event: TransferEvent) -> None:
    transfer = _in(state)
    following = {then for before, what, then in _LEGAL if (before, what) == (state.value, event.value)}
    if following:
        assert {transfer.on(event).value} == following
        return
    with pytest.raises(WrongStateError) as caught:
        transfer.on(event)
    assert (caught.value.state, transfer.state) == (state.value, state)
    assert "transfer 9" in caught.value.event


def test_is_over_when_complete_or_aborted_then_true_else_false() -> None:
    assert list(TRANSITIONS) == list(TransferState)
    over = {state for state in TransferState if _in(state).is_over}
    assert over == {TransferState.COMPLETE, TransferState.ABORTED}


def test_repr_when_shown_then_state() -> None:
    assert repr(_in(TransferState.MOVING)) == "<TransferProtocol 9 moving>"


def test_seen_when_a_request_is_retried_then_its_own_answer() -> None:
    log = RequestLog()
    log.record(_ANN, 1, b"one")
    log.record(_BOB, 1, b"uno")
    assert (log.seen(_ANN, 1), log.seen(_BOB, 1), log.seen(_ANN, 2)) == (b"one", b"uno", None)


def test_seen_when_the_answer_is_empty_then_still_seen() -> None:
    log = RequestLog()
    log.record(_ANN, 1, b"")
    assert log.seen(_ANN, 1) == b""


def test_record_when_answered_before_then_refused_and_the_first_stays() -> None:
    log = RequestLog()
    log.record(_ANN, 1, b"one")
    with pytest.raises(WrongStateError):
        log.record(_ANN, 1, b"two")
    assert log.seen(_ANN, 1) == b"one"


def test_record_when_full_then_the_oldest_is_forgotten_and_its_retry_refused() -> None:
    log = RequestLog(max_per_client=2)
    assert log.record(_ANN, 3, b"3") == []
    assert log.record(_ANN, 5, b"5") == []
    assert log.record(_ANN, 8, b"8") == [3]
    with pytest.raises(RemoteProtocolError):
        log.seen(_ANN, 3)
    assert log.seen(_ANN, 5) == b"5"
    assert log.seen(_ANN, 7) is None
    assert log.seen(_BOB, 3) is None
    assert len(log) == 2


def test_record_when_an_early_request_ends_late_then_its_answer_is_kept() -> None:
    log = RequestLog(max_per_client=2)
    for request in (2, 3, 4):
        log.record(_ANN, request, b"x")
    log.record(_ANN, 1, b"late")
    assert log.seen(_ANN, 1) == b"late"


def test_forget_before_when_the_client_says_so_then_older_ones_go_and_are_refused() -> None:
    log = RequestLog()
    for request in (1, 2, 3):
        log.record(_ANN, request, b"x")
    assert log.forget_before(_ANN, 3) == [1, 2]
    assert log.seen(_ANN, 3) == b"x"
    with pytest.raises(RemoteProtocolError):
        log.seen(_ANN, 2)


def test_forget_before_when_a_client_is_new_then_nothing_is_refused() -> None:
    log = RequestLog()
    assert log.forget_before(_ANN, 1) == []
    assert log.seen(_ANN, 1) is None


def test_forget_client_when_gone_for_good_then_nothing_of_it_is_left() -> None:
    log = RequestLog(max_per_client=1)
    log.record(_ANN, 1, b"1")
    log.record(_ANN, 2, b"2")
    log.record(_BOB, 1, b"1")
    assert log.forget_client(_ANN) == [2]
    assert log.forget_client(_ANN) == []
    assert log.seen(_ANN, 1) is None
    assert list(log.entries()) == [(_BOB, 1, b"1")]


def test_restore_when_entries_come_in_any_order_then_the_same_log() -> None:
    log = RequestLog(max_per_client=3)
    for request in (1, 2, 3, 4):
        log.record(_ANN, request, bytes([request]))
    log.record(_BOB, 9, b"9")
    again = RequestLog.restore(reversed(list(log.entries())), max_per_client=3)
    assert set(again.entries()) == set(log.entries())
    assert again.seen(_BOB, 8) is None
    with pytest.raises(RemoteProtocolError):
        again.seen(_ANN, 1)
    assert again.record(_ANN, 5, b"5") == [2]


@pytest.mark.parametrize("max_per_client", [0, -1])
def test_log_when_it_would_remember_nothing_then_refused(max_per_client: int) -> None:
    with pytest.raises(InvalidRequestError):
        RequestLog(max_per_client)
