from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tdserve.base.errors import CorruptDataError
from tdserve.client.local import local_writes
from tdserve.client.local.end import LocalEnd
from tdserve.client.local.local_writes import put_rows, put_selection, put_version
from tdserve.client.local.root_files import SeenFiles
from tdserve.data.mapped_stores import MappedStore, OpenStores
from tdserve.messages.row_numbers import encode_rows
from tdserve.messages.selection.selection import parse
from tdserve.store.weights.versions import VersionFile, retire
from tdserve.structure.captures.capture import capture
from tdserve.v1 import content_pb2, control_pb2
from tests.unit.worker.peer import StoredTensorDict


def like(num_rows: int, number: int) -> TensorDict:
    """Rows of every kind of leaf, all of this number."""
    return TensorDict(
        {
            "a": torch.full((num_rows,), number),
            "h": torch.full((num_rows, 3), float(number), dtype=torch.bfloat16),
            "flag": torch.full((num_rows,), number > 0),
            "n": {"z": torch.full((num_rows, 2, 2), complex(number, 1), dtype=torch.complex64)},
            "none": torch.zeros(num_rows, 0),
        },
        [num_rows],
    )


@pytest.fixture
def files(tmp_path: Path) -> StoredTensorDict:
    """A store of eight rows of minus one."""
    return StoredTensorDict(tmp_path / "store", like(8, -1))


@pytest.fixture
def store(files: StoredTensorDict) -> MappedStore:
    """The same, mapped by a client."""
    stores = OpenStores(writes_values=False)
    return stores.get(files.ref, files.spec)


def rows_for(rows: list[int], *columns: tuple[str, ...]) -> control_pb2.Accepted:
    """Rows that the server has reserved."""
    return control_pb2.Accepted(
        rows=encode_rows(np.array(rows, np.int64)), columns=[content_pb2.Path(parts=path) for path in columns]
    )


def whole(files: StoredTensorDict) -> TensorDict:
    """Returns all that is stored."""
    found = TensorDict({}, [8])
    for path, leaf in files.leaves.items():
        found[path] = leaf
    return found


@pytest.mark.parametrize("rows", [[2, 3, 4], [6, 7, 0], [7, 6, 5], [1, 3, 5], [4, 4, 5]])
def test_put_rows_when_anywhere_then_there_and_nowhere_else(
    store: MappedStore, files: StoredTensorDict, rows: list[int]
) -> None:
    batch = torch.cat([like(1, number) for number in (1, 2, 3)])
    expected = like(8, -1)
    expected[rows] = batch
    put_rows(store, rows_for(rows), [capture(batch)])
    assert (whole(files) == expected).all()


def test_put_rows_when_leaves_are_long_then_looks_up_after_each(
    store: MappedStore, files: StoredTensorDict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_writes, "LONG_COPY_BYTES", 2 * 2 * 2 * 8)  # of two rows, only "z" has so many
    seen: list[list[int]] = []
    parts = [like(2, 1), like(1, 2), like(2, 3)]
    captured = [capture(part) for part in parts]
    put_rows(
        store,
        rows_for([2, 3, 4, 5, 6]),
        captured,
        look=lambda: seen.append(files.leaves["n", "z"].real[:, 0, 0].tolist()),
    )
    assert [[int(number) for number in each] for each in seen] == [
        [-1, -1, 1, 1, -1, -1, -1, -1],
        [-1, -1, 1, 1, 2, 3, 3, -1],
    ]


def test_put_rows_when_of_several_extends_then_one_after_the_other(store: MappedStore, files: StoredTensorDict) -> None:
    parts = [like(2, 1), like(0, 9), like(1, 2), like(3, 3)]
    put_rows(store, rows_for([5, 6, 7, 0, 1, 2]), [capture(part) for part in parts])
    assert files.leaves["a",].tolist() == [3, 3, 3, -1, -1, 1, 1, 2]


def test_put_rows_when_leaves_are_views_of_others_then_their_content(
    store: MappedStore, files: StoredTensorDict
) -> None:
    batch = like(4, 5)
    batch["h"] = torch.arange(12, dtype=torch.bfloat16).view(3, 4).T
    batch["n", "z"] = torch.full((1, 2, 2), 2 + 3j).expand(4, 2, 2).conj()
    put_rows(store, rows_for([0, 1, 2, 3]), [capture(batch)])
    assert torch.equal(files.leaves["h",][:4], batch["h"])
    assert torch.equal(files.leaves["n", "z"][:4], batch["n", "z"].resolve_conj())


def test_put_rows_when_they_lack_leaves_then_those_are_zero_there(store: MappedStore, files: StoredTensorDict) -> None:
    only_a = TensorDict({"a": like(2, 4)["a"]}, [2])
    put_rows(store, rows_for([1, 2]), [capture(only_a)])
    assert files.leaves["a",].tolist() == [-1, 4, 4, -1, -1, -1, -1, -1]
    assert files.leaves["h",][:, 0].tolist() == [-1, 0, 0, -1, -1, -1, -1, -1]
    assert files.leaves["n", "z"][1:3].abs().sum() == 0


def test_put_rows_when_the_rules_look_at_leaves_then_the_report_has_their_bytes_and_zeros_for_absent_ones(
    store: MappedStore,
) -> None:
    batch = TensorDict({"a": torch.tensor([1, 2])}, [2])
    written = put_rows(store, rows_for([5, 0], ("a",), ("flag",)), [capture(batch)])
    assert [np.frombuffer(written.columns[0], np.int64).tolist(), written.columns[1]] == [[1, 2], bytes(2)]


@pytest.mark.parametrize(
    "index", [(), slice(None), slice(1, 4), slice(None, None, 3), 2, -1, [5, 0], torch.arange(8) % 3 == 0]
)
def test_put_selection_when_any_index_is_given_then_as_an_assignment_would(
    store: MappedStore, files: StoredTensorDict, index: Any
) -> None:
    expected = like(8, -1)
    new = like(8, 6)[index] if index != () else like(8, 6)
    expected[index if index != () else slice(None)] = new
    put_selection(store, parse(index), capture(new))
    assert (whole(files) == expected).all()


def test_put_selection_when_of_some_leaves_or_of_views_then_only_those(
    store: MappedStore, files: StoredTensorDict
) -> None:
    ones = torch.ones(1, 3, dtype=torch.bfloat16).expand(8, 3)
    put_selection(store, parse(()), capture(TensorDict({"h": ones}, [8])))
    assert files.leaves["h",].eq(1).all()
    put_selection(store, parse([1, 2]), capture(TensorDict({"h": torch.arange(6.0).bfloat16().view(3, 2).T}, [2])))
    assert files.leaves["h",][1:3].tolist() == [[0, 2, 4], [1, 3, 5]]
    assert files.leaves["a",].eq(-1).all()


WEIGHTS = TensorDict({"w": torch.arange(6.0).view(2, 3), "n": {"b": torch.ones(4).bfloat16()}}, [])


def version_at(number: int, recycles: int = 0) -> control_pb2.Accepted:
    """Returns where the server wants the version."""
    old = f"versions/{recycles}.safetensors" if recycles else ""
    return control_pb2.Accepted(path=f"versions/{number}.safetensors", recycles=old)


@pytest.fixture
def end(tmp_path: Path) -> LocalEnd:
    """Whose root is ``tmp_path``."""
    (tmp_path / "versions").mkdir()
    return LocalEnd(SeenFiles(tmp_path), lock=None, spool=None, lacks_values=False)


def test_put_version_when_done_then_sealed_with_its_values(end: LocalEnd, tmp_path: Path) -> None:
    captured = capture(WEIGHTS)
    put_version(end, version_at(1), captured, b"values")
    with VersionFile.open(tmp_path / "versions/1.safetensors", captured.spec) as found:
        assert torch.equal(found.leaves["w",], WEIGHTS["w"])
        assert torch.equal(found.leaves["n", "b"], WEIGHTS["n", "b"])
        assert found.read_values() == b"values"


def test_put_version_when_an_old_one_is_recycled_then_in_its_file_and_nothing_of_it_is_left(
    end: LocalEnd, tmp_path: Path
) -> None:
    put_version(end, version_at(1), capture(WEIGHTS), b"values")
    inode = (tmp_path / "versions/1.safetensors").stat().st_ino
    retire(tmp_path / "versions/1.safetensors")
    put_version(end, version_at(2, recycles=1), capture(WEIGHTS.apply(lambda leaf: leaf + 1)), b"")
    assert [path.name for path in (tmp_path / "versions").iterdir()] == ["2.safetensors"]
    assert (tmp_path / "versions/2.safetensors").stat().st_ino == inode
    with VersionFile.open(tmp_path / "versions/2.safetensors", capture(WEIGHTS).spec) as found:
        assert torch.equal(found.leaves["w",], WEIGHTS["w"] + 1)


def test_put_version_when_its_folder_is_gone_then_error(end: LocalEnd, tmp_path: Path) -> None:
    (tmp_path / "versions").rmdir()
    with pytest.raises(CorruptDataError):
        put_version(end, version_at(1), capture(WEIGHTS), b"")
