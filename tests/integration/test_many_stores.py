"""Very many small stores: few of them stay open or mapped, and a start and a crash keep them all."""

from __future__ import annotations

import os
import shutil
import signal
from contextlib import suppress
from itertools import count
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tests.memory import read_private_bytes
from tests.processes import wait_for

pytestmark = pytest.mark.integration

NUM_STORES = 1100
"""More than a server and a local client keep open."""


def make_item(number: int) -> TensorDict:
    """Returns the content of a store."""
    return TensorDict({"x": torch.full((8,), number)}, [])


def count_mapped(pid: int | str, root: Path) -> int:
    """Returns how many stores a process has mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return len({line.split("/stores/")[1].split("/")[0] for line in lines if f"{root}/stores/" in line})


@pytest.mark.full
def test_stores_when_there_are_very_many_then_few_stay_mapped_and_all_are_kept(tmp_path: Path) -> None:
    names, folder = [f"s{number:05d}" for number in range(NUM_STORES)], tmp_path / "stores"
    with tdserve.Server(tmp_path, sync_interval_s=0) as server, server.client(transport="shm") as client:
        for number, name in enumerate(names):
            client.init_remote(make_item(number), name)
        assert client.stores() == names
        assert list(folder.iterdir()) == [], "nobody has used them"
        for number, name in enumerate(names):
            assert client.from_remote_init(name)["x"].tolist() == [number] * 8
        client.send(make_item(7), names[0])  # opened again
        assert count_mapped(server.pid, tmp_path) <= 1024
        assert count_mapped("self", tmp_path) <= 512
    with tdserve.Server(tmp_path) as server, server.client() as client:
        assert client.stores() == names
        assert client.from_remote_init(names[0])["x"].tolist() == [7] * 8
        assert client.from_remote_init(names[-1])["x"].tolist() == [NUM_STORES - 1] * 8
        for name in names[100:]:
            client.delete(name)
        assert client.stores() == names[:100]
        wait_for(lambda: sorted(path.name for path in folder.iterdir()) == names[:100] or None, "removed files")


@pytest.mark.full
@pytest.mark.timeout(900)
def test_memory_when_there_are_a_hundred_thousand_stores_then_each_takes_five_kilobytes_at_most(tmp_path: Path) -> None:
    num_stores = 100_000
    with tdserve.Server(tmp_path, sync_interval_s=0) as server, server.client(transport="shm") as client:
        client.init_remote(make_item(0), "s0")
        before_bytes = read_private_bytes(server.pid)
        for number in range(1, num_stores):
            client.init_remote(make_item(number), f"s{number}")
        assert read_private_bytes(server.pid) - before_bytes < 5000 * num_stores
    with tdserve.Server(tmp_path) as server, server.client(transport="shm") as client:
        assert len(client.stores()) == num_stores
        assert client.from_remote_init("s99999")["x"].tolist() == [99_999] * 8


@pytest.mark.full
@pytest.mark.parametrize("transport", ["gloo", "shm"])
def test_put_when_the_maps_of_all_keyed_stores_exceed_the_address_space_then_each_still_works(
    tmp_path: Path, transport: Any
) -> None:
    num_stores = 8 * (1 << 45) // min(max(shutil.disk_usage(tmp_path).total, 1 << 36), 1 << 40)
    with tdserve.Server(tmp_path) as server, server.client(transport=transport) as client:
        for number in range(num_stores):
            client.create_kv(f"kv{number}").put("number", number)
        for number in range(num_stores):
            assert client.kv(f"kv{number}")["number"] == number


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["gloo", "shm"])
def test_create_when_control_is_killed_then_each_store_is_whole_or_absent(tmp_path: Path, transport: Any) -> None:
    made: list[int] = []
    with tdserve.Server(tmp_path) as server, server.client(transport=transport, timeout_s=1.0) as client:

        def create() -> None:
            with suppress(tdserve.TDServeError):
                for number in count():
                    client.init_remote(make_item(number), f"s{number}")
                    made.append(number)

        creating = Thread(target=create, name="creating")
        creating.start()
        wait_for(lambda: len(made) > 100 or None, "a hundred stores")
        os.kill(server.pid, signal.SIGKILL)
        creating.join(60.0)
        assert not creating.is_alive()
    with tdserve.Server(tmp_path) as server, server.client(transport=transport) as client:
        found = {int(name[1:]) for name in client.stores()}
        assert set(made) <= found <= {*made, len(made)}
        for number in found:
            assert client.from_remote_init(f"s{number}")["x"].tolist() == [number] * 8
