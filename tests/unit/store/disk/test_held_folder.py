"""Folders that are held while somebody works in them."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

from tdserve.base.errors import CorruptDataError
from tdserve.store.disk.held_folder import HeldFolder, find_name


def test_held_folder_when_another_gets_its_name_then_stays_the_same_one(tmp_path: Path) -> None:
    folder, moved = tmp_path / "x", tmp_path / "moved"
    folder.mkdir()
    held = HeldFolder(folder)
    folder.rename(moved)
    folder.mkdir()
    (held.path / "file").write_bytes(b"content")
    assert (moved / "file").read_bytes() == b"content"
    assert list(folder.iterdir()) == []
    assert find_name(held.path) == moved


def test_held_folder_when_it_is_let_go_then_its_descriptor_is_closed(tmp_path: Path) -> None:
    held = HeldFolder(tmp_path)
    fd = int(held.path.name)
    assert os.fstat(fd).st_ino == tmp_path.stat().st_ino
    del held
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_held_folder_when_there_is_none_then_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(CorruptDataError, match=str(tmp_path / "x")):
        HeldFolder(tmp_path / "x")
