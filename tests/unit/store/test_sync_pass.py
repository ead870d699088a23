"""A pass of the sync process, and the state of the files if it is interrupted at any moment."""

from __future__ import annotations

from pathlib import Path

from tdserve.store.catalog_db import CatalogDB
from tdserve.store.sync_pass import COPY_FILE, Pass, SyncedWeights, put_back
from tdserve.store.version_marks import find_whole_versions
from tdserve.store.watermark import SyncedStore


def _pass(folder: Path, **work: object) -> Pass:
    return Pass(str(folder / "catalog"), str(folder / "synced"), **work)  # type: ignore[arg-type]


def test_pass_when_the_catalog_is_damaged_later_then_its_copy_takes_its_place(tmp_path: Path) -> None:
    with CatalogDB(tmp_path / "catalog") as db:
        db.put("stores", b"a", b"1")
        assert _pass(tmp_path).run() == {}
        db.put("stores", b"a", b"2")
        db.put("stores", b"b", b"3")
    damaged = bytearray((tmp_path / "catalog/data.mdb").read_bytes())
    damaged[8192:] = b"\xff" * (len(damaged) - 8192)
    (tmp_path / "catalog/data.mdb").write_bytes(damaged)
    assert put_back(tmp_path / "synced", tmp_path / "catalog")
    with CatalogDB(tmp_path / "catalog") as db:
        assert db.scan("stores") == [(b"a", b"1")]
        db.put("stores", b"b", b"4")  # and it can be written, without changing the copy
    assert put_back(tmp_path / "synced", tmp_path / "catalog")
    with CatalogDB(tmp_path / "catalog") as db:
        assert db.scan("stores") == [(b"a", b"1")]
    assert (tmp_path / "catalog/data.mdb.lost").exists()


def test_put_back_when_there_is_no_copy_then_changes_nothing(tmp_path: Path) -> None:
    with CatalogDB(tmp_path / "catalog") as db:
        db.put("stores", b"a", b"1")
    before = (tmp_path / "catalog/data.mdb").read_bytes()
    assert not put_back(tmp_path / "synced", tmp_path / "catalog")
    assert (tmp_path / "catalog/data.mdb").read_bytes() == before


def test_pass_when_a_store_cannot_be_synced_then_the_others_are(tmp_path: Path) -> None:
    versions = tmp_path / "weights/versions"
    versions.mkdir(parents=True)
    (versions / "1.safetensors").write_bytes(b"content")
    gone = SyncedStore("0" * 32, str(tmp_path / "gone"), 3, 0, (("rows/x.memmap", 4),))
    with CatalogDB(tmp_path / "catalog"):
        weights = [SyncedWeights("1" * 32, str(versions), {1: "one"})]
        failures = _pass(tmp_path, stores=[gone], weights=weights).run()
    assert list(failures) == ["0" * 32]
    assert "generation.memmap" in failures["0" * 32]
    assert find_whole_versions(versions, uid="1" * 32) == {1: "one"}
    assert (tmp_path / "synced" / COPY_FILE).exists()
