"""Random schedules: clients use a store while connections are lost, data workers die, the server crashes at any
failpoint, and the disk is full now and then. Then nothing fails any more, and what is left is checked."""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from pathlib import Path

from tests.simulation.calls import Calls
from tests.simulation.models import KeyedModel, NamesModel, SlotsModel, StoreModel, WeightsModel
from tests.simulation.row_models import ConsumersModel, QueueModel, TableModel
from tests.simulation.simulated_client import SimulatedClient
from tests.simulation.simulated_server import SimulatedServer
from tests.simulation.virtual_time import VirtualLoop, chance, clock, pause

MODELS: tuple[type[StoreModel], ...] = (
    TableModel,
    TableModel,
    QueueModel,
    ConsumersModel,
    WeightsModel,
    KeyedModel,
    SlotsModel,
    NamesModel,
)
"""The stores of schedules, in turn."""

NUM_CLIENTS = 3
NUM_CALLS = 6
"""Calls of each client in one schedule."""

CRASH_SHARES = (0.0, 0.01, 0.03)
CUT_SHARE = 0.1
WORKER_SHARE = 0.02
FULL_SHARES = (0.0, 0.0, 0.05)

END_S = 600.0
"""Time of the simulation within which a schedule must have ended: longer than any of its waits."""


class Schedule:
    """One schedule.

    Args:
        server: The server, which is up.
        number: Its number on this server.
        model: The kind of its store.
    """

    def __init__(self, server: SimulatedServer, number: int, model: type[StoreModel], events: Counter[str]) -> None:
        self._server = server
        self._calls = Calls()
        self._events = events
        self._model = model(f"store-{number}", chance, self._calls)
        self._clients = [self._make_client() for _ in range(NUM_CLIENTS)]

    def _make_client(self) -> SimulatedClient:
        return SimulatedClient(self._server, chance, chance.randbytes(16))

    async def run(self) -> None:
        """Runs it. Raises AssertionError if an answer is wrong."""
        server, model = self._server, self._model
        await model.prepare(self._clients[0])
        server.crash_share = chance.choice(CRASH_SHARES)
        server.full_share = chance.choice(FULL_SHARES)
        over = asyncio.Event()
        disturbing = asyncio.create_task(self._disturb(over))
        try:
            await asyncio.gather(*(self._act(place) for place in range(NUM_CLIENTS)))
        finally:
            over.set()
            await disturbing
            server.crash_share = server.full_share = 0.0
        await server.wait_up()
        if not model.outlasts_clients:
            self._cut_all()
        checker = self._make_client()
        await model.finish(checker)
        self._cut_all()
        await model.delete(checker)
        checker.cut()

    def _cut_all(self) -> None:
        for client in self._clients:
            client.cut()

    async def _act(self, place: int) -> None:
        for _ in range(NUM_CALLS):
            await pause(self._server.choose_delay_s())
            await self._model.act(self._clients[place])
            if chance.random() < CUT_SHARE / 4:  # its process dies, and another one comes
                self._clients[place].cut()
                self._clients[place] = self._make_client()
                self._events["client died"] += 1

    async def _disturb(self, over: asyncio.Event) -> None:
        while not over.is_set():
            await pause(0.2 * chance.random())
            if chance.random() < CUT_SHARE:
                chance.choice(self._clients).cut()
                self._events["link cut"] += 1
            if chance.random() < WORKER_SHARE:
                self._server.kill_worker()
                self._events["worker died"] += 1
            if chance.random() < self._server.crash_share:
                self._server.crash("between two steps")


async def _run_root(folder: Path, first: int, num_schedules: int) -> dict[str, Counter[str]]:
    server = SimulatedServer(folder, chance)
    events: Counter[str] = Counter()
    await server.start()
    for number in range(num_schedules):
        schedule = Schedule(server, number, MODELS[(first + number) % len(MODELS)], events)
        await asyncio.wait_for(schedule.run(), END_S)
        if server.failure is not None:
            raise server.failure
    await server.stop()
    events["calls"] = server.num_calls
    return {"crashes": server.num_crashes, "full disks": server.num_full, "reached": server.reached, "events": events}


def run_root(folder: Path, seed: int, num_schedules: int) -> dict[str, Counter[str]]:
    """Runs the schedules of a seed in an empty folder, which is removed; returns what happened.

    Raises:
        Exception: An answer was wrong, or something never ended.
    """
    chance.seed(seed)
    clock.now_s = 0.0
    loop = VirtualLoop(lambda: chance.random() ** 4 * 0.02)
    asyncio.set_event_loop(loop)
    folder.mkdir()
    try:
        counts: dict[str, Counter[str]] = loop.run_until_complete(
            _run_root(folder, seed * num_schedules, num_schedules)
        )
        return counts
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
        shutil.rmtree(folder, ignore_errors=True)
