"""Keyed stores whose catalog is lost, or goes back to the last sync: their entries have files of their own."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from tensordict import TensorDict

import tdserve
from tdserve.base.machine import read_boot_id
from tdserve.cli.serving.check_root import check
from tdserve.cli.shell.exit_codes import DAMAGED
from tdserve.store.database.catalog_db import CatalogDB, Table
from tdserve.store.disk.checked_json import encode_checked
from tdserve.store.roots.record_file import FILE_NAME as RECORD_FILE
from tests.processes import is_gone, wait_for

pytestmark = pytest.mark.integration

ENTRIES = {f"key {number}": number for number in range(20)}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root whose server has ended in order after its first pass over a keyed store."""
    root = tmp_path / "root"
    server = tdserve.Server(root, sync_interval_s=0)
    with server.start(), server.client() as client:
        client.create_kv("entries").put(list(ENTRIES), list(ENTRIES.values()))
        client.create_kv("unused")
        client.create_kv("replaced")
    return root


def read_entries(root: Path, name: str = "entries") -> dict[str, int]:
    with tdserve.Server(root, sync_interval_s=0).start() as server, server.client() as client:
        entries = client.kv(name)
        return {key: entries[key] for key in entries.keys()}  # noqa: SIM118 (not a dict)


def overwrite(folder: Path) -> None:
    (folder / "data.mdb").write_bytes(bytes(1 << 16))


@pytest.mark.slow
@pytest.mark.parametrize("damage", [overwrite, shutil.rmtree])
def test_catalog_when_lost_after_an_orderly_end_then_a_repair_loses_no_entry(
    root: Path, damage: Callable[[Path], None], capfd: pytest.CaptureFixture[str]
) -> None:
    damage(root / "catalog")
    done = CliRunner().invoke(check, [str(root), "--repair"], standalone_mode=False)
    assert done.return_value == 0
    assert "nothing is lost" in done.output
    assert "machine" not in done.output + capfd.readouterr().err
    assert read_entries(root) == ENTRIES


@pytest.mark.slow
def test_catalog_when_lost_after_a_kill_then_entries_stay_and_lost_stores_are_named(root: Path) -> None:
    server = tdserve.Server(root, sync_interval_s=0)
    with server.start(), server.client() as client:
        client.kv("entries")["later"] = 20
        client.kv("unused")["first"] = 21
        client.delete("replaced")
        client.create_kv("replaced")["a"] = 1
        client.create_kv("young")["a"] = 1
        pid = server.pid
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: is_gone(pid) or None, "the end of the server")
    (root / "run.json").write_bytes(encode_checked({"boot_id": read_boot_id(), "is_synced": False}))
    overwrite(root / "catalog")
    done = CliRunner().invoke(check, [str(root), "--repair"], standalone_mode=False)
    assert done.return_value == DAMAGED
    assert "lost: what was written after the last sync, except entries of 'entries', 'unused'" in done.output
    for name in ("young", "replaced"):
        assert f"{root / 'stores' / name} is of no store that was synced" in done.output
    assert [line for line in done.output.splitlines() if line.startswith("repaired: ")] == done.output.splitlines()[:1]
    assert read_entries(root) == {**ENTRIES, "later": 20}
    assert read_entries(root, "unused") == {"first": 21}
    assert read_entries(root, "replaced") == {}
    left = CliRunner().invoke(check, [str(root)], standalone_mode=False)
    assert left.return_value == DAMAGED
    assert left.output.splitlines()[-1] == "2 stores are not in service"


@pytest.mark.slow
def test_root_when_the_power_was_lost_after_the_first_pass_over_a_store_then_its_entries_are_there(root: Path) -> None:
    (root / "run.json").write_bytes(encode_checked({"boot_id": "of another start", "is_synced": False}))
    assert read_entries(root) == ENTRIES


@pytest.mark.slow
def test_repair_when_the_power_was_lost_then_goes_back_to_the_last_sync(root: Path) -> None:
    (root / "run.json").write_bytes(encode_checked({"boot_id": "of another start", "is_synced": False}))
    done = CliRunner().invoke(check, [str(root), "--repair"], standalone_mode=False)
    assert done.return_value == 0
    assert "all is as of the last sync" in done.output
    assert read_entries(root) == ENTRIES


def damage_record(root: Path, table: Table, key: bytes) -> None:
    """Flips a bit of a record of the catalog."""
    with CatalogDB(root / "catalog", is_read_only=True) as db:
        content = db.get(table, key)
    path = root / "catalog" / "data.mdb"
    found = path.read_bytes()
    assert content
    assert found.count(content)
    path.write_bytes(found.replace(content, content[:-1] + bytes([content[-1] ^ 1])))


def kill(server: tdserve.Server) -> None:
    pid = server.pid
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: is_gone(pid) or None, "the end of the server")


@pytest.mark.slow
def test_repair_when_a_record_of_versions_is_older_than_the_kill_then_the_store_is_named(root: Path) -> None:
    with tdserve.Server(root).start() as server, server.client() as client:
        client.publish("weights", {"w": torch.zeros(3)})
    server = tdserve.Server(root, sync_interval_s=600)
    with server.start(), server.client() as client:
        client.publish("weights", {"w": torch.ones(3)})
        uid = client.describe("weights").uid
        kill(server)
    damage_record(root, "states", uid.encode())
    done = CliRunner().invoke(check, [str(root), "--repair"], standalone_mode=False)
    assert done.return_value == DAMAGED
    assert "versions, counts and changed settings of store 'weights' since the last sync" in done.output


@pytest.mark.slow
def test_repair_when_a_name_was_used_anew_since_the_copy_then_its_files_are_not_made_those_of_the_old_store(
    root: Path,
) -> None:
    row = TensorDict({"x": torch.zeros(())})
    with tdserve.Server(root).start() as server, server.client() as client:
        client.create_replay("rows", like=row, capacity=64)
    server = tdserve.Server(root, sync_interval_s=600)
    with server.start(), server.client() as client:
        client.delete("rows")
        client.create_replay("rows", like=row, capacity=32).extend(TensorDict({"x": torch.arange(20.0)}, [20]))
        kill(server)
    before = (root / "stores/rows/rows/x.memmap").read_bytes()
    damage_record(root, "stores", b"rows")
    done = CliRunner().invoke(check, [str(root), "--repair"], standalone_mode=False)
    assert done.return_value == DAMAGED
    assert "what was on record of store 'rows'" in done.output
    (kept,) = (root / "stores").glob(".lost-*")
    assert (kept / "rows/x.memmap").read_bytes() == before
    left = CliRunner().invoke(check, [str(root)], standalone_mode=False)
    assert left.return_value == DAMAGED
    assert left.output.splitlines()[-1] == "1 store is not in service"


@pytest.mark.slow
def test_repair_when_the_record_of_a_store_is_that_of_the_sync_before_a_kill_then_the_store_is_named(
    root: Path,
) -> None:
    row = TensorDict({"x": torch.zeros(())})
    with tdserve.Server(root).start() as server, server.client() as client:
        client.create_replay("rows", like=row, capacity=64).extend(row.expand(5).contiguous())
    server = tdserve.Server(root, sync_interval_s=0)
    with server.start(), server.client() as client:
        client.replay("rows").extend(row.expand(5).contiguous())
        kill(server)
    with CatalogDB(root / "catalog") as db, db.begin_transaction() as txn:
        txn.delete("stores", b"rows")
    (root / "stores/rows" / RECORD_FILE).unlink()
    done = CliRunner().invoke(check, [str(root), "--repair"], standalone_mode=False)
    assert done.return_value == DAMAGED
    assert "it is a store again" in done.output
    assert "lost: versions, counts and changed settings of store 'rows' since the last sync" in done.output
