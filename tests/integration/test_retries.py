"""A request that is sent again because its answer was lost is carried out once, whatever requests, sessions and
restarts come in between."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.client.session.requests.request_numbers import MAX_WRITES_UNDER_WAY
from tests.integration.crashing import Crashing
from tests.integration.cutting import Cutting
from tests.integration.local_roles import is_claiming
from tests.processes import wait_for

pytestmark = pytest.mark.integration

T = TypeVar("T")

MANY = 300
"""More requests than a server once remembered for a client."""

MANY_STRUCTURES = 64
"""A server keeps so many structures that no store has."""

FEW = 8
"""Extends after which a writer claims its rows. Then it makes as many again, of which the server is not notified."""


@pytest.fixture(scope="module")
def crashing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crashing]:
    """One server for all tests of this file; each test uses stores of its own."""
    with Crashing(tmp_path_factory.mktemp("retries")) as made:
        yield made


def rows(*numbers: int) -> TensorDict:
    """Returns rows that contain their number."""
    return TensorDict({"number": torch.tensor(numbers)}, [len(numbers)])


def numbers_in(table: Any) -> list[int]:
    """Returns the numbers in a table, in order."""
    found: list[int] = table[:]["number"].tolist()
    return found


def kill_worker(crashing: Crashing) -> None:
    """Ends the sessions of all but local clients."""
    with crashing.server.client(transport="gloo") as client:
        (worker,) = client.stats()["workers"]
        os.kill(worker["pid"], signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("is_killed", [False, True])
def test_extends_when_no_client_reads_claimed_rows_and_many_other_answers_come_then_all_are_there(
    crashing: Crashing, is_killed: bool
) -> None:
    with crashing.server.client(transport="shm", timeout_s=60.0) as client:
        claimed = client.create_replay(f"claimed-{is_killed}", like=rows(0)[0], capacity=1_000)
        asked = client.create_replay(f"asked-{is_killed}", like=rows(0)[0], capacity=1_000)
        for number in range(FEW):
            claimed.extend(rows(number))
        assert is_claiming(client, claimed.name)
        assert len(claimed) == FEW  # somebody looks, and nobody does after this
        for number in range(FEW, 2 * FEW):
            claimed.extend(rows(number))
        for number in range(MANY):
            asked.extend(rows(number), ends=torch.ones(1, dtype=torch.bool))  # what is said of rows is asked for
        if is_killed:
            crashing.restart()
        with crashing.server.client(transport="gloo", timeout_s=60.0) as other:
            assert numbers_in(other.replay(claimed.name)) == list(range(2 * FEW))
            assert numbers_in(other.replay(asked.name)) == list(range(MANY))


@pytest.mark.slow
@pytest.mark.parametrize(("transport", "killed"), [("gloo", "worker"), ("gloo", "control"), ("shm", "control")])
def test_extend_when_it_waits_while_many_are_answered_and_its_session_is_lost_then_it_goes_on(
    crashing: Crashing, transport: Any, killed: str
) -> None:
    with crashing.server.client(transport=transport, timeout_s=60.0) as client, ThreadPoolExecutor(1) as pool:
        queue = client.create_queue(f"queue-{transport}-{killed}", like=rows(0)[0], max_size=2)
        queue.extend(rows(0, 1))
        waiting: Future[Any] = pool.submit(queue.extend, rows(2))
        wait_for(lambda: queue.info()["num_waiting"] == 1, "a waiting extend")
        replay = client.create_replay(f"replay-{transport}-{killed}", like=rows(0)[0], capacity=1_000)
        for number in range(MANY):
            replay.extend(rows(number), ends=torch.ones(1, dtype=torch.bool))
        assert not waiting.done()
        if killed == "worker":
            kill_worker(crashing)
        else:
            crashing.restart()
        with crashing.server.client(transport="gloo", timeout_s=60.0) as other:
            far = other.queue(queue.name)
            with far.take(2, timeout_s=60.0) as taken:
                assert taken["number"].tolist() == [0, 1]
            assert len(waiting.result(60.0)) == 1
            with far.take(1, timeout_s=60.0) as taken:
                assert taken["number"].tolist() == [2]
            assert numbers_in(other.replay(replay.name)) == list(range(MANY))


@pytest.mark.slow
def test_extends_when_many_handles_wait_then_no_more_are_under_way_than_a_client_may_have(crashing: Crashing) -> None:
    with crashing.server.client(transport="gloo", timeout_s=60.0) as client:
        queue = client.create_queue("window", like=rows(0)[0], max_size=2)
        queue.extend(rows(0, 1))
        handles = [client.queue("window") for _ in range(MANY // 3)]
        early = [handle.extend(rows(2), return_early=True, timeout_s=60.0) for handle in handles]
        with ThreadPoolExecutor(MANY - len(handles)) as pool:
            waiting = [pool.submit(queue.extend, rows(2), timeout_s=60.0) for _ in range(MANY - len(handles))]
            wait_for(lambda: queue.info()["num_waiting"] == MAX_WRITES_UNDER_WAY, "a full window")
            num_taken = 0
            while num_taken < MANY + 2:
                with queue.take(1, timeout_s=60.0):  # acknowledged beside the window
                    num_taken += 1
                assert queue.info()["num_waiting"] <= MAX_WRITES_UNDER_WAY
                assert client.requests.num_writes <= MAX_WRITES_UNDER_WAY
            assert all(len(future.result(60.0)) == 1 for future in (*early, *waiting))
        assert client.requests.num_writes == 0


@dataclass
class Deaf:
    """A client that can be cut off just before it receives an answer.

    Attributes:
        other: Another client, which is not cut off.
        cutting: The proxy between the client and the server.
        pool: Threads for its calls.
    """

    client: tdserve.Client
    other: tdserve.Client
    cutting: Cutting
    pool: ThreadPoolExecutor

    def begin(self, call: Callable[..., T], *args: Any, **options: Any) -> Future[T]:
        """Runs a call of ``client`` until it is cut off; its future is done after ``cutting.mend()``."""
        running = self.pool.submit(call, *args, **options)
        assert self.cutting.was_cut.wait(60.0)
        return running


@pytest.fixture
def deaf(crashing: Crashing) -> Iterator[Deaf]:
    """A client whose calls are retried for a minute."""
    with (
        Cutting(crashing.server.address) as cutting,
        ThreadPoolExecutor(1) as pool,
        crashing.server.client(transport="gloo", timeout_s=60.0) as other,
        tdserve.connect(cutting.address, transport="gloo", timeout_s=60.0) as client,
    ):
        yield Deaf(client, other, cutting, pool)


@pytest.mark.slow
@pytest.mark.parametrize("is_restarted", [False, True])
def test_delete_when_its_answer_is_lost_then_the_next_store_of_that_name_stays(
    crashing: Crashing, deaf: Deaf, is_restarted: bool
) -> None:
    name = f"deleted-{is_restarted}"
    deaf.other.init_remote(rows(1), name)
    deaf.cutting.cut_when(lambda: name not in deaf.other)
    deleting = deaf.begin(deaf.client.delete, name)
    if is_restarted:
        crashing.restart()
    deaf.other.init_remote(rows(2), name)
    deaf.cutting.mend()
    deleting.result(60.0)
    assert deaf.other.from_remote_init(name)["number"].tolist() == [2]
    deaf.client.delete(name)
    assert name not in deaf.other


@pytest.mark.slow
@pytest.mark.parametrize("is_restarted", [False, True])
def test_create_when_its_answer_is_lost_then_it_does_not_refuse_its_own_store(
    crashing: Crashing, deaf: Deaf, is_restarted: bool
) -> None:
    name = f"created-{is_restarted}"
    deaf.cutting.cut_when(lambda: name in deaf.other)
    creating = deaf.begin(deaf.client.create_replay, name, like=rows(0)[0], capacity=10)
    if is_restarted:
        crashing.restart()
    deaf.cutting.mend()
    creating.result(60.0).extend(rows(3))
    assert numbers_in(deaf.other.replay(name)) == [3]
    with pytest.raises(tdserve.StoreExistsError):
        deaf.client.create_replay(name, like=rows(0)[0], capacity=10)


@pytest.mark.slow
def test_publish_when_its_answer_was_lost_and_its_structure_is_forgotten_then_the_next_one_sends_it_along(
    crashing: Crashing, deaf: Deaf
) -> None:
    deaf.cutting.cut_when(lambda: "published" in deaf.other)
    publishing = deaf.begin(deaf.client.publish, "published", rows(1, 2, 3, 4, 5))
    deaf.cutting.mend()
    assert publishing.result(60.0) == 1
    deaf.other.delete("published")
    for number in range(2 * MANY_STRUCTURES):  # above this number, the server forgets structures that no store has
        deaf.other.init_remote(TensorDict({f"key-{number}": torch.zeros(1)}), "structured")
        deaf.other.delete("structured")
    assert deaf.client.publish("published", rows(1, 2, 3, 4, 5)) == 2
