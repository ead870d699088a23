"""A data worker that hangs is replaced, and its clients' calls end within seconds."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.base.config import TransportName
from tests.processes import is_gone, ready_worker, wait_for

pytestmark = pytest.mark.integration

ROWS = TensorDict({"x": torch.arange(100_000.0)}, [100_000])


@pytest.mark.slow
@pytest.mark.once("gloo")
@pytest.mark.parametrize("transport", ["gloo", "shm"])
def test_worker_when_it_is_stopped_then_it_is_replaced_and_calls_go_on(
    tmp_path: Path, transport: TransportName
) -> None:
    with (
        tdserve.Server(tmp_path / "root", worker_timeout_s=3.0) as server,
        server.client(transport=transport, timeout_s=60.0) as client,
    ):
        client.init_remote(ROWS, "store")
        replay = client.create_replay("replay", like=ROWS[0], capacity=200_000)
        replay.extend(ROWS)
        hung = ready_worker(client)["pid"]
        os.kill(hung, signal.SIGSTOP)
        began_s = time.monotonic()
        with ThreadPoolExecutor(3) as threads:
            calls = [
                threads.submit(lambda: len(replay.extend(ROWS))),
                threads.submit(lambda: len(client.from_remote_init("store"))),
                threads.submit(lambda: len(replay.sample(100_000))),
            ]
            assert [call.result() for call in calls] == [100_000] * 3
        if transport == "gloo":
            assert time.monotonic() - began_s < 30.0
        wait_for(lambda: is_gone(hung), "the end of the stopped data worker")
        wait_for(lambda: client.stats()["workers"][0]["is_ready"], "the next data worker")
        assert client.stats()["workers"][0]["pid"] != hung
        assert len(replay) == 200_000
