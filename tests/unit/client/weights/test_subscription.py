from __future__ import annotations

import math
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.base.deadline import Deadline
from tdserve.base.errors import DeadlineExceededError, InvalidRequestError
from tdserve.client.weights.pulls import Weights
from tdserve.client.weights.subscription import Subscription
from tests.errors import raises
from tests.processes import wait_for

TIMEOUT_S = 20.0


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    """A thread for a call that waits."""
    with ThreadPoolExecutor(1) as made:
        yield made


def publish(client: tdserve.Client, name: str, number: int) -> int:
    version: int = client.publish(name, TensorDict({"w": torch.full((3,), float(number))}, []))
    return version


def waiting(
    thread: ThreadPoolExecutor, client: tdserve.Client, name: str, subscription: Subscription
) -> Future[Weights | None]:
    """The next version, or None at the end; returns when the server has been asked for it."""
    future = thread.submit(lambda: next(subscription, None))
    wait_for(lambda: client.describe(name).num_waiting, "a request")
    return future


def test_subscription_when_it_is_slow_then_it_skips_to_the_newest_and_waits_for_the_next(
    client: tdserve.Client, name: str, thread: ThreadPoolExecutor
) -> None:
    for number in range(1, 4):
        publish(client, name, number)
    with client.subscribe(name, timeout_s=TIMEOUT_S) as subscription:
        first = next(subscription)
        assert (first.version, first.data["w"].tolist()) == (3, [3.0] * 3)
        later = waiting(thread, client, name, subscription)
        publish(client, name, 4)
        found = later.result(TIMEOUT_S)
        assert found is not None
        assert (found.version, found.data["w"].tolist()) == (4, [4.0] * 3)
        for number in range(5, 8):
            publish(client, name, number)
        assert next(subscription).version == 7


def test_subscription_when_its_place_is_given_then_every_version_goes_there(client: tdserve.Client, name: str) -> None:
    module = torch.nn.Linear(2, 2)
    client.publish(name, torch.nn.Linear(2, 2))
    for weights in client.subscribe(name, newer_than=0, into=module, timeout_s=TIMEOUT_S):
        assert weights.data is module
        newest = client.latest(name)
        assert newest is not None
        assert torch.equal(module.weight, newest.data["weight"])
        if weights.version == 3:
            break
        client.publish(name, torch.nn.Linear(2, 2))


@pytest.mark.parametrize("timeout_s", [0, 0.05])
def test_subscription_when_nothing_comes_in_time_then_deadline_and_it_can_go_on(
    client: tdserve.Client, name: str, timeout_s: float
) -> None:
    publish(client, name, 1)
    subscription = client.subscribe(name, newer_than=1, timeout_s=timeout_s)
    with pytest.raises(DeadlineExceededError, match=name) as caught:
        next(subscription)
    assert caught.value.fields["timeout_s"] == timeout_s
    publish(client, name, 2)
    assert next(subscription).version == 2


@pytest.mark.parametrize("timeout_s", [TIMEOUT_S, math.inf])
def test_subscription_when_a_step_is_within_a_block_then_it_ends_by_its_time_and_the_next_has_its_own(
    client: tdserve.Client, name: str, timeout_s: float
) -> None:
    publish(client, name, 1)
    subscription = client.subscribe(name, newer_than=1, timeout_s=timeout_s)
    began_s = time.monotonic()
    with tdserve.within(0.05):
        for _ in range(2):
            with pytest.raises(DeadlineExceededError, match=name) as caught:
                next(subscription)
            assert caught.value.fields["timeout_s"] == 0.05
    assert time.monotonic() - began_s < TIMEOUT_S / 2
    publish(client, name, 2)
    assert next(subscription).version == 2
    shorter = client.subscribe(name, newer_than=2, timeout_s=0.02)
    with tdserve.within(TIMEOUT_S), pytest.raises(DeadlineExceededError) as caught:
        next(shorter)
    assert caught.value.fields["timeout_s"] == 0.02


@pytest.mark.parametrize("what", ["subscription", "client"])
def test_subscription_when_closed_while_another_thread_waits_then_the_iteration_ends(
    server: tdserve.Server,
    client: tdserve.Client,
    name: str,
    thread: ThreadPoolExecutor,
    what: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # it is told, and does not find out
    monkeypatch.setattr("tdserve.client.weights.subscription.STEP_S", 2 * TIMEOUT_S)
    publish(client, name, 1)
    with server.client(transport=client.transport) as own:
        subscription = own.subscribe(name, newer_than=1, timeout_s=math.inf)
        later = waiting(thread, client, name, subscription)
        (subscription if what == "subscription" else own).close()
        assert later.result(TIMEOUT_S) is None
        assert list(subscription) == []
        if what == "subscription":
            assert own.latest(name).version == 1  # type: ignore[union-attr]


def test_subscription_when_it_would_be_of_nothing_then_refused_at_once(client: tdserve.Client) -> None:
    with pytest.raises(InvalidRequestError):
        client.subscribe("not/a name")
    with raises(InvalidRequestError, argument="into"):
        client.subscribe("w", out=TensorDict({}, []), into=torch.nn.Linear(1, 1))


def test_subscription_when_a_step_had_no_time_left_to_wait_then_the_next_step_follows() -> None:
    found = Weights(2, TensorDict(a=torch.ones(1)), {})
    steps = iter([None, None, found])
    subscription = Subscription("w", lambda *_: next(steps), lambda: Deadline.after(20.0), newer_than=1)
    assert next(subscription) is found
