"""The process that syncs, and the control process's end of it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tdserve.base.errors import LocalProtocolError, PeerLostError
from tdserve.server.durability.sync_process import SyncProcess
from tdserve.store.database.catalog_db import CatalogDB
from tdserve.store.durability.sync_pass import COPY_FILE, Pass
from tdserve.store.durability.watermark import FILE_NAME, SyncedStore
from tdserve.store.rows.generations import Generations

UID = "0" * 32


@pytest.fixture
def process(tmp_path: Path) -> Iterator[SyncProcess]:
    with open(tmp_path / "lock", "w") as lock:
        made = SyncProcess(lock.fileno())
        yield made
        made.end()


def _store(folder: Path, structure: int) -> SyncedStore:
    return SyncedStore(UID, str(folder), 2, structure, (("x.memmap", 8),))


@pytest.mark.slow
def test_process_when_given_a_store_then_syncs_it_and_again_when_its_structure_changes(
    process: SyncProcess, tmp_path: Path
) -> None:
    folder = tmp_path / "store"
    folder.mkdir()
    np.arange(2).tofile(folder / "x.memmap")
    generations = Generations.create(folder / "generation.memmap", uid=UID, num_rows=3)
    catalog, target = str(tmp_path / "catalog"), str(tmp_path / "synced")
    noted = []
    with CatalogDB(tmp_path / "catalog"):
        for structure in (0, 0, 1):
            generations.move_structure(structure)
            generations.values[0] += 2
            assert process.run(Pass(catalog, target, [_store(folder, structure)])) == {}
            noted.append((folder / FILE_NAME).read_bytes())
    assert len(set(noted)) == 3
    assert (tmp_path / "synced" / COPY_FILE).exists()
    with pytest.raises(LocalProtocolError, match="none"):
        process.run(Pass(str(tmp_path / "none"), target))


def test_process_when_it_is_killed_then_peer_lost(process: SyncProcess, tmp_path: Path) -> None:
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(PeerLostError):
        process.run(Pass(str(tmp_path / "catalog"), str(tmp_path / "synced")))
