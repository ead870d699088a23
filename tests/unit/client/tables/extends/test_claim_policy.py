from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.base.deadline import Deadline
from tdserve.client.session.requests.outgoing import WriteTarget
from tdserve.client.tables.extends.claim_policy import AHEAD, AHEAD_ROWS, ClaimPolicy, ClaimRequest
from tdserve.rules.replay.allocation.claim_pacing import FIRST_CLAIM_EXTENDS, MIN_EXTENDS
from tdserve.rules.replay.settings import Settings
from tdserve.structure.captures.capture import capture
from tdserve.v1 import control_pb2
from tests.integration.local_roles import find_num_claimed


def rows(*numbers: int) -> TensorDict:
    """Rows that say which they are."""
    return TensorDict({"number": torch.tensor(numbers)}, [len(numbers)])


def make(client: tdserve.Client, name: str, **settings: Any) -> Any:
    """A table of such rows."""
    return client.create_replay(name, rows(0)[0], 64, **settings)


def make_policy(client: tdserve.Client, replay: Any) -> ClaimPolicy:
    """A policy for extends of this table, in an open session."""
    client.session(Deadline.after(20.0))
    stored = replay.spec.prepend((64,))
    return ClaimPolicy(client, WriteTarget(replay.name, stored.fingerprint, stored), Settings())


def test_make_claim_request_when_a_local_writer_goes_on_then_after_a_few_extends_and_used_from_the_next_on(
    local_client: tdserve.Client, name: str
) -> None:
    replay = make(local_client, name)
    for number in range(FIRST_CLAIM_EXTENDS):
        assert find_num_claimed(local_client, name) is None
        replay.extend(rows(number))
    assert find_num_claimed(local_client, name) == 0
    assert replay.extend(rows(FIRST_CLAIM_EXTENDS)).tolist() == [FIRST_CLAIM_EXTENDS]
    assert find_num_claimed(local_client, name) == 1
    assert replay[:]["number"].tolist() == list(range(FIRST_CLAIM_EXTENDS + 1))


@pytest.mark.parametrize(
    ("num_rows", "num_ahead"),
    [(1, AHEAD), (256, AHEAD * 256), (4096, AHEAD_ROWS), (AHEAD_ROWS // 2, AHEAD_ROWS), (AHEAD_ROWS // 2 + 1, 0)],
)
def test_make_claim_request_when_extends_are_long_then_fewer_or_none_are_ahead_so_that_a_commit_is_short(
    local_client: tdserve.Client, name: str, num_rows: int, num_ahead: int
) -> None:
    policy = make_policy(local_client, make(local_client, name))
    claim_requests = [policy.make_claim_request(num_rows) for _ in range(FIRST_CLAIM_EXTENDS)]
    assert claim_requests[:-1] == [None] * (FIRST_CLAIM_EXTENDS - 1)
    assert claim_requests[-1] == (ClaimRequest(num_ahead) if num_ahead else None)


def test_extend_when_something_is_said_of_the_rows_then_asked_for(local_client: tdserve.Client, name: str) -> None:
    replay = make(local_client, name, sampler=tdserve.Prioritized())
    for number in range(FIRST_CLAIM_EXTENDS + 1):
        replay.extend(rows(number))
    assert find_num_claimed(local_client, name) == 1
    replay.extend(rows(9), priority=3.0)
    found = replay.sample(200)
    assert set(found["priority"][found["number"] == 9].tolist()) == {3.0}


def test_extend_when_rows_are_early_then_a_future_that_is_done(local_client: tdserve.Client, name: str) -> None:
    replay = make(local_client, name)
    for number in range(FIRST_CLAIM_EXTENDS):
        replay.extend(rows(number), return_early=True).result(20.0)
    future = replay.extend(rows(4, 5), return_early=True)
    assert future.done()
    assert future.result().tolist() == [4, 5]


@pytest.mark.parametrize(
    "settings",
    [{"max_times_sampled": 2}, {"limiter": tdserve.SampleToInsertRatio(8.0, min_size=1, error_buffer=800.0)}],
)
def test_make_claim_request_when_the_table_decides_more_then_never(
    local_client: tdserve.Client, name: str, settings: dict[str, Any]
) -> None:
    replay = make(local_client, name, **settings)
    for number in range(3 * FIRST_CLAIM_EXTENDS):
        replay.extend(rows(number))
    assert find_num_claimed(local_client, name) is None


def test_compute_wish_when_the_client_is_elsewhere_then_its_worker_claims(
    remote_client: tdserve.Client, name: str
) -> None:
    replay = make(remote_client, name)
    for number in range(3 * FIRST_CLAIM_EXTENDS):
        replay.extend(rows(number))
    assert find_num_claimed(remote_client, name) is not None


@pytest.mark.slow
def test_make_claim_request_when_claims_are_not_worth_it_then_after_longer_and_longer_pauses(
    local_client: tdserve.Client, remote_client: tdserve.Client, name: str
) -> None:
    replay, other = make(local_client, name), remote_client.replay(name)
    claim_requests = []
    for number in range(100):
        before = find_num_claimed(local_client, name)
        replay.extend(rows(number))
        if before is None and find_num_claimed(local_client, name) == 0:
            claim_requests.append(number)
            other.extend(rows(1000))
    pauses = [later - earlier for earlier, later in pairwise(claim_requests)]
    assert pauses == sorted(pauses)
    assert pauses[-1] >= 2 * pauses[0] > FIRST_CLAIM_EXTENDS


def test_make_claim_request_when_a_claim_was_worth_it_then_the_next_comes_soon(
    local_client: tdserve.Client, remote_client: tdserve.Client, name: str
) -> None:
    replay, other = make(local_client, name), remote_client.replay(name)
    for _ in range(3):
        for number in range(2 * FIRST_CLAIM_EXTENDS + MIN_EXTENDS):
            replay.extend(rows(number))
        assert (find_num_claimed(local_client, name) or 0) >= MIN_EXTENDS
        other.extend(rows(1000))


def test_answer_when_the_server_offers_nothing_then_asked_for_as_before(
    local_client: tdserve.Client, name: str
) -> None:
    policy = make_policy(local_client, make(local_client, name))
    *before, claim_request = (policy.make_claim_request(4) for _ in range(FIRST_CLAIM_EXTENDS))
    assert before == [None] * (FIRST_CLAIM_EXTENDS - 1)
    assert claim_request == ClaimRequest(128)
    assert policy.is_awaiting_claim
    assert policy.make_claim_request(4) is None, "one at a time"
    policy.take_answer(claim_request, control_pb2.Done())
    assert not policy.is_awaiting_claim
    assert policy.extend(capture(rows(1))) is None


def test_answer_when_the_claim_cannot_be_used_then_no_other_is_requested(
    local_client: tdserve.Client, remote_client: tdserve.Client, name: str
) -> None:
    policy = make_policy(local_client, make(local_client, name))
    *_, claim_request = (policy.make_claim_request(1) for _ in range(FIRST_CLAIM_EXTENDS))
    assert claim_request is not None
    claim_request.session = remote_client.session(Deadline.after(20.0))  # maps no files
    policy.take_answer(claim_request, control_pb2.Done(claim=control_pb2.Claim()))
    assert not policy.is_awaiting_claim
    assert [policy.make_claim_request(1) for _ in range(2 * FIRST_CLAIM_EXTENDS)] == [None] * 2 * FIRST_CLAIM_EXTENDS
    assert policy.compute_wish(1) == 0
