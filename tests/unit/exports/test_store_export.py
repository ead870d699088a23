"""tdserve/exports/store_export.py: a folder takes the place of another."""

from __future__ import annotations

from pathlib import Path

import pytest

from tdserve.exports import store_export
from tdserve.exports.store_export import replace_folder
from tdserve.store.disk.files import exchange_paths


@pytest.fixture(params=["exchange", "two renames"])
def folders(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A new folder, and the one that it is to replace; also as on a file system that cannot exchange them."""
    if request.param == "two renames":
        monkeypatch.setattr(store_export, "exchange_paths", lambda path, other: False)
    made, target = tmp_path / "temporary" / "made", tmp_path / "target"
    for folder, content in ((made, "new"), (target, "old")):
        folder.mkdir(parents=True)
        (folder / "file").write_text(content)
    return made, target


def test_folder_when_replaced_then_the_new_one_is_there(folders: tuple[Path, Path]) -> None:
    made, target = folders
    replace_folder(made, target)
    assert (target / "file").read_text() == "new"


def test_folder_when_the_new_one_cannot_take_its_place_then_the_old_one_is_there(folders: tuple[Path, Path]) -> None:
    made, target = folders
    made.rename(made.with_name("elsewhere"))
    with pytest.raises(FileNotFoundError):
        replace_folder(made, target)
    assert (target / "file").read_text() == "old"


def test_exchange_when_both_exist_then_each_has_the_place_of_the_other(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    other.write_text("a file")
    if exchange_paths(one, other):  # else the file system cannot
        assert one.read_text() == "a file"
        assert other.is_dir()
