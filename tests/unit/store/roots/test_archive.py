from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from fsspec import register_implementation
from fsspec.implementations.memory import MemoryFileSystem

from tdserve.base.errors import CapacityError, CorruptDataError, InvalidRequestError
from tdserve.base.ids import make_uid
from tdserve.store.roots.archive import Archive, check_outside_roots, open_archive
from tdserve.store.roots.root import Root
from tests.unit.store.conftest import SMALL_DISK_BYTES
from tests.unit.store.short_files import no_page_can_be_written


@pytest.fixture(params=["folder", "url", "file-url"])
def archive(request: pytest.FixtureRequest, tmp_path: Path) -> Archive:
    places = {"folder": f"{tmp_path}/x", "url": f"memory://{make_uid()}", "file-url": f"file://{tmp_path}/y"}
    return open_archive(places[request.param])


def test_contents_when_written_then_read_listed_and_removed(archive: Archive) -> None:
    assert archive.list_sizes("blocks") == {}
    assert archive.list_folders() == []
    archive.write("blocks/ab/abcd", b"1")
    archive.write("blocks/cd/cdef", b"22")
    archive.write("blocks/ab/abcd", b"3")
    archive.write("others/a", b"")
    archive.write("a file", b"")
    assert archive.list_folders() == ["blocks", "others"]
    assert archive.read("blocks/ab/abcd") == b"3"
    assert archive.read("others/a") == b""
    assert [*archive.list_sizes("blocks").items()] == [("blocks/ab/abcd", 1), ("blocks/cd/cdef", 2)]
    archive.remove("blocks/ab/abcd")
    archive.remove("blocks/ab/abcd")
    assert archive.list_sizes("blocks") == {"blocks/cd/cdef": 2}
    with pytest.raises(CorruptDataError, match="abcd"):
        archive.read("blocks/ab/abcd")


def test_exists_when_nothing_was_written_yet_then_false(archive: Archive) -> None:
    assert not archive.exists()
    archive.write("others/a", b"")
    assert archive.exists()


@pytest.mark.parametrize("scheme", ["", "file://", "local://"])
def test_contents_when_of_this_machine_then_closed_to_other_users(tmp_path: Path, scheme: str) -> None:
    open_archive(f"{scheme}{tmp_path}").write("blocks/a", b"1")
    assert (tmp_path / "blocks/a").stat().st_mode & 0o077 == 0


def test_folder_when_a_write_was_cut_short_then_not_listed(tmp_path: Path) -> None:
    (tmp_path / "blocks").mkdir()
    (tmp_path / "blocks/.unfinished-x").write_bytes(b"half")
    assert open_archive(tmp_path).list_sizes("blocks") == {}


def test_place_when_it_cannot_be_written_then_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises((InvalidRequestError, CorruptDataError)):
        open_archive(tmp_path / "file").write("a", b"x")
    with pytest.raises(InvalidRequestError, match="nowhere"):
        open_archive("nowhere://x")


@pytest.mark.parametrize("scheme", ["", "simplecache::file://"])
def test_place_when_its_disk_is_full_then_a_capacity_error_and_no_part_of_the_content_stays(
    small_disk: Path, scheme: str
) -> None:
    archive = open_archive(f"{scheme}{small_disk}/place")
    archive.write("blocks/a", bytes(SMALL_DISK_BYTES // 2))
    with pytest.raises(CapacityError, match="No space left on device"):
        archive.write("blocks/b", bytes(SMALL_DISK_BYTES))
    assert archive.list_sizes("blocks") == {"blocks/a": SMALL_DISK_BYTES // 2}
    archive.write("blocks/b", bytes(SMALL_DISK_BYTES // 4))


@pytest.mark.parametrize("scheme", ["", "simplecache::file://"])
def test_content_when_it_cannot_be_written_in_full_then_no_part_of_it_stays(tmp_path: Path, scheme: str) -> None:
    archive = open_archive(f"{scheme}{tmp_path}/place")
    archive.write("blocks/a", b"1")
    with no_page_can_be_written(), pytest.raises(CapacityError):
        archive.write("blocks/b", bytes(1 << 20))
    assert archive.list_sizes("blocks") == {"blocks/a": 1}
    archive.write("blocks/b", b"22")
    assert archive.read("blocks/b") == b"22"


class FullStore(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """An object store with a quota: a content that it refuses to take leaves the one before as it was."""

    protocol = "full-store"
    quota_nbytes = 9

    def pipe_file(self, path: str, value: bytes, **kwargs: object) -> None:
        if len(value) > self.quota_nbytes:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        super().pipe_file(path, value, **kwargs)


def test_content_when_its_place_refuses_to_write_it_again_then_the_whole_one_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    register_implementation(FullStore.protocol, FullStore, clobber=True)
    archive = open_archive(f"full-store://{make_uid()}")
    archive.write("blocks/a", b"whole")
    archive.write("blocks/b", b"cut")
    monkeypatch.setattr(FullStore, "quota_nbytes", 2)
    for name in ("blocks/a", "blocks/b"):
        with pytest.raises(CapacityError, match=rf"{name} \(Disk quota exceeded\): asked 5"):
            archive.write(name, b"whole")
    assert archive.list_sizes("blocks") == {"blocks/a": 5}


@pytest.mark.parametrize("place", ["root", "root/below", "file://{}/root/below", "link/below"])
def test_place_when_in_a_root_then_refused_with_both_paths(tmp_path: Path, place: str) -> None:
    Root.acquire(tmp_path / "root").release()
    (tmp_path / "link").symlink_to(tmp_path / "root")
    named = place.format(tmp_path) if "://" in place else str(tmp_path / place)
    with pytest.raises(InvalidRequestError, match=f"{named} is in {tmp_path / 'root'}, the root of a server.*outside"):
        check_outside_roots(named)
    check_outside_roots(tmp_path / "beside")
    check_outside_roots("memory://root")


def test_place_when_in_a_root_that_is_not_made_yet_then_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="the root of a server"):
        check_outside_roots(tmp_path / "root" / "below", tmp_path / "root")
