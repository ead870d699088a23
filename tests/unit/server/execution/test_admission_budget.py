from __future__ import annotations

import pytest

from tdserve.base.errors import ServerBusyError
from tdserve.server.execution.admission_budget import REQUEST_BYTES, SESSION_SHARE, UNARY_WAIT_BYTES, AdmissionBudget


class Session:
    """A session whose requests are counted."""

    held_nbytes = 0


def test_holding_when_there_is_room_then_counted_until_the_end_of_the_block() -> None:
    held, session = AdmissionBudget(1_000_000), Session()
    with held.admit(session, "x", 60_000):
        assert held.nbytes == session.held_nbytes == 60_000 + REQUEST_BYTES
    assert held.nbytes == session.held_nbytes == 0


def test_holding_when_all_sessions_have_taken_the_limit_then_refused_with_the_figures_and_nothing_counted() -> None:
    held, asking = AdmissionBudget(SESSION_SHARE * 100_000), Session()
    with held.admit(Session(), "x", 90_000), held.admit(Session(), "x", 90_000):
        nbytes = held.nbytes
        free = held.limit_bytes - nbytes
        with pytest.raises(ServerBusyError) as caught, held.admit(asking, "a write", 40_000):
            pass
        asked = 40_000 + REQUEST_BYTES
        assert caught.value.fields == {
            "what": "a write, in bytes",
            "asked": asked,
            "free": free,
            "limit": held.limit_bytes,
        }
        assert (held.nbytes, asking.held_nbytes) == (nbytes, 0)


def test_holding_when_one_session_has_taken_its_share_then_only_that_one_is_refused() -> None:
    held, greedy = AdmissionBudget(SESSION_SHARE * 100_000), Session()
    with held.admit(greedy, "x", 90_000):
        with pytest.raises(ServerBusyError, match="of one session") as caught, held.admit(greedy, "a write", 9_000):
            pass
        assert caught.value.fields["limit"] == 100_000
        with held.admit(Session(), "x", 9_000):
            pass


def test_holding_when_the_block_raises_then_given_up() -> None:
    held, session = AdmissionBudget(1_000_000), Session()
    with pytest.raises(KeyError), held.admit(session, "x", 60_000):
        raise KeyError
    assert held.nbytes == session.held_nbytes == 0


def test_holding_when_requests_are_small_then_each_counts_as_what_it_takes() -> None:
    held, session = AdmissionBudget(SESSION_SHARE * 2 * REQUEST_BYTES), Session()
    with (
        held.admit(session, "x", 0),
        held.admit(session, "y", 0),
        pytest.raises(ServerBusyError),
        held.admit(session, "z", 0),
    ):
        pass


def test_counting_when_there_is_no_room_then_counted_all_the_same() -> None:
    held, session = AdmissionBudget(1_000), Session()
    with held.count_during(session, 5_000):
        assert held.nbytes == session.held_nbytes == 5_000
    assert held.nbytes == session.held_nbytes == 0


def test_holding_unary_when_too_many_calls_wait_then_the_next_is_refused_and_others_are_not() -> None:
    held = AdmissionBudget(4 * (UNARY_WAIT_BYTES + REQUEST_BYTES))
    with held.admit_unary(must_wait=True), held.admit_unary(must_wait=True):
        with pytest.raises(ServerBusyError, match="calls that wait"), held.admit_unary(must_wait=True):
            raise AssertionError("it must not be held")
        with held.admit_unary(must_wait=False):
            pass
    assert held.nbytes == 0
