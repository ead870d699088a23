"""Owning a root folder, seen from this process and from others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tdserve.base.errors import (
    CapacityError,
    ClosedError,
    CorruptDataError,
    InvalidRequestError,
    NotSupportedError,
    RootInUseError,
)
from tdserve.store.database.catalog_db import CatalogDB
from tdserve.store.disk.checked_json import decode_checked
from tdserve.store.roots.root import Root

HOLD = """
import signal, sys
from tdserve.store.roots.root import Root
root = Root.acquire(sys.argv[1])
root.set_address("10.1.2.3:7707")
print("held", flush=True)
signal.pause()
"""


def test_root_when_new_then_has_its_files_and_folders(tmp_path: Path) -> None:
    root = Root.acquire(tmp_path / "a" / "b")
    found = decode_checked((root.path / "tdserve.json").read_bytes(), "")
    assert found == {"format_version": 6, "server_id": root.server_id}
    assert root.catalog_folder.is_dir()
    assert root.sessions_folder.is_dir()
    assert root.store_folder("x").parent.is_dir()
    assert root.nonce_path.read_text() == root.nonce
    assert root.free_bytes() > 0
    root.release()


def test_root_when_acquired_again_then_keeps_its_id_and_changes_its_nonce(tmp_path: Path) -> None:
    first = Root.acquire(tmp_path)
    first.release()
    second = Root.acquire(tmp_path)
    assert second.server_id == first.server_id
    assert second.nonce != first.nonce
    second.release()


@pytest.mark.slow
def test_root_when_held_by_another_process_then_is_refused_until_that_is_killed(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        with pytest.raises(RootInUseError) as caught:
            Root.acquire(tmp_path)
        holder.send_signal(signal.SIGKILL)
    assert str(holder.pid) in caught.value.holder
    assert "10.1.2.3:7707" in caught.value.holder
    Root.acquire(tmp_path).release()


def test_root_when_held_in_this_process_then_the_later_address_is_named(tmp_path: Path) -> None:
    root = Root.acquire(tmp_path)
    root.set_address("127.0.0.1:5")
    with pytest.raises(RootInUseError, match=f"process {os.getpid()} .*127.0.0.1:5"):
        Root.acquire(tmp_path)
    root.release()
    root.release()
    assert not root.is_held
    with pytest.raises(ClosedError):
        root.set_address("x")


@pytest.mark.parametrize(("version", "age"), [(2, "an older"), (5, "an older"), (99, "a newer")])
def test_root_when_another_tdserve_has_written_it_then_is_refused_and_not_held(
    tmp_path: Path, version: int, age: str
) -> None:
    content = f'{{"format_version": {version}, "server_id": "x"}}'
    (tmp_path / "tdserve.json").write_text(content)
    for take in (Root.acquire, Root.acquire_for_check, Root.acquire):
        with pytest.raises(NotSupportedError, match=f"format_version {version} of {tmp_path} .*by {age} tdserve"):
            take(tmp_path)
    assert (tmp_path / "tdserve.json").read_text() == content


@pytest.mark.parametrize(
    "content",
    [
        '{"format_version": 6, "server_id": "x", "checksum": "format_version"}',
        '{"format_version": true, "server_id": "x"}',
        "{",
        "[]",
        '{"server_id": "x"}',
    ],
)
def test_root_when_format_is_unknown_then_is_refused_and_not_held(tmp_path: Path, content: str) -> None:
    (tmp_path / "tdserve.json").write_text(content)
    for _ in range(2):
        with pytest.raises(CorruptDataError, match="format_version"):
            Root.acquire(tmp_path)
    assert (tmp_path / "tdserve.json").read_text() == content


def test_root_when_its_format_file_is_lost_then_is_refused(tmp_path: Path) -> None:
    Root.acquire(tmp_path).release()
    (tmp_path / "tdserve.json").unlink()
    with pytest.raises(CorruptDataError, match=r"tdserve\.json"):
        Root.acquire(tmp_path)


def test_root_when_a_file_is_in_the_way_then_is_refused(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for path in (tmp_path / "f", tmp_path / "f" / "below", tmp_path / "dangling"):
        with pytest.raises(InvalidRequestError, match="cannot be made"):
            Root.acquire(path)


def test_lock_file_when_it_is_a_symlink_then_its_target_stays_untouched(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "tdserve.lock").symlink_to(tmp_path / "victim")
    with pytest.raises(CorruptDataError):
        Root.acquire(tmp_path / "root")
    assert (tmp_path / "victim").read_text() == "precious"


@pytest.mark.parametrize("name", ["", "..", "a/b", ".hidden", "x" * 201])
def test_store_folder_when_name_is_unfit_then_is_refused(tmp_path: Path, name: str) -> None:
    root = Root.acquire(tmp_path)
    with pytest.raises(InvalidRequestError):
        root.store_folder(name)
    root.release()


def test_move_to_trash_when_emptied_then_that_store_or_all_go_and_a_name_is_free_before(tmp_path: Path) -> None:
    root = Root.acquire(tmp_path)
    for uid in ("a1", "b2", "c3"):
        (root.store_folder("w") / "rows").mkdir(parents=True)
        root.move_to_trash("w", uid)
    root.move_to_trash("never there", "d4")
    root.empty_trash("b2")
    assert sorted(path.name for path in (tmp_path / "stores").iterdir()) == [".deleted-a1", ".deleted-c3"]
    root.empty_trash()
    assert list((tmp_path / "stores").iterdir()) == []
    root.release()


def test_root_when_its_disk_is_full_then_acquired_again_for_reading_and_deleting(small_disk: Path) -> None:
    root = Root.acquire(small_disk / "root")
    root.set_address("10.1.2.3:7707")
    root.release()
    (small_disk / "filling").write_bytes(bytes(os.statvfs(small_disk).f_bavail * 4096))
    again = Root.acquire(small_disk / "root")
    again.set_address("10.1.2.3:7708")
    assert again.nonce_path.read_text() == again.nonce != root.nonce
    assert os.statvfs(small_disk).f_bavail == 0
    again.release()


def test_root_when_it_is_new_and_its_disk_is_full_then_capacity_error_names_it(small_disk: Path) -> None:
    (small_disk / "filling").write_bytes(bytes(os.statvfs(small_disk).f_bavail * 4096))
    with pytest.raises(CapacityError, match=str(small_disk)):
        Root.acquire(small_disk / "root")


@pytest.mark.parametrize("is_there", [False, True])
def test_find_catalog_when_it_was_lost_beside_stores_then_refused_with_what_to_do(
    tmp_path: Path, is_there: bool
) -> None:
    root = Root.acquire(tmp_path)
    assert root.find_catalog() == root.catalog_folder
    (root.store_folder("frames") / "rows").mkdir(parents=True)
    if is_there:
        (root.catalog_folder / "data.mdb").touch()
    assert root.find_catalog() == root.catalog_folder, "folders alone are of no store"
    (root.store_folder("frames") / "rows" / "meta.json").touch()
    with pytest.raises(CorruptDataError, match=f"frames.*{tmp_path}/stores away") as caught:
        root.find_catalog()
    assert caught.value.path == f"{tmp_path}/catalog/data.mdb"
    assert ("empty file" in caught.value.actual) is is_there
    root.store_folder("frames").rename(root.path / "stores" / ".deleted-0")
    root.find_catalog()
    root.release()


@pytest.mark.parametrize("nbytes", [100, 4096, 8192])
def test_find_catalog_when_its_file_was_cut_then_refused_with_what_to_do(tmp_path: Path, nbytes: int) -> None:
    root = Root.acquire(tmp_path / "root")
    with CatalogDB(root.find_catalog()) as db, db.begin_transaction() as txn:
        txn.put("stores", b"x", b"record")
    file = root.find_catalog() / "data.mdb"
    content = file.read_bytes()
    os.truncate(file, nbytes)
    with pytest.raises(CorruptDataError, match=r"expected a catalog, found .*; `tdserve check .* --repair` puts back"):
        root.find_catalog()
    file.write_bytes(content)
    assert root.find_catalog() == file.parent
    root.release()


def test_root_when_its_folder_is_replaced_then_is_not_in_place(tmp_path: Path) -> None:
    root = Root.acquire(tmp_path / "root")
    assert root.is_in_place()
    root.path.rename(tmp_path / "away")
    assert not root.is_in_place()
    assert not root.is_replaced()
    other = Root.acquire(tmp_path / "root")
    assert not root.is_in_place()
    assert root.is_replaced()
    with pytest.raises(CorruptDataError, match="found another root"):
        root.check_in_place()
    other.check_in_place()
    other.release()
    root.release()


def test_root_when_it_is_a_place_of_checkpoints_then_is_refused_and_these_stay(tmp_path: Path) -> None:
    manifest = tmp_path / "checkpoints" / "one.json"
    manifest.parent.mkdir()
    manifest.write_text("{}")
    with pytest.raises(InvalidRequestError, match=f"{tmp_path} is a place of checkpoints.*restore --root"):
        Root.acquire(tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [manifest]
