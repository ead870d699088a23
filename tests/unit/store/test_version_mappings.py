"""The registry of mapped version files."""

from __future__ import annotations

import os
from pathlib import Path

from tdserve.store import version_mappings


def _open(path: Path) -> int:
    path.write_bytes(bytes(8192))
    return os.open(path, os.O_RDWR)


def test_mapping_when_the_file_is_renamed_then_is_the_same(tmp_path: Path) -> None:
    fd = _open(tmp_path / "a")
    first = version_mappings.acquire(fd, writable=True, path=tmp_path)
    os.rename(tmp_path / "a", tmp_path / "b")
    with (tmp_path / "b").open("rb") as again:
        assert version_mappings.acquire(again.fileno(), writable=False, path=tmp_path) is first
    os.close(fd)


def test_mapping_when_it_must_be_writable_then_replaces_one_for_reading(tmp_path: Path) -> None:
    fd = _open(tmp_path / "a")
    reading = version_mappings.acquire(fd, writable=False, path=tmp_path)
    writing = version_mappings.acquire(fd, writable=True, path=tmp_path)
    assert not reading.writable
    assert writing.writable
    assert version_mappings.acquire(fd, writable=True, path=tmp_path) is writing
    os.close(fd)


def test_mapping_when_the_file_is_unlinked_then_is_forgotten(tmp_path: Path) -> None:
    fd, kept = _open(tmp_path / "a"), _open(tmp_path / "kept")
    mapping, other = (
        version_mappings.acquire(fd, writable=True, path=tmp_path),
        version_mappings.acquire(kept, writable=True, path=tmp_path),
    )
    os.unlink(tmp_path / "a")
    version_mappings.drop_unlinked()
    assert version_mappings.acquire(fd, writable=True, path=tmp_path) is not mapping
    assert version_mappings.acquire(kept, writable=True, path=tmp_path) is other
    os.close(fd)
    os.close(kept)
