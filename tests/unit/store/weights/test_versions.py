"""Version files: readable by safetensors, recycled in place, never rewritten under a reader."""

from __future__ import annotations

import fcntl
import gc
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tdserve.base.errors import CapacityError, CorruptDataError, WrongStateError
from tdserve.store.weights.version_locks import lock_exclusively, lock_shared
from tdserve.store.weights.versions import VersionFile, discard, retire
from tdserve.structure.trees.dtypes import ITEMSIZE
from tdserve.structure.trees.tree import Node, Path as KeyPath, Spec, TensorLeaf
from tests.processes import num_open_below
from tests.unit.store.conftest import SMALL_DISK_BYTES
from tests.unit.store.locked import is_locked

INNER = Node((), None, None, None, (("bias", TensorLeaf("float64", (4,))), ("a.b", TensorLeaf("uint8", (3,)))))
SPEC = Spec(Node((), None, None, None, (("w", TensorLeaf("float32", (2, 3))), ("net", INNER))))
STAND_INS = {"complex32": torch.int16, "complex128": torch.int64, "float8_e8m0fnu": torch.uint8}


def publish(path: Path, value: int, *, spec: Spec = SPEC, recycles: Path | None = None) -> VersionFile:
    """Writes and seals a version whose bytes all are ``value``."""
    version = VersionFile.create(path, spec, metadata={"step": str(value)}, recycles=recycles)
    for leaf in version.leaves.values():
        leaf.fill_(value)
    version.seal()
    return version


def test_version_when_loaded_by_safetensors_then_has_every_leaf(tmp_path: Path) -> None:
    publish(tmp_path / "1.safetensors", 5)
    found = load_file(tmp_path / "1.safetensors")
    assert found.keys() == {"w", "net.bias", "net.a\\.b"}
    assert torch.equal(found["w"], torch.full((2, 3), 5.0))
    assert torch.equal(found["net.bias"], torch.full((4,), 5.0, dtype=torch.float64))
    with safe_open(tmp_path / "1.safetensors", "pt") as file:
        metadata = file.metadata()
    assert metadata["step"] == "5"
    assert [leaf["key"] for leaf in json.loads(metadata["tdserve"])["leaves"]] == [
        list(path) for path, _ in SPEC.tensors
    ]


@pytest.mark.parametrize("dtype", ITEMSIZE)
@pytest.mark.parametrize("shape", [(), (3, 2), (3, 0)])
def test_version_when_of_any_dtype_then_safetensors_loads_its_bytes(
    tmp_path: Path, dtype: str, shape: tuple[int, ...]
) -> None:
    spec = Spec(Node((), None, None, None, (("__metadata__", TensorLeaf(dtype, shape)), ("b", TensorLeaf("bool", ())))))
    version = VersionFile.create(tmp_path / "1.safetensors", spec)
    leaf = version.leaves["__metadata__",]
    leaf.reshape(-1).view(torch.uint8).copy_(torch.arange(leaf.nbytes) % 2)
    version.seal()
    loaded = load_file(tmp_path / "1.safetensors")["\\__metadata__"]
    assert loaded.dtype == STAND_INS.get(dtype, leaf.dtype)
    assert torch.equal(loaded.reshape(-1).view(torch.uint8), leaf.reshape(-1).view(torch.uint8))
    assert loaded.shape == (*shape, 2) if dtype in ("complex32", "complex128") else loaded.shape == shape


def test_version_when_not_sealed_then_is_not_there(tmp_path: Path) -> None:
    version = VersionFile.create(tmp_path / "1.safetensors", SPEC)
    with pytest.raises(CorruptDataError):
        VersionFile.open(tmp_path / "1.safetensors", SPEC)
    version.write_values(b"opaque")
    version.seal()
    with VersionFile.open(tmp_path / "1.safetensors", SPEC) as opened:
        assert opened.read_values() == b"opaque"
        assert opened.metadata == {}


def test_version_when_recycled_then_keeps_inode_mapping_and_space(tmp_path: Path) -> None:
    first = publish(tmp_path / "1.safetensors", 1)
    first.write_values(b"of the first")
    inode = os.stat(first.path).st_ino
    retire(first.path)
    second = publish(tmp_path / "2.safetensors", 2, recycles=first.path)
    assert second.was_recycled
    assert second.leaves["w",].data_ptr() == first.leaves["w",].data_ptr()
    assert os.listdir(tmp_path) == ["2.safetensors"]
    assert os.stat(second.path).st_ino == inode
    assert load_file(second.path)["net.bias"].tolist() == [2.0] * 4
    assert VersionFile.open(second.path, SPEC).metadata == {"step": "2"}
    assert second.read_values() is None


def test_version_when_the_retired_one_is_being_read_then_is_a_fresh_file(tmp_path: Path) -> None:
    publish(tmp_path / "1.safetensors", 1)
    reader = VersionFile.open(tmp_path / "1.safetensors", SPEC)
    retire(reader.path)
    second = publish(tmp_path / "2.safetensors", 2, recycles=reader.path)
    assert not second.was_recycled
    assert reader.leaves["w",].eq(1).all()
    assert os.listdir(tmp_path) == ["2.safetensors"]
    reader.close()
    reader.close()


def test_version_when_the_retired_one_has_another_structure_then_is_a_fresh_file(tmp_path: Path) -> None:
    other = Spec(Node((), None, None, None, (("x", TensorLeaf("int64", (5,))),)))
    retire(publish(tmp_path / "1.safetensors", 1, spec=other).path)
    assert not publish(tmp_path / "2.safetensors", 2, recycles=tmp_path / "1.safetensors").was_recycled
    assert not publish(tmp_path / "3.safetensors", 3, recycles=tmp_path / "never.safetensors").was_recycled
    assert sorted(os.listdir(tmp_path)) == ["2.safetensors", "3.safetensors"]


def test_version_when_its_structure_has_the_same_size_then_is_recycled_with_its_own_leaves(tmp_path: Path) -> None:
    ints = Spec(Node((), None, None, None, (("x", TensorLeaf("int64", (4,))), ("y", TensorLeaf("int64", (2,))))))
    floats = Spec(Node((), None, None, None, (("x", TensorLeaf("float64", (2,))), ("y", TensorLeaf("float64", (4,))))))
    retire(publish(tmp_path / "1.safetensors", 1, spec=ints).path)
    second = publish(tmp_path / "2.safetensors", 2, spec=floats, recycles=tmp_path / "1.safetensors")
    assert second.was_recycled
    assert {name: leaf.tolist() for name, leaf in load_file(second.path).items()} == {"x": [2.0] * 2, "y": [2.0] * 4}


def test_version_when_being_written_then_a_reader_of_the_file_cannot_lock_it(tmp_path: Path) -> None:
    version = VersionFile.create(tmp_path / "1.safetensors", SPEC)
    with (tmp_path / "1.safetensors.part").open("rb") as file:
        with pytest.raises(BlockingIOError):
            lock_shared(file.fileno())
        version.seal()
        lock_shared(file.fileno())


@pytest.mark.parametrize("nbytes", [0, 7, 100, 4096, 4096 + SPEC.nbytes - 1, 4096 + SPEC.nbytes + 1])
def test_version_when_truncated_or_grown_then_is_corrupt(tmp_path: Path, nbytes: int) -> None:
    path = publish(tmp_path / "1.safetensors", 1).path
    assert path.stat().st_size == 4096 + SPEC.nbytes
    os.truncate(path, nbytes)
    with pytest.raises(CorruptDataError, match=str(path)):
        VersionFile.open(path, SPEC)


def test_version_when_an_unfinished_one_has_its_name_then_replaces_it(tmp_path: Path) -> None:
    VersionFile.create(tmp_path / "1.safetensors", SPEC)
    assert publish(tmp_path / "1.safetensors", 3).leaves["w",].eq(3).all()
    assert os.listdir(tmp_path) == ["1.safetensors"]


def test_version_when_the_disk_is_full_then_no_file_stays_and_recycling_still_works(small_disk: Path) -> None:
    spec = Spec(Node((), None, None, None, (("x", TensorLeaf("uint8", (SMALL_DISK_BYTES * 2 // 3,))),)))
    path = publish(small_disk / "1.safetensors", 1, spec=spec).path
    with pytest.raises(CapacityError):
        VersionFile.create(small_disk / "2.safetensors", spec)
    assert os.listdir(small_disk) == ["1.safetensors"]
    retire(path)
    publish(small_disk / "2.safetensors", 2, spec=spec, recycles=path)
    discard(small_disk / "2.safetensors")
    publish(small_disk / "3.safetensors", 3, spec=spec)


def test_leaves_when_listed_then_are_in_canonical_order(tmp_path: Path) -> None:
    paths: list[KeyPath] = list(publish(tmp_path / "1.safetensors", 1).leaves)
    assert paths == [path for path, _ in SPEC.tensors]


def test_leaf_contents_when_asked_for_then_the_bytes_of_every_leaf_in_canonical_order(tmp_path: Path) -> None:
    version = VersionFile.create(tmp_path / "1.safetensors", SPEC)
    for number, leaf in enumerate(version.leaves.values()):
        leaf.fill_(number + 1)
    expected = [leaf.view(-1).view(torch.uint8).tolist() for leaf in version.leaves.values()]
    assert [content.tolist() for content in version.iter_leaf_contents()] == expected
    version.seal()


def test_map_when_the_user_writes_into_the_tensors_then_the_version_stays_as_it_is(tmp_path: Path) -> None:
    publish(tmp_path / "1.safetensors", 5).write_values(b"values")
    with VersionFile.map(tmp_path / "1.safetensors", SPEC) as mapped:
        assert mapped.metadata == {"step": "5"}
        assert mapped.read_values() == b"values"
        mapped.leaves["w",].fill_(9)
    other = VersionFile.map(tmp_path / "1.safetensors", SPEC)
    assert other.leaves["w",].eq(5).all()
    assert load_file(tmp_path / "1.safetensors")["w"].eq(5).all()


def test_map_when_the_version_is_retired_then_not_rewritten_while_any_of_its_tensors_lives(tmp_path: Path) -> None:
    publish(tmp_path / "1.safetensors", 1)
    kept = VersionFile.map(tmp_path / "1.safetensors", SPEC).leaves["net", "bias"][1:]
    gc.collect()
    assert is_locked(tmp_path / "1.safetensors")
    retire(tmp_path / "1.safetensors")
    second = publish(tmp_path / "2.safetensors", 2, recycles=tmp_path / "1.safetensors")
    assert not second.was_recycled
    assert kept.eq(1).all()
    assert os.listdir(tmp_path) == ["2.safetensors"]


def test_map_when_the_last_of_its_tensors_is_gone_then_the_file_is_recycled_and_nothing_stays_open(
    tmp_path: Path,
) -> None:
    publish(tmp_path / "1.safetensors", 1)
    num_open = num_open_below(tmp_path)
    leaves = VersionFile.map(tmp_path / "1.safetensors", SPEC).leaves
    assert num_open_below(tmp_path) == num_open + 1
    del leaves
    gc.collect()
    assert num_open_below(tmp_path) == num_open
    retire(tmp_path / "1.safetensors")
    assert publish(tmp_path / "2.safetensors", 2, recycles=tmp_path / "1.safetensors").was_recycled


def test_map_when_it_cannot_be_then_error_and_no_descriptor_stays(tmp_path: Path) -> None:
    path = publish(tmp_path / "1.safetensors", 1).path
    other = Spec(Node((), None, None, None, (("x", TensorLeaf("int64", (5,))),)))
    num_open = num_open_below(tmp_path)
    with pytest.raises(CorruptDataError):
        VersionFile.map(path, other)
    with pytest.raises(CorruptDataError):
        VersionFile.map(tmp_path / "2.safetensors", SPEC)
    with path.open("r+b") as writer:
        lock_exclusively(writer.fileno())
        with pytest.raises(WrongStateError, match="retired"):
            VersionFile.map(path, SPEC)
    os.truncate(path, 4096)
    with pytest.raises(CorruptDataError):
        VersionFile.map(path, SPEC)
    assert num_open_below(tmp_path) == num_open


def test_version_when_a_reader_would_lock_it_for_itself_then_refused(tmp_path: Path) -> None:
    """A reader of another user with a descriptor for reading cannot keep others from reading."""
    path = publish(tmp_path / "1.safetensors", 1).path
    with path.open("rb") as reader:
        with pytest.raises(OSError, match="Bad file descriptor"):
            lock_exclusively(reader.fileno())
        fcntl.flock(reader, fcntl.LOCK_EX)
        VersionFile.open(path, SPEC).close()


def test_create_when_it_makes_a_file_then_closed_to_others_until_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes: list[int] = []
    part = tmp_path / "1.safetensors.part"
    monkeypatch.setattr("tdserve.store.weights.versions.reach", lambda _step: modes.append(part.stat().st_mode & 0o777))
    VersionFile.create(tmp_path / "1.safetensors", SPEC)
    assert modes == [0o600]
    assert part.stat().st_mode & 0o777 == tmp_path.stat().st_mode & 0o666
