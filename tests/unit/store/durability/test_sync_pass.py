"""A pass of the sync process, and the state of the files if it is interrupted at any moment."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tdserve.base.errors import ClosedError
from tdserve.store.database.catalog_db import CatalogDB
from tdserve.store.durability.sync_pass import COPY_FILE, Pass, SyncedWeights, put_back
from tdserve.store.durability.watermark import SyncedStore
from tdserve.store.rows import leaf_folders
from tdserve.store.rows.generations import FILE_NAME as GENERATION_FILE, Generations
from tdserve.store.values.object_folders import get_folder
from tdserve.store.values.objects import ObjectColumn, Objects
from tdserve.store.weights.version_marks import find_whole_versions
from tdserve.structure.captures.capture import capture


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


def test_pass_when_it_is_over_before_its_end_then_the_rest_and_the_copy_stay_as_they_were(tmp_path: Path) -> None:
    versions = [tmp_path / f"weights{number}/versions" for number in (1, 2)]
    for folder in versions:
        folder.mkdir(parents=True)
        (folder / "1.safetensors").write_bytes(b"content")
    weights = [SyncedWeights(str(number) * 32, str(folder), {1: "one"}) for number, folder in enumerate(versions, 1)]

    def is_over() -> bool:
        return bool(find_whole_versions(versions[0], uid="1" * 32))

    with CatalogDB(tmp_path / "catalog"), pytest.raises(ClosedError):
        _pass(tmp_path, weights=weights).run(is_over)
    assert is_over()
    assert find_whole_versions(versions[1], uid="2" * 32) == {}
    assert not (tmp_path / "synced" / COPY_FILE).exists()


def _make_store(folder: Path, uid: str) -> SyncedStore:
    """A store with values."""
    spec = capture(TensorDict({"x": torch.zeros(3)}, [3]).set_non_tensor("text", "a")).spec
    leaf_folders.create(folder, spec)
    Generations.create(folder / GENERATION_FILE, uid=uid, num_rows=4)
    with Objects(get_folder(folder, 0), writable=True) as objects:
        objects.put_many([ObjectColumn(("text",), np.arange(3), [b"a", b"b", b"c"])])
    return SyncedStore.from_spec(spec, uid=uid, folder=str(folder), structure=0)


def test_pass_when_a_store_is_deleted_between_two_looks_at_its_values_then_it_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    going, staying = _make_store(tmp_path / "going", "0" * 32), _make_store(tmp_path / "staying", "1" * 32)
    stat = os.stat

    def delete_first(path: Any, **how: Any) -> os.stat_result:
        asker = Path(sys._getframe(1).f_code.co_filename).name
        if asker == "value_copy.py" and "going" in Path(path).parts:  # its values are open by then
            shutil.rmtree(going.folder)
        return stat(path, **how)

    monkeypatch.setattr(os, "stat", delete_first)
    with CatalogDB(tmp_path / "catalog"):
        failures = _pass(tmp_path, stores=[going, staying]).run()
    assert list(failures) == [going.uid]
    assert not Path(going.folder).exists()
    assert (Path(staying.folder) / "synced-values/source.json").exists()
    assert (tmp_path / "synced" / COPY_FILE).exists()
