from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tdserve.server.sessions.clients import Clients

ANN, BOB = b"ann", b"bob"
KEEP_S = 600.0


class SteppedLoop(asyncio.SelectorEventLoop):
    """An event loop whose time a test sets."""

    now_s = 0.0

    def time(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        """Advances the time of the loop."""
        self.now_s += seconds
        self.run_until_complete(asyncio.sleep(0))


class Kept:
    """What is kept for clients.

    Attributes:
        forgotten: Who was forgotten, in order.
    """

    def __init__(self, *client_ids: bytes) -> None:
        self._client_ids = set(client_ids)
        self.forgotten: list[bytes] = []

    def list_clients(self) -> set[bytes]:
        return self._client_ids

    def forget_client(self, client_id: bytes) -> None:
        self.forgotten.append(client_id)


class World:
    """Clients whose forgetting is noted in two places."""

    def __init__(self, loop: SteppedLoop) -> None:
        self.loop = loop
        self.kept = Kept(ANN), Kept(ANN, BOB)
        self.clients = Clients(KEEP_S, self.kept)

    @property
    def forgotten(self) -> list[bytes]:
        """Who was forgotten, in order."""
        first, second = self.kept
        assert first.forgotten == second.forgotten
        return first.forgotten

    def do(self, *steps: str, client_id: bytes = ANN) -> None:
        """Runs calls about a client's sessions on the loop."""

        async def tell() -> None:
            for step in steps:
                getattr(self.clients, f"on_{step}")(client_id)

        self.loop.run_until_complete(tell())


@pytest.fixture
def world() -> Iterator[World]:
    loop = SteppedLoop()
    yield World(loop)
    loop.close()


def test_on_ended_when_the_client_stays_away_then_forgotten_once(world: World) -> None:
    world.do("opened", "ended")
    world.loop.advance(KEEP_S - 1.0)
    assert world.forgotten == []
    world.loop.advance(2.0)
    world.loop.advance(10 * KEEP_S)
    assert world.forgotten == [ANN]


def test_on_ended_when_the_client_was_back_meanwhile_then_its_time_counts_from_the_last_end(world: World) -> None:
    world.do("opened", "ended")
    world.loop.advance(KEEP_S - 1.0)
    world.do("opened", "ended")
    world.loop.advance(KEEP_S - 1.0)
    assert world.forgotten == []
    world.loop.advance(2.0)
    assert world.forgotten == [ANN]


def test_on_opened_when_the_older_session_ends_later_then_the_client_is_here(world: World) -> None:
    world.do("opened", "opened", "ended")
    world.loop.advance(10 * KEEP_S)
    assert world.forgotten == []
    world.do("ended")
    world.loop.advance(KEEP_S + 1.0)
    assert world.forgotten == [ANN]


def test_restore_when_the_server_starts_then_each_has_all_its_time_and_returning_clients_stay(world: World) -> None:
    async def restore() -> None:
        world.clients.restore()

    world.loop.run_until_complete(restore())
    world.loop.advance(KEEP_S - 1.0)
    world.do("opened", client_id=BOB)
    world.loop.advance(2.0)
    assert world.forgotten == [ANN]
