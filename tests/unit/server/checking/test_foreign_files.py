"""Files of the user, or of other programs, in a root: they are nothing that tdserve compares, reports or removes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tdserve.server.checking.catalog_repairs import remove_file
from tdserve.server.checking.root_check import check_root
from tdserve.store.roots.file_sums import list_summed_files, record_sums
from tests.roots import make_quick_root
from tests.stored_root.unpacking import unpack_root

FOREIGN = ("serve.log", "notes/today.txt", "draft.new", "stores/README", "stores/.DS_Store", "arriving/README")


@pytest.fixture
def root() -> Iterator[Path]:
    """A copy of the stored root, with files of others that were there when its server ended."""
    with make_quick_root() as folder:
        root = unpack_root(folder / "root")
        for name in FOREIGN:
            path = root / name
            path.parent.mkdir(exist_ok=True)
            path.write_text("begun")
        (root / ".#lock").symlink_to("user@host.123:456")  # as an editor makes one, to nothing
        (root / "stores/link").symlink_to("nothing")
        record_sums(root, rereads=True)
        yield root


def test_foreign_files_when_there_then_have_no_checksum(root: Path) -> None:
    assert not {*FOREIGN, ".#lock", "stores/link"} & {*list_summed_files(root)}


def test_foreign_files_when_they_change_then_nothing_is_found_and_a_repair_leaves_them(root: Path) -> None:
    for name in FOREIGN:
        (root / name).write_text("ended")
    for repairs in (False, True):
        assert check_root(root, repairs=repairs).findings == ()
    assert (root / "stores/README").read_text() == (root / "draft.new").read_text() == "ended"


def test_folder_of_stores_when_it_is_gone_then_each_store_is_named(root: Path) -> None:
    (root / "stores").rename(root / "elsewhere")
    reasons = [each.reason for each in check_root(root).findings if each.path.startswith("stores/")]
    assert reasons
    assert {*reasons} == {"its folder is gone"}


def test_leftover_when_it_is_a_link_to_a_folder_then_the_link_alone_goes(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    assert remove_file(tmp_path / "link") == "it was removed"
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
