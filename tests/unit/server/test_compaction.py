from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tdserve.rules.catalog import StoreRecord
from tdserve.server.compaction import compact_all
from tdserve.store.generations import FILE_NAME, Generations
from tdserve.store.objects import ObjectColumn, Objects
from tdserve.store.root import Root

UID = "0123456789abcdef" * 2


def test_compact_all_when_one_store_is_damaged_then_the_others_are_compacted_and_it_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = Root.acquire(tmp_path)
    records = [StoreRecord(name=name, kind="tensordict", uid=UID) for name in ("damaged", "good")]
    for record in records:
        folder = root.store_folder(record.name)
        with Objects(folder / "objects", writable=True) as objects:
            for value in (bytes(5_000_000), b"small"):
                objects.put_many([ObjectColumn(("v",), [0], [value])])
    Generations.create(root.store_folder("good") / FILE_NAME, uid=UID, num_rows=1).close()
    with caplog.at_level(logging.WARNING):
        compact_all(root, [*records, StoreRecord(name="weights", kind="weights", uid=UID)])
    assert [message for message in caplog.messages if "'damaged'" in message]
    assert (root.store_folder("good") / "objects.1/data.mdb").stat().st_size < 100_000
    assert (root.store_folder("damaged") / "objects/data.mdb").stat().st_size > 5_000_000
    root.release()
