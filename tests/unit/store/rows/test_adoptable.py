"""Reads of folders that tensordict has written, compared with tensordict's own reads."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict, tensorclass

from tdserve.base.errors import (
    CapacityError,
    CorruptDataError,
    InvalidRequestError,
    InvalidSpecError,
    NotSupportedError,
    TDServeError,
)
from tdserve.store.rows.adoptable import has_meta, open_folder, read_folder
from tdserve.structure.captures.capture import capture


@tensorclass
class Shot:
    """A tensorclass with a field of every kind."""

    image: torch.Tensor
    label: str
    note: str | None = None
    inner: TensorDict | None = None


ROWS = 3


def shots() -> Any:
    """Rows of a tensorclass with a tensordict in it."""
    inner = TensorDict({"k": torch.ones(ROWS)}, [ROWS])
    return Shot(image=torch.arange(6).view(ROWS, 2), label="cat", inner=inner, batch_size=[ROWS])  # type: ignore[call-arg]


KINDS: dict[str, Callable[[], Any]] = {
    "flat": lambda: TensorDict({"a": torch.arange(ROWS), "b": torch.rand(ROWS, 2)}, [ROWS]),
    "no rows": lambda: TensorDict({"w": torch.rand(4, 2), "n": {"b": torch.zeros(())}}, []),
    "named": lambda: TensorDict({"a": torch.rand(ROWS, 2), "n": TensorDict({}, [ROWS, 2])}, [ROWS], names=["t"]),
    "nested": lambda: TensorDict({"n": {"m": {"x": torch.rand(ROWS, 2).half()}, "e": {}}}, [ROWS]),
    "odd keys": lambda: TensorDict({"": torch.rand(ROWS), "a/b": {"..": torch.rand(ROWS), "%": {}}, "ü": {}}, [ROWS]),
    "no elements": lambda: TensorDict({"z": torch.zeros(ROWS, 0), "a": torch.zeros(ROWS)}, [ROWS]),
    "own names": lambda: TensorDict({"_class": torch.rand(ROWS), "_format_version": torch.rand(ROWS)}, [ROWS]),
    "tensorclass": shots,
    "tensorclass inside": lambda: TensorDict({"s": shots(), "a": torch.rand(ROWS)}, [ROWS]),
    "values": lambda: TensorDict(
        {"s": "text", "d": NonTensorData({"a": [1, None, 2.5]}, batch_size=[ROWS]), "n": {"t": "x"}}, [ROWS]
    ),
    "values per row": lambda: TensorDict(
        {"s": NonTensorStack("a", "b", "c"), "l": NonTensorStack([1], [2, 3], [])}, [3]
    ),
    "values per element": lambda: TensorDict(
        {"s": NonTensorStack(*[NonTensorStack("a", "b") for _ in range(ROWS)])}, [ROWS, 2]
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_folder_when_tensordict_wrote_it_then_structure_and_values_are_those_that_it_reads(
    tmp_path: Path, kind: str
) -> None:
    KINDS[kind]().memmap(tmp_path / "f")
    found = read_folder(str(tmp_path / "f"), writable=True)
    expected = capture(TensorDict.load_memmap(tmp_path / "f", allow_pickle=False))
    assert found.spec.fingerprint == expected.spec.fingerprint  # tensordict itself reads tensors before the rest
    assert {path: _listed(value) for path, value in found.values.items()} == {
        path: _listed(value) for path, value in expected.values.items()
    }
    for path, tensor in expected.tensors.items():
        if tensor.numel():
            assert tmp_path.joinpath("f", *found.files[path]).stat().st_size == tensor.nbytes


def _listed(value: Any) -> Any:
    if hasattr(value, "tolist"):
        value = value.tolist()
    return [_listed(item) for item in value] if isinstance(value, (list, tuple)) else value


def test_folder_when_its_keys_are_spelled_as_before_then_found(tmp_path: Path) -> None:
    td = TensorDict({"a b": torch.arange(3), "c%": {"x y": torch.ones(3)}}, [3])
    td.memmap(tmp_path / "f", robust_key=False)
    found = read_folder(str(tmp_path / "f"), writable=True)
    assert found.files == {("a b",): ("a b.memmap",), ("c%", "x y"): ("c%", "x y.memmap")}


def test_folder_when_its_files_have_holes_then_their_room_is_reserved_and_nothing_else_changes(tmp_path: Path) -> None:
    file = tmp_path / "f" / "a.memmap"
    TensorDict({"a": torch.zeros(100_000)}, [100_000]).memmap_like(tmp_path / "f")
    with open(file, "r+b") as opened:
        opened.write(b"content")
    before = file.read_bytes()
    read_folder(str(tmp_path / "f"), writable=True)
    assert file.stat().st_blocks * 512 < 400_000
    for _ in range(2):
        read_folder(str(tmp_path / "f"), writable=True, reserves=True)
        assert file.stat().st_blocks * 512 >= 400_000
    assert file.read_bytes() == before


def test_folder_when_its_disk_has_no_room_for_its_files_then_error_that_names_one(small_disk: Path) -> None:
    TensorDict({"a": torch.zeros(2 << 20)}, [2 << 20]).memmap_like(small_disk / "f")
    with pytest.raises(CapacityError, match=f"{small_disk}/f/a.memmap.*asked {8 << 20}"):
        read_folder(str(small_disk / "f"), writable=True, reserves=True)


def test_folder_when_float8_lies_there_then_carried_though_tensordict_cannot_read_it(tmp_path: Path) -> None:
    TensorDict({"a": torch.ones(3).to(torch.float8_e4m3fn)}, [3]).memmap(tmp_path / "f")
    found = read_folder(str(tmp_path / "f"), writable=True)
    assert dict(found.spec.tensors)["a",].dtype == "float8_e4m3fn"


def test_folder_when_a_file_is_longer_than_its_tensor_then_taken(tmp_path: Path) -> None:
    KINDS["flat"]().memmap(tmp_path)
    os.truncate(tmp_path / "a.memmap", 4096)
    assert ("a",) in read_folder(str(tmp_path), writable=True).files


def test_stack_of_values_when_its_elements_lie_apart_then_read(tmp_path: Path) -> None:
    TensorDict({"s": NonTensorStack("a", "b", "c")}, [3]).memmap(tmp_path)
    meta = json.loads((tmp_path / "s/meta.json").read_text())
    for number, value in enumerate(meta.pop("data")):
        NonTensorData(value).memmap(tmp_path / "s" / str(number))
    (tmp_path / "s/meta.json").write_text(json.dumps(meta))
    assert read_folder(str(tmp_path), writable=True).values == {("s",): ["a", "b", "c"]}


def lazy() -> Any:
    """Rows that differ."""
    rows = [TensorDict({"image": torch.ones(size), "label": "x"}) for size in range(ROWS)]
    return LazyStackedTensorDict(*rows)


@pytest.mark.parametrize(
    ("refused", "said"),
    [
        (lambda: {"q": lazy()}, r"LazyStackedTensorDict at key 'q'"),
        (lambda: {"n": {"j": torch.nested.nested_tensor([torch.ones(n) for n in (1, 2, 3)])}}, r"\('n', 'j'\)"),
        (lambda: {"p": NonTensorData(torch.device("cpu"))}, r"pickled value at key 'p'"),
        (lambda: {"p": NonTensorStack(*[torch.device("cpu")] * ROWS)}, r"pickled value at key 'p'"),
        (lambda: {"c": shots().set("label", torch.device("cpu"))}, "pickled value at"),
        (lambda: {"c": type(shots()).from_tensordict(lazy())}, r"LazyStackedTensorDict at key 'c'"),
    ],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_folder_when_no_store_can_hold_a_part_in_place_then_refused_by_its_key(
    tmp_path: Path, refused: Callable[[], Any], said: str
) -> None:
    TensorDict({"a": torch.ones(ROWS), **refused()}, [ROWS]).memmap(tmp_path)
    with pytest.raises(NotSupportedError, match=said):
        read_folder(str(tmp_path), writable=True)


def test_folder_when_it_is_a_single_value_then_refused(tmp_path: Path) -> None:
    NonTensorData("x").memmap(tmp_path)
    with pytest.raises(NotSupportedError, match="single value"):
        read_folder(str(tmp_path), writable=True)


@pytest.mark.parametrize("name", ["a.memmap", "n"])
def test_folder_when_a_symlink_is_in_it_then_refused_by_its_key(tmp_path: Path, name: str) -> None:
    TensorDict({"a": torch.ones(ROWS), "n": {"b": torch.ones(ROWS)}}, [ROWS]).memmap(tmp_path / "f")
    (tmp_path / "f" / name).rename(tmp_path / "elsewhere")
    (tmp_path / "f" / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(NotSupportedError, match=f"symlink at key '{name[0]}'"):
        read_folder(str(tmp_path / "f"), writable=True)


def test_folder_when_a_file_is_too_short_then_data_loss_with_leaf_and_both_sizes(tmp_path: Path) -> None:
    TensorDict({"n": {"b": torch.ones(ROWS)}}, [ROWS]).memmap(tmp_path)
    os.truncate(tmp_path / "n/b.memmap", 8)
    with pytest.raises(CorruptDataError, match=r"12 bytes at key \('n', 'b'\), found 8 bytes"):
        read_folder(str(tmp_path), writable=False)


@pytest.mark.parametrize("gone", ["a.memmap", "n/meta.json", "meta.json", "n"])
def test_folder_when_a_part_is_missing_then_data_loss(tmp_path: Path, gone: str) -> None:
    TensorDict({"a": torch.ones(ROWS), "n": {"b": torch.ones(ROWS)}}, [ROWS]).memmap(tmp_path)
    (tmp_path / gone).rename(tmp_path / "gone")
    with pytest.raises(CorruptDataError) as caught:
        read_folder(str(tmp_path), writable=True)
    assert gone in caught.value.path


def test_folder_when_it_is_not_there_then_data_loss(tmp_path: Path) -> None:
    with pytest.raises(CorruptDataError, match="No such file"):
        read_folder(str(tmp_path / "gone"), writable=True)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write every file")
def test_file_when_it_may_not_be_written_then_said_with_the_remedy_and_read_all_the_same(tmp_path: Path) -> None:
    KINDS["flat"]().memmap(tmp_path)
    (tmp_path / "a.memmap").chmod(0o400)
    with pytest.raises(NotSupportedError, match="read_only=True"):
        read_folder(str(tmp_path), writable=True)
    assert len(read_folder(str(tmp_path), writable=False).files) == 2
    (tmp_path / "a.memmap").chmod(0)
    with pytest.raises(InvalidRequestError, match=r"a\.memmap.*denied"):
        read_folder(str(tmp_path), writable=False)


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"", CorruptDataError),
        (b"[1]", CorruptDataError),
        (b"{" * 100_000, CorruptDataError),
        (b"[" * 100_000, CorruptDataError),
        (b'{"shape": "3"}', CorruptDataError),
        (b'{"shape": [true]}', CorruptDataError),
        (b'{"shape": [-1]}', CorruptDataError),
        (b'{"shape": [3], "a": {"dtype": "torch.float32"}}', CorruptDataError),
        (b'{"shape": [3], "a": {"dtype": "torch.float32", "shape": [4]}}', CorruptDataError),
        (b'{"shape": [3], "z": {"dtype": "torch.float32", "shape": [0]}}', InvalidSpecError),
        (b'{"shape": [3], "a": {"dtype": "torch.quint8", "shape": [3]}}', NotSupportedError),
        (b'{"shape": [3], "a": {}}', NotSupportedError),
        (b'{"shape": [3], "../x": {"type": "TensorDict"}}', CorruptDataError),
        (b'{"shape": [3], "\\ud800": {"dtype": "torch.float32", "shape": [3]}}', CorruptDataError),
        (b'{"shape": [3], "_type": "<class \'os.system\'>"}', NotSupportedError),
        (b'{"shape": [3], "_type": "<class \'tensordict.persistent.PersistentTensorDict\'>"}', NotSupportedError),
    ],
)
def test_meta_when_it_is_nonsense_then_typed_error(tmp_path: Path, content: bytes, error: type[TDServeError]) -> None:
    TensorDict({"a": torch.ones(ROWS)}, [ROWS]).memmap(tmp_path)
    (tmp_path / "meta.json").write_bytes(content)
    with pytest.raises(error):
        read_folder(str(tmp_path), writable=True)


def test_folder_when_it_holds_itself_then_ends(tmp_path: Path) -> None:
    meta = b'{"shape": [3], "n": {"type": "TensorDict"}}'
    folder = tmp_path
    for _ in range(60):
        (folder / "meta.json").write_bytes(meta)
        folder = folder / "n"
        folder.mkdir()
    with pytest.raises(InvalidSpecError, match="nested deeper"):
        read_folder(str(tmp_path), writable=True)


def test_folder_when_one_above_it_is_a_symlink_then_not_followed(tmp_path: Path) -> None:
    KINDS["flat"]().memmap(tmp_path / "private" / "td")
    (tmp_path / "open").symlink_to(tmp_path / "private")
    path = str(tmp_path / "open" / "td")
    for reading in (lambda: read_folder(path, writable=False), lambda: has_meta(path), lambda: open_folder(path)):
        with pytest.raises(CorruptDataError, match="symlink") as caught:
            reading()
        assert caught.value.fields["path"] == str(tmp_path / "open")
    assert has_meta(str(tmp_path / "private" / "td"))
    assert not has_meta(str(tmp_path / "private"))
    with pytest.raises(CorruptDataError):
        open_folder(str(tmp_path / "nothing" / "td"))
