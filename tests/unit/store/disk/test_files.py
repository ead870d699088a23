from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from tdserve.base.errors import CorruptDataError
from tdserve.store.disk.files import is_in_memory, sync_file, write_at


def test_sync_when_of_a_file_or_a_folder_then_synced_and_left_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    fsync = os.fsync

    def note(fd: int) -> None:
        synced.append(os.fstat(fd).st_ino)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", note)
    (tmp_path / "file").write_bytes(b"content")
    sync_file(tmp_path / "file")
    sync_file(tmp_path)
    assert synced == [(tmp_path / "file").stat().st_ino, tmp_path.stat().st_ino]
    assert (tmp_path / "file").read_bytes() == b"content"


def test_sync_when_there_is_no_such_file_then_corrupt_data(tmp_path: Path) -> None:
    with pytest.raises(CorruptDataError, match="none"):
        sync_file(tmp_path / "none")


def test_file_system_when_it_has_a_disk_or_none_then_distinguished(tmp_path: Path) -> None:
    assert is_in_memory(Path("/dev/shm"))
    assert not is_in_memory(Path("/proc"))
    assert not is_in_memory(tmp_path / "none")


def test_write_at_when_there_is_room_for_a_part_then_refused_and_not_cut_short(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with (tmp_path / "file").open("wb", buffering=0) as file:
        write_at(file.fileno(), memoryview(b"abc"), 2)
        resource.setrlimit(resource.RLIMIT_FSIZE, (8, hard))
        try:
            with pytest.raises(OSError, match="too large"):
                write_at(file.fileno(), b"0123456789", 4)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / "file").read_bytes() == b"\0\0ab0123"
