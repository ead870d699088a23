"""Leases that last for a limited time (``lease_s``): over a restart and a checkpoint, and with consumers that hang.
Tests that every transport passes are in ``tests/conformance/limited_leases_suite.py``."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tdserve
from tests.integration.crashing import Crashing
from tests.integration.numbered_rows import numbers, rows
from tests.processes import wait_for

pytestmark = pytest.mark.integration

SHORT_S = 0.05
LONG_S = 3600.0
WAIT_S = 60.0


def test_take_when_a_thread_hangs_and_its_client_stays_then_each_row_is_consumed_once(
    server: tdserve.Server, client: tdserve.Client, name: str
) -> None:
    queue = client.create_queue(name, rows(0)[0], 100)
    queue.extend(rows(*range(50)))
    queue.close()
    may_go_on, hangs = threading.Event(), threading.Event()
    late: list[type] = []

    def hang() -> None:
        with server.client() as hung:
            taken = hung.queue(name).take(10, lease_s=0.5)
            assert len(taken.rows) == 10
            hangs.set()
            may_go_on.wait(WAIT_S)
            try:
                taken.ack()
            except tdserve.WrongStateError as error:
                late.append(type(error))

    thread = threading.Thread(target=hang)
    thread.start()
    assert hangs.wait(WAIT_S)
    found = [number for batch in queue.batches(8, timeout_s=WAIT_S) for number in numbers(batch)]
    may_go_on.set()
    thread.join(WAIT_S)
    assert sorted(found) == [*range(50)]
    assert late == [tdserve.WrongStateError]


@pytest.mark.slow
def test_take_when_the_server_restarts_then_the_rows_are_free_at_once_and_no_lease_of_before_ends_another(
    tmp_path: Path,
) -> None:
    with Crashing(tmp_path) as crashing, crashing.server.client(timeout_s=WAIT_S) as client:
        queue: Any = client.create_queue("work", rows(0)[0], 12)
        queue.extend(rows(*range(4)))
        held = queue.take(4, lease_s=LONG_S)
        crashing.restart()
        again = queue.take(4, ack=False)
        assert numbers(again) == [0, 1, 2, 3]
        for call in (held.ack, held.renew):
            with pytest.raises(tdserve.WrongStateError):
                call()
        queue.ack(again)
        assert len(queue) == 0


@pytest.mark.slow
def test_take_when_a_checkpoint_is_made_then_the_lease_goes_on_and_what_comes_back_has_none(
    tmp_path: Path,
) -> None:
    with tdserve.Server(tmp_path / "root").start() as server, server.client() as client:
        queue: Any = client.create_queue("work", rows(0)[0], 12)
        queue.extend(rows(*range(4)))
        held = queue.take(2, lease_s=LONG_S)
        client.checkpoint(str(tmp_path / "copy"))
        held.renew(SHORT_S)
        assert numbers(queue.take(4, ack=False, timeout_s=WAIT_S)) == [0, 1, 2, 3]
        client.restore(str(tmp_path / "copy"), prefix="copy-")
        assert numbers(client.queue("copy-work").take(4, ack=False)) == [0, 1, 2, 3]


def test_take_when_its_task_hangs_then_another_task_has_the_rows(server: tdserve.Server, name: str) -> None:
    async def run() -> None:
        async with tdserve.aio.connect(server.address) as client:
            queue = await client.create_queue(name, rows(0)[0], 12)
            await queue.extend(rows(*range(4)))
            taken = await queue.take(4, lease_s=LONG_S)
            await taken.renew(SHORT_S)
            async with queue.take(4, timeout_s=WAIT_S) as batch:
                assert numbers(batch) == [0, 1, 2, 3]
                with pytest.raises(tdserve.WrongStateError):
                    await taken.ack()

    asyncio.run(run())


def test_take_when_its_block_or_loop_is_a_task_then_renewed_by_the_call_that_opened_it(
    server: tdserve.Server, name: str
) -> None:
    async def run() -> None:
        async with tdserve.aio.connect(server.address) as client:
            queue = await client.create_queue(name, rows(0)[0], 12)
            await queue.extend(rows(*range(4)))
            opening = queue.take(1)
            with pytest.raises(AttributeError, match="renew"):
                opening.renew()
            opening.close()
            async with (taken := queue.take(2, lease_s=np.float32(SHORT_S * 100))) as batch:
                await taken.renew(LONG_S)
                assert numbers(batch) == [0, 1]
            async for batch in (batches := queue.batches(2, lease_s=LONG_S)):
                await batches.renew()
                assert numbers(batch) == [2, 3]
                break

    asyncio.run(run())


def test_take_when_its_result_is_dropped_after_a_renewal_then_the_rows_are_free(
    client: tdserve.Client, name: str
) -> None:
    queue = client.create_queue(name, rows(0)[0], 12)
    queue.extend(rows(*range(4)))
    taken = queue.take(4, lease_s=LONG_S)
    taken.renew()
    del taken
    wait_for(lambda: queue.info()["num_leased"] == 0, "the rows to be given back")
