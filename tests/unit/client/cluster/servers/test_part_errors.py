"""Failures of several shards, as the error of one call."""

from __future__ import annotations

import pytest

from tdserve.base.deadline import Deadline
from tdserve.base.errors import (
    ConnectError,
    DeadlineExceededError,
    PeerLostError,
    ShardLostError,
    TDServeError,
    WrongStateError,
)
from tdserve.client.cluster.servers.part_errors import merge_failures

UNREACHED, UNANSWERED = ConnectError(address="a:1", reason="refused"), PeerLostError(peer="server 1", reason="silent")
EXPIRED = Deadline.after(0.0)


@pytest.mark.parametrize(
    ("failures", "deadline", "expected"),
    [
        ({0: UNREACHED, 2: UNREACHED}, EXPIRED, ConnectError),
        ({0: UNREACHED, 2: UNANSWERED}, EXPIRED, DeadlineExceededError),
        ({0: UNANSWERED, 2: UNREACHED}, Deadline.never, PeerLostError),
    ],
)
def test_failures_when_several_shards_do_not_answer_then_unreached_only_if_all_are(
    failures: dict[int, TDServeError], deadline: Deadline, expected: type[TDServeError]
) -> None:
    merged = merge_failures(failures, "t", "a:1,a:2", deadline)
    assert type(merged) is expected
    assert "shards [0, 2] of 't'" in str(merged)
    assert merged.retryable
    assert merged.__cause__ is failures[0]


def test_failures_when_one_shard_does_not_answer_then_its_own() -> None:
    assert merge_failures({1: UNANSWERED}, "t", "a:1,a:2", EXPIRED) is UNANSWERED


@pytest.mark.parametrize(
    "refusal", [WrongStateError(state="none of these rows is held", event="it"), ShardLostError(name="t", shard=1)]
)
def test_failures_when_a_shard_refuses_then_the_refusal_names_those_that_do_not_answer(refusal: TDServeError) -> None:
    merged = merge_failures({0: UNANSWERED, 1: refusal, 2: UNREACHED}, "t", "a:1,a:2", EXPIRED)
    assert type(merged) is type(refusal)
    assert "shards [0, 2] of 't' do not answer" in str(merged)
    assert merge_failures({1: refusal}, "t", "a:1,a:2", EXPIRED) is refusal
