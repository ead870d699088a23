"""Stores that have moved, and that nobody has used since, are synced where they are now."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.store.disk.checked_json import encode_checked
from tdserve.store.durability.watermark import FILE_NAME as SYNCED_FILE
from tests.integration.cluster.names import name_owned_by
from tests.processes import quiet_port, wait_for

pytestmark = pytest.mark.integration

NUM_ROWS = 2000


@pytest.mark.slow
def test_moved_stores_when_the_power_is_lost_then_all_that_was_synced_is_there(tmp_path: Path) -> None:
    rows = TensorDict({"x": torch.randn(NUM_ROWS, 30), "number": torch.arange(NUM_ROWS)}, [NUM_ROWS])
    source = tdserve.Server(tmp_path / "source", port=quiet_port(), sync_interval_s=3600.0)  # it never syncs them
    target = tdserve.Server(tmp_path / "target", port=quiet_port(), sync_interval_s=3600.0)
    with source, target, tdserve.connect(f"{source.address},{target.address}", timeout_s=60.0) as client:
        assert isinstance(client, tdserve.ClusterClient)
        stored, table, queue = (name_owned_by(0, 2) for _ in range(3))
        client.init_remote(rows, stored, checksum=True)
        client.create_replay(table, rows[0], NUM_ROWS).extend(rows)
        client.create_queue(queue, rows[0], NUM_ROWS).extend(rows[:100])
        for name in (stored, table, queue):
            client.rebalance(name, 1)
        folders = [tmp_path / "target" / "stores" / name for name in (stored, table, queue)]
        wait_for(lambda: all((folder / SYNCED_FILE).exists() for folder in folders), "a sync of stores at rest")
        with target.client() as other:  # its answer waits for a sync, which begins after that of the stores
            other.init_remote(rows[0], "synced", durability="disk")
        os.kill(target.pid, signal.SIGKILL)
        wait_for(lambda: not target.is_alive, "the end of the server")
        lost = encode_checked({"boot_id": "of another start of the machine", "is_synced": False})
        (tmp_path / "target" / "run.json").write_bytes(lost)
        target.start()
        assert (client.from_remote_init(stored) == rows).all()
        assert sorted(client.replay(table)[:]["number"].tolist()) == list(range(NUM_ROWS))
        assert len(client.queue(queue)) == 100
