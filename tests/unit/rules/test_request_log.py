from __future__ import annotations

import pytest

from tdserve.base.errors import WrongStateError
from tdserve.rules.request_log import RequestLog

_ANN, _BOB = b"ann", b"bob"


def test_seen_when_a_request_is_retried_then_its_own_answer() -> None:
    log = RequestLog()
    log.record(_ANN, 1, b"one")
    log.record(_BOB, 1, b"uno")
    assert (log.find_answer(_ANN, 1), log.find_answer(_BOB, 1), log.find_answer(_ANN, 2)) == (b"one", b"uno", None)


def test_seen_when_the_answer_is_empty_then_still_seen() -> None:
    log = RequestLog()
    log.record(_ANN, 1, b"")
    assert log.find_answer(_ANN, 1) == b""


def test_record_when_answered_before_then_refused_and_the_first_stays() -> None:
    log = RequestLog()
    log.record(_ANN, 1, b"one")
    with pytest.raises(WrongStateError, match=r"^a second answer is not possible while request 1 is answered$"):
        log.record(_ANN, 1, b"two")
    assert log.find_answer(_ANN, 1) == b"one"


def test_seen_when_others_were_answered_meanwhile_then_a_request_that_waits_is_new() -> None:
    log = RequestLog()
    for request in range(2, 10_000):
        log.record(_ANN, request, b"x")
    assert log.find_answer(_ANN, 1) is None
    assert log.find_answer(_ANN, 2) == b"x"
    log.record(_ANN, 1, b"late")
    assert log.find_answer(_ANN, 1) == b"late"


def test_record_when_it_takes_the_place_of_another_then_that_one_is_forgotten() -> None:
    log = RequestLog()
    log.record(_ANN, 1, b"one")
    log.record(_ANN, 2, b"two", instead_of=1)
    log.record(_ANN, 3, b"three", instead_of=None)
    assert list(log.iter_entries()) == [(_ANN, 2, b"two"), (_ANN, 3, b"three")]


def test_forget_when_the_client_reports_answers_then_all_but_what_it_may_send_again() -> None:
    log = RequestLog()
    for request in (1, 2, 3, 4):
        log.record(_ANN, request, b"x")
    log.record(_BOB, 1, b"x")
    assert log.forget(_ANN, 4, {2}) == [1, 3]
    assert [log.find_answer(_ANN, request) for request in (1, 2, 3, 4)] == [None, b"x", None, b"x"]
    assert log.find_answer(_BOB, 1) == b"x"
    assert log.forget(_BOB, 1) == []


def test_num_kept_when_answers_come_and_go_then_of_that_client() -> None:
    log = RequestLog()
    log.record(_ANN, 1, b"1")
    log.record(_ANN, 2, b"2")
    assert (log.count_kept(_ANN), log.count_kept(_BOB)) == (2, 0)
    log.forget(_ANN, 2)
    assert log.count_kept(_ANN) == 1


def test_forget_client_when_gone_for_good_then_nothing_of_it_is_left() -> None:
    log = RequestLog()
    log.record(_ANN, 1, b"1")
    log.record(_ANN, 2, b"2")
    log.record(_BOB, 1, b"1")
    assert log.forget_client(_ANN) == [1, 2]
    assert log.forget_client(_ANN) == []
    assert log.find_answer(_ANN, 1) is None
    assert list(log.iter_entries()) == [(_BOB, 1, b"1")]


def test_restore_when_entries_come_in_any_order_then_the_same_log() -> None:
    log = RequestLog()
    for request in (1, 2, 3, 4):
        log.record(_ANN, request, bytes([request]))
    log.record(_BOB, 9, b"9")
    again = RequestLog.restore(reversed(list(log.iter_entries())))
    assert set(again.iter_entries()) == set(log.iter_entries())
    assert again.find_answer(_BOB, 8) is None


def test_is_over_when_a_client_has_said_what_it_asks_no_more_then_these_and_no_others() -> None:
    log = RequestLog()
    assert not log.is_over(b"one", 1)
    log.forget(b"one", 5, {3})
    log.forget(b"one", 2)  # was overtaken
    assert [log.is_over(b"one", request) for request in range(1, 7)] == [True, True, False, True, False, False]
    assert not log.is_over(b"other", 1)
    log.forget_client(b"one")
    assert not log.is_over(b"one", 1)
