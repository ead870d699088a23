"""One LMDB environment per folder and process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tdserve.errors import CorruptDataError, WrongStateError
from tdserve.store import environments

MAX_BYTES = 1 << 20


def test_environment_when_acquired_by_two_names_then_is_one(tmp_path: Path) -> None:
    first = environments.acquire(tmp_path / "a", writable=True, max_bytes=MAX_BYTES)
    (tmp_path / "b").symlink_to(tmp_path / "a")
    second = environments.acquire(tmp_path / "b", writable=False, max_bytes=MAX_BYTES)
    assert second is first
    environments.release(first)
    with second.env.begin(write=True) as txn:
        txn.put(b"k", b"v")
    environments.release(second)
    again = environments.acquire(tmp_path / "a", writable=True, max_bytes=MAX_BYTES)
    assert again is not first
    environments.release(again)


def test_environment_when_open_for_reading_then_refuses_a_writer(tmp_path: Path) -> None:
    environments.release(environments.acquire(tmp_path, writable=True, max_bytes=MAX_BYTES))
    reader = environments.acquire(tmp_path, writable=False, max_bytes=MAX_BYTES)
    with pytest.raises(WrongStateError):
        environments.acquire(tmp_path, writable=True, max_bytes=MAX_BYTES)
    environments.release(reader)


def test_environment_when_folder_is_missing_then_a_reader_makes_none(tmp_path: Path) -> None:
    with pytest.raises(CorruptDataError):
        environments.acquire(tmp_path / "none", writable=False, max_bytes=MAX_BYTES)
    assert not (tmp_path / "none").exists()


def test_environment_when_inherited_by_fork_then_the_child_opens_its_own(tmp_path: Path) -> None:
    parents = environments.acquire(tmp_path, writable=True, max_bytes=MAX_BYTES)
    with parents.env.begin(write=True) as txn:
        txn.put(b"k", b"v")
    child = os.fork()
    if child == 0:
        childs = environments.acquire(tmp_path, writable=True, max_bytes=MAX_BYTES)
        with childs.env.begin(write=True) as txn:
            found = txn.get(b"k") == b"v" and childs is not parents and txn.put(b"child", b"1")
        os._exit(0 if found else 1)
    assert os.waitpid(child, 0)[1] == 0
    with parents.env.begin(write=True) as txn:
        assert txn.get(b"child") == b"1"
        txn.put(b"parent", b"2")
    environments.release(parents)


def test_environment_when_its_files_were_made_anew_then_is_another(tmp_path: Path) -> None:
    first = environments.acquire(tmp_path, writable=True, max_bytes=MAX_BYTES)
    for name in (environments.DATA_FILE, environments.LOCK_FILE):
        (tmp_path / name).unlink()
    second = environments.acquire(tmp_path, writable=True, max_bytes=MAX_BYTES)
    assert second is not first
    assert (tmp_path / environments.DATA_FILE).exists()
    environments.release(first)
    environments.release(second)


def test_environment_when_a_reader_names_no_size_then_has_the_writers(tmp_path: Path) -> None:
    environments.release(environments.acquire(tmp_path, writable=True, max_bytes=3 << 20))
    reader = environments.acquire(tmp_path, writable=False, max_bytes=0)
    assert reader.env.info()["map_size"] == 3 << 20
    environments.release(reader)
