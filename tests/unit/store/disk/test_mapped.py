"""Shared mappings without descriptors."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import numpy as np
import pytest

from tdserve.base.errors import InvalidRequestError
from tdserve.store.disk.mapped import make_private, map_new, map_private, map_shared


def _open(path: Path, nbytes: int) -> int:
    path.write_bytes(bytes(nbytes))
    return os.open(path, os.O_RDWR)


def test_mapping_when_written_then_the_file_has_it_and_no_descriptor_stays(tmp_path: Path) -> None:
    fd = _open(tmp_path / "f", 5000)
    before = len(os.listdir("/proc/self/fd"))
    view = np.frombuffer(map_shared(fd, 5000, writable=True, path=tmp_path), np.uint8)
    assert len(os.listdir("/proc/self/fd")) <= before
    os.close(fd)
    view[4999] = 7
    assert (tmp_path / "f").read_bytes()[4999] == 7


def test_mapping_when_the_last_view_goes_then_is_unmapped(tmp_path: Path) -> None:
    fd = _open(tmp_path / "known-name", 4096)
    view = np.frombuffer(map_shared(fd, 4096, writable=True, path=tmp_path), np.uint8)
    os.close(fd)
    part = view[5:9]
    del view
    gc.collect()
    assert "known-name" in Path("/proc/self/maps").read_text()
    del part
    gc.collect()
    assert "known-name" not in Path("/proc/self/maps").read_text()


def test_mapping_when_descriptor_is_not_writable_then_is_refused(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(bytes(10))
    fd = os.open(tmp_path / "f", os.O_RDONLY)
    with pytest.raises(InvalidRequestError, match=str(tmp_path)):
        map_shared(fd, 10, writable=True, path=tmp_path)
    os.close(fd)


def test_new_mapping_when_made_then_the_kernel_reads_nothing_ahead(tmp_path: Path) -> None:
    fd = _open(tmp_path / "known-name", 4096)
    view = np.frombuffer(map_new(fd, 4096, path=tmp_path), np.uint8)
    os.close(fd)
    view[0] = 7
    assert (tmp_path / "known-name").read_bytes()[0] == 7
    _, _, ours = Path("/proc/self/smaps").read_text().partition("known-name")
    flags = next(line for line in ours.splitlines() if line.startswith("VmFlags:"))
    assert "rr" in flags.split()


def test_private_mapping_when_written_then_only_it_sees_that_and_untouched_pages_are_shared(tmp_path: Path) -> None:
    fd = _open(tmp_path / "f", 3 * 4096)
    os.close(fd)
    with (tmp_path / "f").open("rb") as file:  # writing to its own pages needs no permission to write the file
        mine = np.frombuffer(map_private(file.fileno(), 3 * 4096, path=tmp_path), np.uint8)
    mine[0] = 7
    with (tmp_path / "f").open("r+b") as file:
        shared = np.frombuffer(map_shared(file.fileno(), 3 * 4096, writable=True, path=tmp_path), np.uint8)
    assert shared[0] == 0
    shared[0], shared[5000] = 8, 9
    assert (mine[0], mine[5000]) == (7, 9)
    assert (tmp_path / "f").read_bytes()[:1] == bytes([8])


def test_private_mapping_when_larger_than_memory_then_taken_all_the_same(tmp_path: Path) -> None:
    nbytes = 1 << 44  # pages that nobody writes are not promised
    (tmp_path / "f").touch()
    os.truncate(tmp_path / "f", nbytes // 1024)
    with (tmp_path / "f").open("rb") as file:
        view = np.frombuffer(map_private(file.fileno(), nbytes, path=tmp_path), np.uint8)
    assert view[0] == 0


def test_mapping_when_made_private_then_keeps_its_place_and_content_and_reaches_the_file_no_more(
    tmp_path: Path,
) -> None:
    fds = [_open(tmp_path / name, 5000) for name in ("ours", "theirs")]
    ours, theirs = (np.frombuffer(map_shared(fd, 5000, writable=True, path=tmp_path), np.uint8) for fd in fds)
    ours[4999] = 7
    make_private([(str(tmp_path / "ours"), os.fstat(fds[0]).st_ino)])
    assert ours[4999] == 7
    ours[4999] = theirs[4999] = 8
    assert (tmp_path / "ours").read_bytes()[4999] == 7
    assert (tmp_path / "theirs").read_bytes()[4999] == 8
    for fd in fds:
        os.close(fd)
