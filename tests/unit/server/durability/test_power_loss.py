"""What a loss of power leaves of a root. All orders of pages: tests/integration/test_power_loss.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tdserve.messages.row_sets import RowSet
from tdserve.rules.catalog import StoreRecord
from tdserve.server.durability.power_loss import recover
from tdserve.server.open_store.specs import Specs
from tdserve.server.recovery.lost_rows import POWER_LOSS, Overwrite
from tdserve.store.database.catalog_db import CatalogDB
from tdserve.store.disk.checked_json import encode_checked
from tdserve.store.durability.sync_pass import Pass
from tdserve.store.durability.watermark import FILE_NAME as SYNCED_FILE, SyncedStore
from tdserve.store.roots.root import Root
from tdserve.store.rows import leaf_folders
from tdserve.store.rows.generations import FILE_NAME as GENERATION_FILE, Generations
from tdserve.store.weights.version_marks import sync_versions
from tdserve.structure.captures.capture import capture

KILLED = {"boot_id": "another", "is_synced": False}
"""The record of a run that had no orderly end."""

UID = "0123456789abcdef" * 2


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Root]:
    """A root with a synced store of three rows, on a machine that has been restarted since."""
    made = Root.acquire(tmp_path / "root")
    spec = capture(TensorDict({"x": torch.zeros(3)}, [3]), store="s").spec
    folder = made.store_folder("s")
    leaf_folders.create(folder, spec)
    generations = Generations.create(folder / GENERATION_FILE, uid=UID, num_rows=4)
    generations.values[:] = 2
    with CatalogDB(made.catalog_folder) as db:
        Specs(db, set).learn(spec)
        record = StoreRecord("s", "tensordict", UID, fingerprint=spec.fingerprint, num_rows=3)
        db.put("stores", b"s", record.to_bytes())
        store = SyncedStore.from_spec(spec, uid=UID, folder=str(folder), structure=0)
        assert Pass(str(made.catalog_folder), str(made.synced_folder), [store]).run() == {}
        db.put("pending", b"journal:of something", b"that may be there in part")
        db.put("stores", b"later", b"not synced")
    (made.path / "run.json").write_bytes(encode_checked(KILLED))
    yield made
    made.release()


def _generations(root: Root) -> list[int]:
    found: list[int] = Generations.open(root.store_folder("s") / GENERATION_FILE, uid=UID).values.tolist()
    return found


def _scan(root: Root) -> dict[bytes, bytes]:
    with CatalogDB(root.catalog_folder) as db:
        return dict((*db.scan("stores"), *db.scan("pending")))


@pytest.mark.parametrize("run", [{"is_synced": True}, {"boot_id": None}, None])
def test_recover_when_the_end_was_orderly_or_the_machine_runs_on_then_changes_nothing(
    root: Root, run: dict[str, object] | None
) -> None:
    if run is None:
        (root.path / "run.json").unlink()
    elif "boot_id" in run:
        root.run.note(is_synced=False)
    else:
        (root.path / "run.json").write_bytes(encode_checked({**KILLED, **run}))
    recover(root)
    assert b"later" in _scan(root)
    assert _generations(root) == [2, 2, 2, 2]


def test_recover_when_rows_were_written_since_then_they_are_lost_and_all_generations_are_new(
    root: Root,
) -> None:
    x = np.memmap(root.store_folder("s") / "rows/x.memmap", "<f4", "r+")
    x[1] = 7
    recover(root)
    found = _generations(root)
    assert [number & 1 for number in found] == [0, 1, 0, 1]
    assert min(found) > 1 << 20
    assert sorted(_scan(root)) == [Overwrite(UID, POWER_LOSS, 0, RowSet.from_rows(np.array([1])), ()).key, b"s"]
    recover(root)  # a crash came before this run was noted
    assert [number & 1 for number in _generations(root)] == [0, 1, 0, 1]
    root.run.note(is_synced=False)
    found = _generations(root)
    recover(root)
    assert _generations(root) == found


@pytest.mark.parametrize(("synced", "is_packed"), [("nothing", True), ("first content", True), ("a write", False)])
def test_recover_when_the_catalog_has_its_first_content_then_that_counts_until_a_later_one_was_synced(
    root: Root, synced: str, is_packed: bool
) -> None:
    folder = root.store_folder("s")
    if synced == "nothing":
        (folder / SYNCED_FILE).unlink()
    stores = []
    if synced == "a write":
        Generations.open(folder / GENERATION_FILE, uid=UID, writable=True).values[1] = 4
        spec = capture(TensorDict({"x": torch.zeros(3)}, [3]), store="s").spec
        stores.append(SyncedStore.from_spec(spec, uid=UID, folder=str(folder), structure=0))
    with CatalogDB(root.catalog_folder) as db:
        db.put("packed", UID.encode(), b"\1content")
        db.delete("stores", b"later")
        db.delete("pending", b"journal:of something")
        assert Pass(str(root.catalog_folder), str(root.synced_folder), stores).run() == {}
    recover(root)
    assert StoreRecord.from_bytes(_scan(root)[b"s"]).packed is is_packed
    assert (min(_generations(root)) > 1 << 20) is not is_packed


def test_recover_when_packed_then_kept_whatever_its_folder_has(root: Root) -> None:
    with CatalogDB(root.catalog_folder) as db:
        record = StoreRecord.from_bytes(db.get("stores", b"s") or b"")
        db.put("stores", b"s", replace(record, packed=True).to_bytes())
        db.delete("stores", b"later")
        assert Pass(str(root.catalog_folder), str(root.synced_folder)).run() == {}
        db.put("stores", b"s", record.to_bytes())
    (root.store_folder("s") / GENERATION_FILE).write_bytes(b"")
    recover(root)
    assert StoreRecord.from_bytes(_scan(root)[b"s"]).packed


def test_recover_when_the_generation_file_is_damaged_or_gone_then_makes_it_anew(root: Root) -> None:
    path = root.store_folder("s") / GENERATION_FILE
    path.write_bytes(b"")
    recover(root)
    assert [number & 1 for number in _generations(root)] == [0, 0, 0, 0]
    path.unlink()
    recover(root)
    assert [number & 1 for number in _generations(root)] == [0, 0, 0, 0]


def test_recover_when_another_store_has_the_name_by_now_then_both_are_gone_and_its_files_lie_aside(root: Root) -> None:
    path = root.store_folder("s") / GENERATION_FILE
    path.unlink()
    Generations.create(path, uid="f" * 32, num_rows=4).close()
    recover(root)
    assert _scan(root) == {}
    assert [folder.name[:8] for folder in (root.path / "stores").iterdir()] == [".lost-s-"]


def test_recover_when_other_weights_have_the_name_by_now_then_both_are_gone_and_their_files_lie_aside(
    root: Root,
) -> None:
    versions = root.store_folder("w") / "versions"
    versions.mkdir(parents=True)
    with CatalogDB(root.catalog_folder) as db:
        record = StoreRecord("w", "weights", UID[::-1], fingerprint=b"", num_rows=0)
        db.put("stores", b"w", record.to_bytes())
        db.delete("stores", b"later")
        assert Pass(str(root.catalog_folder), str(root.synced_folder)).run() == {}
    sync_versions(versions, {}, uid=record.uid)
    (versions / "1.safetensors").write_bytes(b"a version")
    sync_versions(versions, {1: "its record"}, uid="f" * 32)
    recover(root)
    assert b"w" not in _scan(root)
    assert sorted(folder.name[:8] for folder in (root.path / "stores").iterdir()) == [".lost-w-", "s"]


def test_recover_when_nothing_was_ever_synced_then_begins_empty_and_keeps_the_files(root: Root) -> None:
    (root.synced_folder / "catalog.mdb").unlink()
    recover(root)
    assert _scan(root) == {}
    assert (root.catalog_folder / "data.mdb.lost").exists()
    assert [folder.name[:8] for folder in (root.path / "stores").iterdir()] == [".lost-s-"]


def test_recover_when_the_note_of_the_last_run_is_damaged_then_takes_it_for_a_loss(root: Root) -> None:
    (root.path / "run.json").write_bytes(b"\0\0\0")
    recover(root)
    assert b"later" not in _scan(root)
