from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from tdserve.rules.catalog import StoreRecord
from tdserve.server.durability.compaction import compact_all
from tdserve.server.open_store.specs import Specs
from tdserve.store.database.catalog_db import CatalogDB
from tdserve.store.roots.root import Root
from tdserve.store.rows.generations import FILE_NAME, Generations
from tdserve.store.values.objects import ObjectColumn, Objects
from tdserve.structure.captures.capture import capture

UID = "0123456789abcdef" * 2


def test_compact_all_when_it_is_over_after_a_store_then_the_next_is_left_as_it_is(tmp_path: Path) -> None:
    root = Root.acquire(tmp_path)
    spec = capture(TensorDict({"v": "text"}, [])).spec
    records = [StoreRecord(name, "tensordict", UID, fingerprint=spec.fingerprint) for name in ("first", "second")]
    for record in records:
        make_values(root.store_folder(record.name))
        Generations.create(root.store_folder(record.name) / FILE_NAME, uid=UID, num_rows=1).close()
    with CatalogDB(root.catalog_folder) as db:
        specs = Specs(db, set)
        specs.learn(spec)
        compact_all(root, specs, records, (root.store_folder("first") / "objects.1").exists)
    assert not (root.store_folder("first") / "objects").exists()
    assert (root.store_folder("second") / "objects").exists()
    assert not (root.store_folder("second") / "objects.1").exists()
    root.release()


def make_values(folder: Path) -> None:
    """Makes a store's folder with a large value that was overwritten by a small one."""
    folder.mkdir()
    with Objects(folder / "objects", writable=True) as objects:
        for value in (bytes(5_000_000), b"small"):
            objects.put_many([ObjectColumn(("v",), [0], [value])])


def test_compact_all_when_one_store_is_damaged_then_the_others_are_compacted_and_it_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = Root.acquire(tmp_path)
    spec = capture(TensorDict({"v": "text"}, [])).spec
    records = [StoreRecord(name, "tensordict", UID, fingerprint=spec.fingerprint) for name in ("damaged", "good")]
    for record in records:
        make_values(root.store_folder(record.name))
    Generations.create(root.store_folder("good") / FILE_NAME, uid=UID, num_rows=1).close()
    with CatalogDB(root.catalog_folder) as db, caplog.at_level(logging.WARNING):
        specs = Specs(db, set)
        for each in (spec, tensors := capture(TensorDict({"x": torch.zeros(3)}, [])).spec):
            specs.learn(each)
        untouched = [
            StoreRecord("weights", "weights", UID),
            StoreRecord("packed", "tensordict", UID, fingerprint=spec.fingerprint, packed=True),
            StoreRecord("without values and without files", "tensordict", UID, fingerprint=tensors.fingerprint),
        ]
        compact_all(root, specs, [*records, *untouched])
    assert ["'damaged'" in message for message in caplog.messages] == [True]
    assert (root.store_folder("good") / "objects.1/data.mdb").stat().st_size < 100_000
    assert (root.store_folder("damaged") / "objects/data.mdb").stat().st_size > 5_000_000
    root.release()
