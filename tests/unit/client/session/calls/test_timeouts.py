from __future__ import annotations

from tdserve.base.deadline import GRACE_S, ONCE_GRACE_S, Deadline
from tdserve.client.session.calls.call_deadline import within
from tdserve.client.session.calls.timeouts import (
    DEFAULT_TRANSFER_S,
    MIN_BYTES_PER_S,
    TRANSFER_GRACE_S,
    compute_answer_timeout_s,
    compute_sending_timeout_s,
    compute_transfer_timeout_s,
    may_expect,
)


def test_timeouts_when_a_deadline_is_given_then_with_grace() -> None:
    deadline = Deadline.after(5.0, lambda: 100.0)
    at_once = Deadline.after(0)
    assert compute_transfer_timeout_s(deadline) == 5.0 + TRANSFER_GRACE_S
    assert compute_transfer_timeout_s(at_once) == compute_transfer_timeout_s(Deadline.never) == DEFAULT_TRANSFER_S
    assert compute_answer_timeout_s(deadline) == 5.0 + GRACE_S
    assert compute_answer_timeout_s(at_once) == compute_sending_timeout_s(at_once, 0) == ONCE_GRACE_S
    assert (
        compute_answer_timeout_s(at_once, 3 * MIN_BYTES_PER_S)
        == compute_sending_timeout_s(at_once, 3 * MIN_BYTES_PER_S)
        > 3.0
    )
    assert compute_answer_timeout_s(Deadline.never) is None
    assert compute_sending_timeout_s(Deadline.never, 0) == DEFAULT_TRANSFER_S
    assert [may_expect(Deadline.after(timeout_s)) for timeout_s in (None, 0, 0.2, 5.0)] == [True, False, False, True]


def test_transfers_when_a_call_that_does_not_wait_is_a_step_of_another_then_they_end_with_that() -> None:
    """Content that a server grants, and then stands still, is waited for no longer than the call itself."""
    at_once = Deadline.after(0)
    with within(Deadline.after(5.0, lambda: 100.0)):
        assert compute_transfer_timeout_s(at_once) == 5.0 + TRANSFER_GRACE_S
    with within(0):
        assert compute_transfer_timeout_s(at_once) == DEFAULT_TRANSFER_S
