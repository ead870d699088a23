from __future__ import annotations

from pathlib import Path

import pytest

from tdserve.base.errors import CorruptDataError, InvalidRequestError
from tdserve.base.ids import make_uid
from tdserve.store.archive import Archive, open_archive


@pytest.fixture(params=["folder", "url", "file-url"])
def archive(request: pytest.FixtureRequest, tmp_path: Path) -> Archive:
    places = {"folder": f"{tmp_path}/x", "url": f"memory://{make_uid()}", "file-url": f"file://{tmp_path}/y"}
    return open_archive(places[request.param])


def test_contents_when_written_then_read_listed_and_removed(archive: Archive) -> None:
    assert archive.list_names("blocks") == []
    archive.write("blocks/ab/abcd", b"1")
    archive.write("blocks/cd/cdef", b"2")
    archive.write("blocks/ab/abcd", b"3")
    archive.write("others/a", b"")
    assert archive.read("blocks/ab/abcd") == b"3"
    assert archive.read("others/a") == b""
    assert archive.list_names("blocks") == ["blocks/ab/abcd", "blocks/cd/cdef"]
    archive.remove("blocks/ab/abcd")
    archive.remove("blocks/ab/abcd")
    assert archive.list_names("blocks") == ["blocks/cd/cdef"]
    with pytest.raises(CorruptDataError, match="abcd"):
        archive.read("blocks/ab/abcd")


def test_folder_when_a_write_was_cut_short_then_not_listed(tmp_path: Path) -> None:
    (tmp_path / "blocks").mkdir()
    (tmp_path / "blocks/.unfinished-x").write_bytes(b"half")
    assert open_archive(tmp_path).list_names("blocks") == []


def test_place_when_it_cannot_be_written_then_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises((InvalidRequestError, CorruptDataError)):
        open_archive(tmp_path / "file").write("a", b"x")
    with pytest.raises(InvalidRequestError, match="nowhere"):
        open_archive("nowhere://x")
