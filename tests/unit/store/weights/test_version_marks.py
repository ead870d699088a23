"""Versions that a loss of power leads back to."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tdserve.base.errors import CorruptDataError
from tdserve.store.disk.checked_json import encode_checked
from tdserve.store.weights.version_marks import (
    FILE_NAME,
    adopt_marks,
    begin_marks,
    find_marks,
    find_whole_versions,
    is_of_another,
    sync_versions,
)
from tdserve.store.weights.version_names import make_values_name, retire

UID, OTHER = "a" * 32, "b" * 32


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with versions 1 to 3, of which the second has values."""
    made = tmp_path / "store" / "versions"
    made.mkdir(parents=True)
    for number in (1, 2, 3):
        (made / f"{number}.safetensors").write_bytes(bytes([number]) * 3_000_000)
    make_values_name(made / "2.safetensors").write_bytes(b"values")
    return made


def test_versions_when_synced_then_those_with_unchanged_files_are_whole(folder: Path) -> None:
    sync_versions(folder, {1: '["one"]', 2: '["two"]', 3: '["three"]'}, uid=UID)
    assert find_whole_versions(folder, uid=UID) == {1: '["one"]', 2: '["two"]', 3: '["three"]'}
    with open(folder / "1.safetensors", "r+b") as file:
        file.seek(2_500_000)
        file.write(b"\0")
    assert find_whole_versions(folder, uid=UID) == {2: '["two"]', 3: '["three"]'}
    make_values_name(folder / "2.safetensors").write_bytes(b"other!")
    assert find_whole_versions(folder, uid=UID) == {3: '["three"]'}
    (folder / "3.safetensors").unlink()
    assert find_whole_versions(folder, uid=UID) == {}


def test_versions_when_retired_before_they_are_synced_then_are_left_out(folder: Path) -> None:
    retire(folder / "1.safetensors")
    sync_versions(folder, {1: '["one"]', 2: '["two"]'}, uid=UID)
    assert find_whole_versions(folder, uid=UID) == {2: '["two"]'}


def test_versions_when_synced_before_then_are_not_read_again(folder: Path) -> None:
    sync_versions(folder, {2: '["two"]'}, uid=UID)
    (folder / "2.safetensors").write_bytes(b"damaged since")
    sync_versions(folder, {2: '["two"]', 3: '["three"]'}, uid=UID)
    assert find_whole_versions(folder, uid=UID) == {3: '["three"]'}


def test_versions_when_nothing_is_noted_or_the_note_is_damaged_then_none_is_whole(folder: Path) -> None:
    assert find_whole_versions(folder, uid=UID) == {}
    sync_versions(folder, {1: '["one"]'}, uid=UID)
    (folder / "synced.json").write_bytes(b"{")
    assert find_whole_versions(folder, uid=UID) == {}


def test_versions_when_of_another_incarnation_then_none_is_whole_and_is_of_another(folder: Path) -> None:
    assert not is_of_another(folder, uid=UID)
    sync_versions(folder, {1: '["one"]'}, uid=OTHER)
    assert find_whole_versions(folder, uid=UID) == {}
    assert is_of_another(folder, uid=UID)


def test_versions_when_the_folder_is_of_another_incarnation_then_not_synced_and_its_record_stays(folder: Path) -> None:
    begin_marks(folder, uid=OTHER)
    with pytest.raises(CorruptDataError, match=str(folder)):
        sync_versions(folder, {1: '["of a deleted store"]'}, uid=UID)
    assert is_of_another(folder, uid=UID)
    sync_versions(folder, {1: '["one"]'}, uid=OTHER)
    assert find_whole_versions(folder, uid=OTHER) == {1: '["one"]'}


def test_versions_when_their_folder_is_moved_while_they_are_synced_then_the_next_one_has_no_record_of_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved, fsync = folder.with_name("moved"), os.fsync

    def move(fd: int) -> None:
        fsync(fd)
        if not moved.exists():
            folder.rename(moved)
            folder.mkdir()

    monkeypatch.setattr(os, "fsync", move)
    sync_versions(folder, {1: '["one"]'}, uid=UID)
    assert find_whole_versions(moved, uid=UID).keys() <= {1}
    assert list(folder.iterdir()) == []


def test_versions_when_moved_or_copied_then_compared_with_the_checksums_of_the_first_sync(folder: Path) -> None:
    sync_versions(folder, {1: '["one"]', 2: '["two", "first"]'}, uid=OTHER)
    (folder / "2.safetensors").write_bytes(b"damaged since")
    adopt_marks(folder, uid=UID)
    assert not is_of_another(folder, uid=UID)
    assert find_whole_versions(folder, uid=UID) == {1: '["one"]'}
    sync_versions(folder, {1: '["one", "renamed"]', 2: '["two", "renamed"]'}, uid=UID)
    assert find_whole_versions(folder, uid=UID) == {1: '["one", "renamed"]'}
    assert find_marks(folder, UID)["2"][0] == '["two", "renamed"]'
    sync_versions(folder, {2: '["another version"]'}, uid=UID)
    assert find_whole_versions(folder, uid=UID) == {2: '["another version"]'}


@pytest.mark.parametrize("content", [None, b'{"uid": "'])
def test_marks_when_missing_or_read_while_they_were_replaced_then_made_anew(
    folder: Path, content: bytes | None
) -> None:
    if content is not None:
        (folder / "synced.json").write_bytes(content)
    adopt_marks(folder, uid=UID)
    assert not (folder / "synced.json").exists()
    sync_versions(folder, {1: '["one"]'}, uid=UID)
    assert find_whole_versions(folder, uid=UID) == {1: '["one"]'}


@pytest.mark.parametrize(
    "versions", [{"1": ["junk", "sum"], "2": ["[]", "sum"]}, {"1": "text", "x": ["[1]", "s"]}, {"1": [1, 2]}, [], None]
)
def test_marks_when_they_come_from_elsewhere_and_are_none_then_made_anew(folder: Path, versions: object) -> None:
    (folder / FILE_NAME).write_bytes(encode_checked({"uid": OTHER, "versions": versions}))
    adopt_marks(folder, uid=UID)
    sync_versions(folder, {1: '["one"]', 2: '["two"]'}, uid=UID)
    assert find_whole_versions(folder, uid=UID) == {1: '["one"]', 2: '["two"]'}
