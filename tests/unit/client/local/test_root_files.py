from __future__ import annotations

from pathlib import Path

import pytest

from tdserve.base.errors import CorruptDataError, TransferAbortedError
from tdserve.client.local.end import LocalEnd
from tdserve.client.local.root_files import MAX_KEPT_FOLDERS, SeenFiles
from tdserve.store.weights.version_marks import begin_marks

PATH = "stores/w/versions/1.safetensors"


def make_store(root: Path, uid: str, name: str = "w") -> Path:
    """Makes the folder of a weights store whose version is its incarnation."""
    folder = root / "stores" / name
    (folder / "versions").mkdir(parents=True)
    begin_marks(folder / "versions", uid=uid)
    (folder / "versions" / "1.safetensors").write_text(uid)
    return folder


def make_end(root: Path) -> LocalEnd:
    """Makes the local end of a root that this process sees."""
    return LocalEnd(SeenFiles(root), lock=None, spool=None, lacks_values=False)


def test_locate_when_the_folder_is_of_another_incarnation_then_aborted(tmp_path: Path) -> None:
    make_store(tmp_path, "later")
    with pytest.raises(TransferAbortedError, match="'w' was deleted"), make_end(tmp_path).locate(PATH, "earlier"):
        pass
    with make_end(tmp_path).locate(PATH, "later") as file:
        assert file.read_text() == "later"


def test_locate_when_the_store_is_created_again_meanwhile_then_all_files_are_of_the_one_that_was_named(
    tmp_path: Path,
) -> None:
    end, folder = make_end(tmp_path), make_store(tmp_path, "earlier")
    with end.locate(PATH, "earlier") as file:
        folder.rename(tmp_path / "trash")
        make_store(tmp_path, "later")
        assert file.read_text() == "earlier"
    with end.locate(PATH, "later") as file:
        assert file.read_text() == "later"


def test_locate_when_its_file_is_gone_then_the_folder_is_looked_up_again(tmp_path: Path) -> None:
    end, folder = make_end(tmp_path), make_store(tmp_path, "one")
    with end.locate(PATH, "one"):
        pass
    folder.rename(tmp_path / "moved")
    (tmp_path / "moved" / "versions" / "1.safetensors").unlink()
    make_store(tmp_path, "one")  # it has moved away, and come back
    with pytest.raises(TransferAbortedError), end.locate(PATH, "one"):
        raise TransferAbortedError(transfer=0, reason="version 1 is gone")
    with end.locate(PATH, "one") as file:
        assert file.read_text() == "one"


def test_locate_when_a_file_is_damaged_then_the_error_names_it_as_the_user_sees_it(tmp_path: Path) -> None:
    make_store(tmp_path, "one")
    with pytest.raises(CorruptDataError) as raised, make_end(tmp_path).locate(PATH, "one") as file:
        raise CorruptDataError(path=str(file), expected="a version", actual="none")
    assert raised.value.fields["path"] == str(tmp_path / PATH)


def test_open_folder_when_there_are_many_then_those_used_longest_ago_are_closed(tmp_path: Path) -> None:
    files = SeenFiles(tmp_path)
    for number in range(MAX_KEPT_FOLDERS + 1):
        make_store(tmp_path, "one", f"w{number}")
        assert not files.open_folder(f"w{number}", uid="one").is_kept
    assert files.open_folder("w1", uid="one").is_kept
    assert not files.open_folder("w0", uid="one").is_kept
