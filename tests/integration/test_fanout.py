"""Weights that clients pass on: there are many pullers, and the server sends each version only a few times."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

import tdserve
from tests.integration.fanout_roles import weights
from tests.integration.forked_clients import Child, ForkedClients
from tests.processes import wait_for

pytestmark = pytest.mark.integration

NUM_PULLERS = 16
FANOUT = 4
NBYTES = 8 * 1024 * 1024
MAX_PULL_S = 20.0
"""Time for a puller whose relay is stopped: three seconds to connect, or two without content, on a busy machine."""


@pytest.fixture(scope="module")
def forked_clients() -> Iterator[ForkedClients]:
    """Starts light processes; all end with the module."""
    with ForkedClients("tests.integration.fanout_roles") as started:
        yield started


@pytest.fixture(scope="module")
def publisher(server: tdserve.Server) -> Iterator[tdserve.Client]:
    """A client on the server's machine, whose content does not count as gloo traffic."""
    with server.client(transport="shm") as client:
        yield client


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """Name of the test's weights."""
    return f"fanout-{id(request.node):x}"


def pullers(
    stack: ExitStack, forked_clients: ForkedClients, client: tdserve.Client, name: str, num_pullers: int, **named: int
) -> list[Child]:
    """Starts processes that are connected."""
    found = [forked_clients.start("pull", client.address, name, NBYTES, **named) for _ in range(num_pullers)]
    for child in found:
        assert stack.enter_context(child).line() == "connected"
    return found


def pull(children: list[Child], version: int) -> list[float]:
    """Lets all pullers get a version, and checks every byte; returns how many seconds each took."""
    for child in children:
        child.signal(signal.SIGUSR1)
    took_s = []
    for child in children:
        said, number, is_equal, seconds = child.line().split()
        assert (said, number, is_equal) == ("version", str(version), "True")
        took_s.append(float(seconds))
    return took_s


class Traffic:
    """Counts the whole versions that have gone over gloo since this object was made."""

    def __init__(self, client: tdserve.Client) -> None:
        self._client = client
        self._before = self._counts()

    def _counts(self) -> tuple[float, float]:
        found = self._client.stats()["transports"].get("gloo", {"bytes_out": 0, "bytes_relayed": 0})
        return found["bytes_out"] / NBYTES, found["bytes_relayed"] / NBYTES

    @property
    def from_server(self) -> float:
        """Returns how many versions the server has sent."""
        return self._counts()[0] - self._before[0]

    @property
    def relayed(self) -> float:
        """Returns how many versions clients have sent to clients."""
        return self._counts()[1] - self._before[1]

    def wait_relayed(self, num_versions: float) -> None:
        """Waits until clients have reported so many relayed versions."""
        wait_for(lambda: self.relayed >= num_versions, f"{num_versions} versions from client to client")


@pytest.mark.slow
def test_pull_when_sixteen_processes_do_then_the_server_sends_each_version_a_few_times(
    publisher: tdserve.Client, forked_clients: ForkedClients, name: str
) -> None:
    with ExitStack() as stack:
        children = pullers(stack, forked_clients, publisher, name, NUM_PULLERS)
        for version in (1, 2):
            traffic = Traffic(publisher)
            publisher.publish(name, weights(version, NBYTES), fanout=FANOUT if version == 1 else 0)
            pull(children, version)
            assert traffic.from_server <= FANOUT + 1.01
            traffic.wait_relayed(NUM_PULLERS - FANOUT - 1)
        assert publisher.describe(name).fanout == FANOUT


@pytest.mark.slow
@pytest.mark.parametrize("strike", [signal.SIGKILL, signal.SIGSTOP])
def test_pull_when_a_relay_is_struck_in_the_middle_then_all_others_get_it_whole_and_in_time(
    publisher: tdserve.Client, forked_clients: ForkedClients, name: str, strike: signal.Signals
) -> None:
    with ExitStack() as stack:
        children = pullers(stack, forked_clients, publisher, name, NUM_PULLERS - 1)
        (relay,) = pullers(stack, forked_clients, publisher, name, 1, strikes=strike)
        traffic = Traffic(publisher)
        publisher.publish(name, weights(1, NBYTES), fanout=FANOUT)
        pull([relay], 1)  # from the server, and kept
        assert max(pull(children, 1)) < MAX_PULL_S
        if strike == signal.SIGKILL:
            relay.wait_killed()
        else:
            relay.wait_stopped()
        assert traffic.from_server <= FANOUT + 1.01
        publisher.publish(name, weights(2, NBYTES))
        pull(children, 2)
