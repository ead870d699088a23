"""A root whose server was killed in the middle of writes: `tdserve check` finds no damage where there is none."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

import tdserve
from tdserve.base.errors import TDServeError
from tdserve.server.checking.root_check import check_root
from tests.processes import is_gone, wait_for

pytestmark = pytest.mark.integration

NUM_ROWS = 64


def make_rows() -> TensorDict:
    rows = TensorDict({"x": torch.rand(NUM_ROWS, 8)}, [NUM_ROWS])
    rows["t"] = NonTensorStack(*(f"text {number}" for number in range(NUM_ROWS)))
    return rows


def write(client: tdserve.Client, stop: Event, counts: list[int]) -> None:
    """Writes to every kind of store until the server is gone."""
    rows, plain = make_rows(), make_rows().exclude("t")
    synced = client.create_replay("synced", rows[0], 256, durability="disk", checksum=True, exists_ok=True)
    table = client.create_replay("table", plain[0], 256, exists_ok=True)
    client.init_remote(rows, "td", exists_ok=True)
    entries = client.create_kv("kv", max_bytes=1 << 20, eviction="lru", exists_ok=True)
    number = 0
    try:
        while not stop.is_set():
            synced.extend(rows)
            table.extend(plain)
            client["td"].set_at_("x", torch.rand(8), number % NUM_ROWS)
            entries.put([str(number % 100), "other"], torch.rand(2, 5))
            client.publish("w", TensorDict({"w": torch.rand(100)}, []))
            number += 1
            counts[0] = number
    except TDServeError:
        return


def kill_amid_writes(root: Path, transport: Any) -> None:
    """Serves a root, and kills the control process while a client writes to it."""
    with tdserve.Server(root, port=0) as server:
        client = server.client(transport=transport, timeout_s=30.0)
        stop, counts = Event(), [0]
        writer = Thread(target=write, args=(client, stop, counts))
        writer.start()
        try:
            wait_for(lambda: counts[0] >= 20, "writes", timeout_s=120.0)
            os.kill(server.pid, signal.SIGKILL)
        finally:
            stop.set()
            client.close()  # its calls under way end
            writer.join()


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["gloo", "shm"])
@pytest.mark.once("shm")
def test_root_when_its_server_was_killed_amid_writes_then_nothing_is_damaged(tmp_path: Path, transport: Any) -> None:
    root = tmp_path / "root"
    for round_number in range(2):
        kill_amid_writes(root, transport)
        report = check_root(root)
        assert [each.describe() for each in report.findings if each.is_damage] == [], f"round {round_number}"
        assert not report.is_orderly
        assert report.progress.num_stores == 5
    assert check_root(root, repairs=True).num_damaged == 0
    with tdserve.Server(root, port=0) as server, server.client(transport=transport, timeout_s=30.0) as client:
        assert client.replay("synced").sample(64).batch_size == (64,)
    report = check_root(root)
    assert (report.num_damaged, report.is_orderly) == (0, True)


@pytest.mark.slow
def test_tables_when_their_files_are_older_than_the_catalog_then_a_check_counts_what_is_gone(tmp_path: Path) -> None:
    root, row = tmp_path / "root", TensorDict({"x": torch.zeros(100)})
    with tdserve.Server(root) as server, server.client() as client:
        for name in ("older", "taken"):
            client.create_queue(name, like=row, max_size=1000).extend(row.expand(500).contiguous())
    shutil.copytree(root / "stores", tmp_path / "stores")
    server = tdserve.Server(root, sync_interval_s=0)
    with server.start(), server.client() as client:
        for name in ("older", "taken"):
            client.queue(name).extend(row.expand(400).contiguous())
        with client.queue("taken").take(900):
            pass
        pid = server.pid
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: is_gone(pid) or None, "the end of the server")
    assert check_root(root).num_damaged == 0
    shutil.rmtree(root / "stores/older")
    shutil.copytree(tmp_path / "stores/older", root / "stores/older")
    for repairs in (False, True):
        (found,) = check_root(root, repairs=repairs).findings
        assert (found.store, found.repaired) == ("older", "")
        assert "the last 400 rows written are not there" in found.reason


@pytest.mark.slow
@pytest.mark.parametrize("is_header_alone", [True, False])
def test_repair_when_generations_are_damaged_then_keeps_them_or_names_what_is_lost(
    tmp_path: Path, is_header_alone: bool
) -> None:
    root, row = tmp_path / "root", TensorDict({"x": torch.zeros(3)}, [])
    with tdserve.Server(root) as server, server.client() as client:
        client.create_replay("table", like=row, capacity=100).extend(row.expand(10).contiguous())
    server = tdserve.Server(root, sync_interval_s=0)
    with server.start(), server.client() as client:
        client.replay("table").extend(row.expand(10).contiguous())
        pid = server.pid
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: is_gone(pid) or None, "the end of the server")
    path = root / "stores/table/generation.memmap"
    content = path.read_bytes()
    path.write_bytes(b"\xff" * 8 + content[8:] if is_header_alone else bytes(len(content)))
    report = check_root(root, repairs=True)
    (found,) = report.findings
    lost = "rows of store 'table' that were written after the last sync"
    assert ([*found.losses], report.num_damaged) == (([], 0) if is_header_alone else ([lost], 1))
    with tdserve.Server(root) as server, server.client() as client:
        assert len(client.replay("table")) == (20 if is_header_alone else 10)
