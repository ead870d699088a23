"""Following sharded weights, by an iterator and with asyncio."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import tdserve
from tdserve import dtensor
from tdserve.aio import dtensor as aio_dtensor
from tdserve.client.weights.pulls import Weights
from tests.errors import raises
from tests.integration.crashing import Crashing
from tests.integration.forked_clients import ForkedClients
from tests.processes import wait_for

pytestmark = pytest.mark.integration

TIMEOUT_S = 20.0


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    """A thread for a call that waits."""
    with ThreadPoolExecutor(1) as made:
        yield made


def make(number: float) -> dict[str, Any]:
    return {"a": torch.full((3,), number), "step": number}


def start_waiting(
    thread: ThreadPoolExecutor, client: tdserve.Client, name: str, subscription: tdserve.Subscription
) -> Future[Weights | None]:
    """Asks for the next version, or None at the end, in a thread; returns once the server has been asked for it."""
    future = thread.submit(lambda: next(subscription, None))
    wait_for(lambda: client.describe(name).num_waiting, "a request")
    return future


def test_subscription_when_it_is_slow_then_it_skips_to_the_newest_and_waits_for_the_next(
    client: tdserve.Client, name: str, thread: ThreadPoolExecutor
) -> None:
    for number in range(1, 4):
        dtensor.publish(client, name, make(number))
    into = make(0)
    with dtensor.subscribe(client, name, into=into, timeout_s=TIMEOUT_S) as subscription:
        for number in (3, 4, 7):
            if number == 4:
                later = start_waiting(thread, client, name, subscription)
                dtensor.publish(client, name, make(number), metadata={"kind": "next"})
                found = later.result(TIMEOUT_S)
                assert found is not None
                assert found.metadata == {"kind": "next"}
            else:
                found = next(subscription)
            assert (found.version, found.data is into) == (number, True)
            assert (into["a"].tolist(), into["step"]) == ([number] * 3, number)
            if number == 4:
                for newer in range(5, 8):
                    dtensor.publish(client, name, make(newer))


@pytest.mark.parametrize("timeout_s", [0, 0.05])
def test_subscription_when_nothing_comes_in_time_then_deadline_and_it_can_go_on(
    client: tdserve.Client, name: str, timeout_s: float
) -> None:
    dtensor.publish(client, name, make(1))
    subscription = dtensor.subscribe(client, name, into=make(0), newer_than=1, timeout_s=timeout_s)
    with pytest.raises(tdserve.DeadlineExceededError, match=name) as caught:
        next(subscription)
    assert caught.value.fields["timeout_s"] == timeout_s
    dtensor.publish(client, name, make(2))
    into = make(0)
    assert next(dtensor.subscribe(client, name, into=into, newer_than=1)).version == 2
    assert into["step"] == 2


def test_subscription_when_a_step_is_within_a_block_then_it_ends_by_its_time(client: tdserve.Client, name: str) -> None:
    dtensor.publish(client, name, make(1))
    into = make(0)
    subscription = dtensor.subscribe(client, name, into=into, newer_than=1, timeout_s=TIMEOUT_S)
    with tdserve.within(0.05), pytest.raises(tdserve.DeadlineExceededError, match=name) as caught:
        next(subscription)
    assert caught.value.fields["timeout_s"] == 0.05
    dtensor.publish(client, name, make(2))
    assert (next(subscription).version, into["step"]) == (2, 2)


@pytest.mark.parametrize("what", ["subscription", "client"])
def test_subscription_when_closed_while_another_thread_waits_then_the_iteration_ends(
    server: tdserve.Server,
    client: tdserve.Client,
    name: str,
    thread: ThreadPoolExecutor,
    what: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # the server is asked to give the request up, before the step ends by itself
    monkeypatch.setattr("tdserve.client.weights.subscription.STEP_S", 2 * TIMEOUT_S)
    dtensor.publish(client, name, make(1))
    with server.client(transport=client.transport) as own:
        subscription = dtensor.subscribe(own, name, into=make(0), newer_than=1, timeout_s=math.inf)
        later = start_waiting(thread, client, name, subscription)
        (subscription if what == "subscription" else own).close()
        assert later.result(TIMEOUT_S) is None
        assert list(subscription) == []


@pytest.mark.parametrize("step_s", [0.1, 0.01])  # each step finds the version that is lost, some with no time left
def test_subscription_when_a_part_of_the_next_is_gone_then_it_waits_for_the_one_after_it(
    client: tdserve.Client, name: str, thread: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, step_s: float
) -> None:
    monkeypatch.setattr("tdserve.client.weights.subscription.STEP_S", step_s)
    dtensor.publish(client, name, make(1))
    client.delete(f"{name}.part-0")
    into = make(0)
    subscription = dtensor.subscribe(client, name, into=into, newer_than=0, timeout_s=TIMEOUT_S)
    later = start_waiting(thread, client, name, subscription)
    dtensor.publish(client, name, make(2))
    found = later.result(TIMEOUT_S)
    assert found is not None
    assert (found.version, into["a"].tolist()) == (2, [2.0] * 3)


def test_subscription_when_it_would_be_of_nothing_then_refused_at_once(client: tdserve.Client, name: str) -> None:
    with pytest.raises(tdserve.InvalidRequestError, match="a list is no"):
        dtensor.subscribe(client, name, into=[])
    with pytest.raises(tdserve.InvalidRequestError):
        dtensor.subscribe(client, "not/a name", into={})
    with raises(tdserve.InvalidRequestError, argument="newer_than"):
        dtensor.subscribe(client, name, into={}, newer_than="1")  # type: ignore[arg-type]
    dtensor.publish(client, name, make(1))
    subscription = dtensor.subscribe(client, name, into={"b": torch.zeros(1)})
    with raises(tdserve.SpecMismatchError, key="a"):
        next(subscription)


def test_subscription_when_the_server_is_killed_then_it_goes_on_with_the_next_version(
    tmp_path: Path, thread: ThreadPoolExecutor
) -> None:
    with Crashing(tmp_path) as crashing, crashing.server.client(timeout_s=60.0) as client:
        dtensor.publish(client, "w", make(1))
        into = make(0)
        subscription = dtensor.subscribe(client, "w", into=into)
        assert next(subscription).version == 1
        later = start_waiting(thread, client, "w", subscription)
        crashing.restart()
        assert dtensor.publish(client, "w", make(2)) == 2
        found = later.result(60.0)
        assert found is not None
        assert (found.version, into["a"].tolist()) == (2, [2.0] * 3)


def test_module_when_a_pass_gathers_its_parameters_during_the_wait_then_it_acts_with_the_new_ones(
    server: tdserve.Server, name: str, tmp_path: Path
) -> None:
    with ForkedClients("tests.integration.dtensor_loop_roles") as ranks:
        child = ranks.start("pass_and_follow", server.address, name, folder=str(tmp_path), rank=0, size=1)
        assert child.rest() == ["done"]


def test_asyncio_when_weights_are_sharded_then_each_call_is_a_coroutine(server: tdserve.Server, name: str) -> None:
    async def follow() -> None:
        async with tdserve.aio.connect(server.address, timeout_s=TIMEOUT_S) as client:
            into = make(0)
            waiting = asyncio.create_task(aio_dtensor.latest(client, name, into=into))
            assert await aio_dtensor.publish(client, name, make(1), metadata={"n": 1}) == 1
            found = await waiting
            assert found is not None
            assert (found.version, found.metadata, into["step"]) == (1, {"n": 1}, 1)
            async for weights in aio_dtensor.subscribe(client, name, into=into):
                assert into["a"].tolist() == [float(weights.version)] * 3
                if weights.version == 3:
                    break
                await aio_dtensor.publish(client, name, make(weights.version + 1))
            assert (await aio_dtensor.version(client, name, 2, into=into)).version == 2
            assert into["step"] == 2
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(aio_dtensor.latest(client, name, into=into, newer_than=3), 0.05)
            await aio_dtensor.delete(client, name)
            assert await client.stores(name) == []
            with pytest.raises(tdserve.InvalidRequestError, match=r"client.*give what tdserve\.aio\.connect returns"):
                await aio_dtensor.delete(client.sync, name)

    asyncio.run(asyncio.wait_for(follow(), 3 * TIMEOUT_S))
