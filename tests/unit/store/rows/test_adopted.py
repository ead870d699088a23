"""What a store's folder says of the user's folder that it was made of."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from tdserve.base.errors import CorruptDataError, InvalidRequestError, ReadOnlyError
from tdserve.store.rows.adoptable import read_folder
from tdserve.store.rows.adopted import FILE_NAME, Adopted, check_adopted, is_within, resolve_path
from tdserve.store.rows.mapping import open_leaves
from tdserve.structure.captures.capture import capture
from tdserve.structure.trees.tree import Spec
from tests.errors import raises


def example() -> TensorDict:
    """Leaves at two levels, one without elements."""
    return TensorDict({"a": torch.arange(4), "z": torch.zeros(4, 0), "n": {"b/c": torch.rand(4, 2)}}, [4])


def adopt(tmp_path: Path, *, read_only: bool = False) -> tuple[Path, Spec]:
    """A store's folder that leads to ``<tmp_path>/f``, and the structure."""
    example().memmap(tmp_path / "f")
    found = read_folder(str(tmp_path / "f"), writable=not read_only)
    Adopted.from_folder(found, read_only=read_only).link(tmp_path / "store")
    return tmp_path / "store", found.spec


def test_adopted_when_saved_then_loaded_equal_and_none_for_another_store(tmp_path: Path) -> None:
    store, _ = adopt(tmp_path, read_only=True)
    adopted = Adopted.load(store)
    assert adopted is not None
    assert (adopted.path, adopted.read_only) == (str(tmp_path / "f"), True)
    assert dict(adopted.files)["n", "b/c"] == ("n", "b%2Fc.memmap")
    adopted.save(store)
    assert Adopted.load(store) == adopted
    assert Adopted.load(tmp_path) is None


def test_leaves_when_opened_then_the_users_own_files(tmp_path: Path) -> None:
    store, spec = adopt(tmp_path)
    os.truncate(tmp_path / "f/a.memmap", 8192)  # longer than its content
    leaves = open_leaves(store, spec)
    assert leaves["z",].shape == (4, 0)
    leaves["n", "b/c"].fill_(7.0)
    leaves["a",][1] = 9
    seen = TensorDict.load_memmap(tmp_path / "f")
    assert seen["a"].tolist() == [0, 9, 2, 3]
    assert (seen["n", "b/c"] == 7).all()
    assert (TensorDict.load_memmap(store / "rows") == seen).all()


def test_leaves_when_read_only_then_never_writable(tmp_path: Path) -> None:
    store, spec = adopt(tmp_path, read_only=True)
    with pytest.raises(ReadOnlyError, match=str(tmp_path / "f")):
        open_leaves(store, spec)
    assert open_leaves(store, spec, writable=False)["a",].tolist() == [0, 1, 2, 3]
    mine = open_leaves(store, spec, writable=False, is_private=True)
    mine["a",][0] = 5
    assert open_leaves(store, spec, writable=False)["a",][0] == 0


def test_leaves_when_a_file_was_cut_short_then_data_loss(tmp_path: Path) -> None:
    store, spec = adopt(tmp_path)
    os.truncate(tmp_path / "f/a.memmap", 31)
    with pytest.raises(CorruptDataError, match=r"32 bytes at key 'a', found 31 bytes"):
        open_leaves(store, spec)


def test_leaves_when_a_symlink_took_a_files_place_then_data_loss(tmp_path: Path) -> None:
    store, spec = adopt(tmp_path)
    (tmp_path / "f/a.memmap").rename(tmp_path / "a")
    (tmp_path / "f/a.memmap").symlink_to(tmp_path / "a")
    with pytest.raises(CorruptDataError, match=r"a\.memmap"):
        open_leaves(store, spec)


def test_leaves_when_the_folder_is_not_seen_here_then_data_loss_with_the_remedy(tmp_path: Path) -> None:
    store, spec = adopt(tmp_path)
    (tmp_path / "f").rename(tmp_path / "g")
    with pytest.raises(CorruptDataError, match=r"No such file.*transport='gloo'"):
        open_leaves(store, spec)


def test_leaves_when_another_folder_took_the_name_then_data_loss(tmp_path: Path) -> None:
    store, spec = adopt(tmp_path)
    shutil.copytree(tmp_path / "f", tmp_path / "g")
    shutil.rmtree(tmp_path / "f")
    (tmp_path / "g").rename(tmp_path / "f")
    (tmp_path / "keeps the inode").mkdir()
    adopted = Adopted.load(store)
    assert adopted is not None
    replace(adopted, inode=adopted.inode + 1).save(store)
    with pytest.raises(CorruptDataError, match="another folder"):
        open_leaves(store, spec)
    check_adopted(store, spec)  # the server looks again: it is as good
    assert open_leaves(store, spec)["a",].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("wanted", ["/etc", "..", ""])
def test_plan_when_a_name_leads_elsewhere_then_not_followed(tmp_path: Path, wanted: str) -> None:
    store, spec = adopt(tmp_path)
    adopted = Adopted.load(store)
    assert adopted is not None
    files = tuple((path, (wanted, *names)) if path == ("a",) else (path, names) for path, names in adopted.files)
    replace(adopted, files=files).save(store)
    with pytest.raises(CorruptDataError, match="leaf 'a'"):
        open_leaves(store, spec)


def test_check_when_nothing_changed_then_nothing(tmp_path: Path) -> None:
    store, spec = adopt(tmp_path)
    check_adopted(store, spec)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (TensorDict({"a": torch.arange(5)}, [5]), r"\[4\].*\[5\]"),
        (example().exclude("a"), "'a'"),
        (example().set("new", torch.ones(4)), "'new'"),
        (example().set("a", torch.ones(4)), "'a'"),
    ],
)
def test_check_when_the_structure_changed_then_corrupt_data_names_the_place(
    tmp_path: Path, changed: TensorDict, said: str
) -> None:
    store, spec = adopt(tmp_path)
    shutil.rmtree(tmp_path / "f")
    changed.memmap(tmp_path / "f")
    with pytest.raises(CorruptDataError, match=said):
        check_adopted(store, spec)


def test_check_when_gone_then_data_loss_and_so_without_the_own_file(tmp_path: Path) -> None:
    store, spec = adopt(tmp_path)
    (tmp_path / "f").rename(tmp_path / "g")
    with pytest.raises(CorruptDataError, match=str(tmp_path / "f")):
        check_adopted(store, spec)
    (tmp_path / "g").rename(tmp_path / "f")
    TensorDict({"p": torch.device("cpu")}).memmap(tmp_path / "p")
    shutil.copy(tmp_path / "p/p/other.pickle", tmp_path / "f")
    with pytest.raises(CorruptDataError, match="pickle"):
        check_adopted(store, spec)
    (store / FILE_NAME).unlink()
    with pytest.raises(CorruptDataError, match=FILE_NAME):
        check_adopted(store, spec)


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"path": 1, "files": 3}', b"\xff"])
def test_load_when_the_file_is_damaged_then_data_loss(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE_NAME).write_bytes(content)
    with pytest.raises(CorruptDataError, match=FILE_NAME):
        Adopted.load(tmp_path)


def test_spec_when_of_a_folder_then_that_of_the_loaded_tensordict(tmp_path: Path) -> None:
    _, spec = adopt(tmp_path)
    assert spec == capture(TensorDict.load_memmap(tmp_path / "f")).spec


def test_within_when_a_name_only_begins_alike_then_not() -> None:
    assert is_within("/a/b", "/a/b")
    assert is_within("/a/b/c", "/a/b")
    assert not is_within("/a/bc", "/a/b")
    assert is_within("/a", "/")


def test_real_path_when_of_a_symlink_then_where_it_leads_and_never_relative(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "f")
    assert resolve_path(str(tmp_path / "link/../link")) == os.path.realpath(tmp_path / "f")
    for path in ("f", "", "/a\0b", "/\udcff"):
        with raises(InvalidRequestError, argument="path"):
            resolve_path(path)
