"""A call that times out does no other harm: the session, its leases and other calls go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.base.config import TransportName
from tdserve.base.deadline import Deadline
from tests.roots import make_quick_root

pytestmark = pytest.mark.integration

ID = TensorDict({"id": torch.tensor(0)}, [])
IDS = TensorDict({"id": torch.arange(8)}, [8])
WAIT_S = 0.4
"""Of a call for what does not come."""


def row(num_floats: int) -> TensorDict:
    """Returns a row of a full queue."""
    return TensorDict({"x": torch.zeros(num_floats)}, [])


def extend_full(client: tdserve.Client, num_floats: int) -> None:
    """Writes to a queue that nobody reads."""
    client.queue(f"full-{num_floats}").extend(row(num_floats).expand(1).clone(), timeout_s=WAIT_S)


def extend_early(client: tdserve.Client, num_floats: int) -> None:
    """Like ``extend_full``, with an early return."""
    rows = row(num_floats).expand(1).clone()
    client.queue(f"full-{num_floats}").extend(rows, timeout_s=WAIT_S, return_early=True).result(30.0)


CALLS: dict[str, Callable[[tdserve.Client], Any]] = {
    "inline write": lambda client: extend_full(client, 10),
    "write": lambda client: extend_full(client, 100_000),
    "write in parts": lambda client: extend_full(client, 10_000_000),
    "early write": lambda client: extend_early(client, 100_000),
    "take": lambda client: client.queue("empty").take(1, timeout_s=WAIT_S).__enter__(),
    "sample": lambda client: client.replay("few").sample(4, timeout_s=WAIT_S),
    "latest": lambda client: client.latest("nothing", timeout_s=WAIT_S),
    "store": lambda client: client.from_remote_init("nothing", timeout_s=WAIT_S),
}


@pytest.fixture(scope="module")
def server() -> Iterator[tdserve.Server]:
    """A server with full queues of three sizes."""
    with make_quick_root() as root, tdserve.Server(root) as started, started.client() as client:
        for num_floats in (10, 100_000, 10_000_000):
            client.create_queue(f"full-{num_floats}", like=row(num_floats), max_size=1).extend(
                row(num_floats).expand(1).clone()
            )
        client.create_queue("empty", like=ID, max_size=10)
        client.create_replay("few", like=ID, capacity=10, limiter=tdserve.MinSize(5))
        yield started


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["gloo", "shm"])
@pytest.mark.parametrize("kind", CALLS)
def test_call_when_it_ends_in_its_timeout_then_leases_and_session_stay(
    server: tdserve.Server, kind: str, transport: TransportName
) -> None:
    name = f"todo {kind} {transport}"
    with ExitStack() as stack:
        client = stack.enter_context(server.client(transport=transport))
        todo = client.create_queue(name, like=ID, max_size=100)
        todo.extend(IDS)
        taken = todo.take(4)
        rows = taken.__enter__()
        assert rows["id"].tolist() == [0, 1, 2, 3]
        session = client.session(Deadline.after(20.0))
        for _ in range(2):
            with pytest.raises(tdserve.DeadlineExceededError):
                CALLS[kind](client)
        assert client.session(Deadline.after(20.0)) is session
        other = stack.enter_context(server.client(transport="gloo"))
        assert other.queue(name).take(4, timeout_s=5.0, ack=False)["id"].tolist() == [4, 5, 6, 7]
        taken.__exit__(None, None, None)
        assert len(todo) == 4
        assert todo.extend(IDS).numel() == 8
