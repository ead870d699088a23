"""A page at which LMDB ends the process that writes: the worker ends once, and serves everything else from then on."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

import tdserve
from tdserve.server.checking.root_check import check_root
from tdserve.store.database.environments import DATA_FILE
from tdserve.store.roots.run_record import RunRecord
from tdserve.store.values.object_folders import get_folder
from tests.damaged_pages import (
    change_order,
    cut_to_first_pages,
    damage_free_pages,
    damage_table,
    damage_tables,
    make_branch_of_one,
    shorten_root,
)
from tests.processes import START_TIMEOUT_S, wait_for

pytestmark = [pytest.mark.integration, pytest.mark.slow]

NUM_ROWS = 40


def make_rows(num_rows: int, *, length: int) -> TensorDict:
    texts = NonTensorStack(*(NonTensorData("x" * (length + row % 7)) for row in range(num_rows)))
    return TensorDict({"x": torch.arange(num_rows), "text": texts}, [num_rows])


@pytest.mark.parametrize("transport", ["gloo", "grpc"])
def test_worker_when_a_damaged_page_ends_it_then_next_one_refuses_the_store_and_serves_others(
    tmp_path: Path, transport: Any
) -> None:
    with tdserve.Server(tmp_path, num_workers=1) as server:
        with server.client(transport=transport) as client:
            for name in ("damaged", "whole"):
                client.create_replay(name, make_rows(1, length=20)[0], capacity=NUM_ROWS).extend(
                    make_rows(NUM_ROWS, length=20)
                )
        server.shutdown()
        damage_free_pages(get_folder(tmp_path / "stores" / "damaged", 0) / DATA_FILE)
        server.start()
        with server.client(transport=transport) as client:
            damaged, whole = (client.replay(name) for name in ("damaged", "whole"))
            for _ in range(2):
                with pytest.raises(
                    tdserve.CorruptDataError, match=r"page \d+ .*; stop the server, and see `tdserve check`"
                ):
                    damaged.extend(make_rows(8, length=700), timeout_s=START_TIMEOUT_S)
            whole.extend(make_rows(8, length=700))
            assert whole.sample(8).shape == (8,)
            assert client.stats()["workers"][0]["num_restarts"] == 1
        server.shutdown()
        assert [each.store for each in check_root(tmp_path, repairs=True).findings if each.repaired] == ["damaged"]
        server.start()
        with server.client(transport=transport) as client:
            client.replay("damaged").extend(make_rows(8, length=700), timeout_s=START_TIMEOUT_S)


def make_entries(server: tdserve.Server, num: int, **options: Any) -> None:
    """Puts entries, and kills the server, so that there is no copy of a last sync to put back."""
    with server.client(transport="gloo") as client:
        client.create_kv("entries", **options).update(
            {str(number): {"x": torch.tensor(number)} for number in range(num)}
        )
    os.kill(server.pid, signal.SIGKILL)
    wait_for(lambda: not server.is_alive, "the end of the control process")
    server.shutdown()


def test_put_when_the_counters_of_a_keyed_store_cannot_be_found_then_refused_and_no_version_is_used_again(
    tmp_path: Path,
) -> None:
    with tdserve.Server(tmp_path, num_workers=1) as server:
        make_entries(server, 40)
        damage_table(get_folder(tmp_path / "stores" / "entries", 0) / DATA_FILE, "counters")
        server.start()
        with server.client(transport="gloo") as client:
            for _ in range(2):
                with pytest.raises(tdserve.CorruptDataError, match="`tdserve check`"):
                    client.kv("entries").put("new", {"x": torch.tensor(1)})


@pytest.mark.parametrize("damage", [cut_to_first_pages, make_branch_of_one], ids=["SIGBUS", "SIGABRT"])
def test_keyed_store_when_its_tables_are_damaged_then_the_control_process_goes_on(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    with tdserve.Server(tmp_path, num_workers=1) as server:
        make_entries(server, 40)
        damage(get_folder(tmp_path / "stores" / "entries", 0) / DATA_FILE)
        server.start()
        pid = server.pid
        with server.client(transport="gloo") as client:
            entries = client.kv("entries")
            for _ in range(2):
                with pytest.raises(tdserve.CorruptDataError):
                    entries.get("7", timeout_s=START_TIMEOUT_S)
            client.create_kv("others").put("a", {"x": torch.tensor(1)})
            assert [each.name for each in map(client.describe, client.stores())] == ["entries", "others"]
        assert server.pid == pid


def test_start_when_the_copy_of_the_last_sync_is_damaged_then_others_are_served_after_a_loss_of_power(
    tmp_path: Path,
) -> None:
    with tdserve.Server(tmp_path, num_workers=1) as server:
        with server.client(transport="gloo") as client:
            for name in ("damaged", "whole"):
                client.create_kv(name).put("a", {"x": torch.tensor(7)})
        server.shutdown()
        make_branch_of_one(tmp_path / "stores/damaged/synced-values" / DATA_FILE)
        RunRecord(tmp_path).note_lost_power()
        server.start()
        with server.client(transport="gloo") as client:
            assert client.kv("whole").get("a")["x"] == 7
            with pytest.raises(tdserve.CorruptDataError):
                client.kv("damaged").put("b", {"x": torch.tensor(1)})


def test_repair_when_a_branch_leads_to_fewer_entries_then_their_number_is_reported(tmp_path: Path) -> None:
    with tdserve.Server(tmp_path, num_workers=1) as server:
        make_entries(server, 2000)
        shorten_root(get_folder(tmp_path / "stores" / "entries", 0) / DATA_FILE, "entries")
        (found,) = check_root(tmp_path).findings
        assert "records can be read of 2000" in found.reason
        (repaired, *_) = check_root(tmp_path, repairs=True).findings
        server.start()
        with server.client(transport="gloo") as client:
            num_gone = 2000 - len(client.kv("entries"))
        assert num_gone > 0
        assert f"{num_gone} others could not be found and are gone" in repaired.repaired


@pytest.mark.parametrize("table", ["ages", "counters", "expiries"])
def test_repair_when_a_table_that_follows_from_the_entries_is_damaged_then_made_anew_and_nothing_is_lost(
    tmp_path: Path, table: str
) -> None:
    with tdserve.Server(tmp_path, num_workers=1) as server:
        make_entries(server, 400, max_bytes=1 << 20, eviction="lru", ttl_s=600)
        damage_table(get_folder(tmp_path / "stores" / "entries", 0) / DATA_FILE, table)
        (found, *_) = check_root(tmp_path, repairs=True).findings
        assert table in found.reason
        assert check_root(tmp_path).num_damaged == 0
        server.start()
        with server.client(transport="gloo") as client:
            entries = client.kv("entries")
            assert len(entries) == 400
            kept, num_put = list(range(400)), 0
            while len(kept) == 400:
                num_put += 1
                assert entries.put(f"large{num_put}", {"x": torch.zeros(1 << 14, dtype=torch.uint8)}) > 400
                kept = sorted(int(key) for key in entries if key.isdecimal())
            assert len(kept) > 0
            assert kept == [*range(400 - len(kept), 400)], "the oldest were evicted"


def test_store_when_its_record_has_another_order_of_keys_then_refused_and_a_repair_keeps_all(tmp_path: Path) -> None:
    with tdserve.Server(tmp_path, num_workers=1) as server:
        make_entries(server, 400)
        change_order(get_folder(tmp_path / "stores" / "entries", 0) / DATA_FILE, "entries")
        server.start()
        with server.client(transport="gloo") as client, pytest.raises(tdserve.CorruptDataError, match="order"):
            client.checkpoint(str(tmp_path.with_suffix(".copy")))
        server.shutdown()
        assert check_root(tmp_path, repairs=True).num_damaged == 0
        server.start()
        with server.client(transport="gloo") as client:
            entries = client.kv("entries")
            assert len(entries) == 400
            assert [int(entries.get(str(number))["x"]) for number in range(400)] == [*range(400)]


def test_syncs_when_a_page_of_one_store_is_damaged_then_others_reach_the_disk_and_the_end_is_no_crash(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = make_rows(8, length=20)
    with tdserve.Server(tmp_path, num_workers=1, sync_interval_s=600) as server:  # no pass comes by itself
        with server.client(transport="gloo") as client:
            client.create_replay("damaged", rows[0], capacity=NUM_ROWS).extend(rows)
            client.create_replay("whole", rows[0], capacity=NUM_ROWS, durability="disk").extend(rows)
        server.shutdown()
        server.start()
        with server.client(transport="gloo") as client:
            for _ in range(4):
                client.replay("damaged").extend(rows)
        os.kill(server.pid, signal.SIGKILL)
        wait_for(lambda: not server.is_alive, "the end of the control process")
        server.shutdown()
        damage_free_pages(get_folder(tmp_path / "stores" / "damaged", 0) / DATA_FILE)
        server.start()
        with server.client(transport="gloo") as client:
            client.replay("whole").extend(rows, timeout_s=START_TIMEOUT_S)
        server.shutdown()
    shown = capfd.readouterr().err
    assert "a store could not be synced at the end" in shown
    assert "damaged/objects/data.mdb" in shown
    assert "not everything could be synced" not in shown


@pytest.mark.parametrize("damage", [damage_free_pages, damage_tables])
def test_checkpoint_when_a_page_is_damaged_then_names_the_store_and_the_server_goes_on(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    root, place = tmp_path / "root", str(tmp_path / "checkpoint")
    with tdserve.Server(root, num_workers=1) as server:
        with server.client(transport="gloo") as client:
            for name in ("damaged", "whole"):
                client.create_replay(name, make_rows(1, length=20)[0], capacity=NUM_ROWS).extend(
                    make_rows(NUM_ROWS, length=20)
                )
        server.shutdown()
        damage(get_folder(root / "stores" / "damaged", 0) / DATA_FILE)
        server.start()
        with server.client(transport="gloo") as client:
            for _ in range(2):
                with pytest.raises(tdserve.CorruptDataError, match=r"damaged/objects.* page \d+ .*`tdserve check`"):
                    client.checkpoint(place)
            client.delete("damaged")
            client.checkpoint(place)
