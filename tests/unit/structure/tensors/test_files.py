from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from tensordict import LazyStackedTensorDict, NonTensorStack, PersistentTensorDict, TensorDict

from tdserve.base.errors import CorruptDataError
from tdserve.structure.building.build import build
from tdserve.structure.captures.capture import capture
from tdserve.structure.tensors.file_tensors import (
    FileTensor,
    is_in_file,
    iter_file_items,
    read_into_memory,
    read_strided_piece,
    split_blocks,
    split_spans,
)
from tests.sameness import difference
from tests.tensordict_versions import IS_OLD


def content() -> TensorDict:
    td = TensorDict(
        {"x": torch.arange(24.0).view(4, 6), "b": torch.tensor([True, False, True, True])}, [4], names=["time"]
    )
    td["n"] = TensorDict({"c": torch.arange(8).view(4, 2) * 1j, "u": torch.arange(4).to(torch.uint16)}, [4])
    td["text"] = NonTensorStack("a", "b", "c", "d")
    td["empty"] = torch.zeros(4, 0, dtype=torch.float16)
    return td


@pytest.fixture
def stored(tmp_path: Path) -> PersistentTensorDict:
    if IS_OLD:
        pytest.skip("tensordict 0.14 stores no stacks of values in files")
    made: PersistentTensorDict = PersistentTensorDict.from_dict(content(), tmp_path / "x.h5")
    return made


class Watched:
    """An array that keeps what was read of it at once."""

    def __init__(self, array: Any) -> None:
        self.array, self.shape, self.dtype = array, array.shape, array.dtype
        self.largest = 0

    def __getitem__(self, index: Any) -> Any:
        found = self.array[index]
        self.largest = max(self.largest, found.nbytes)
        return found


@pytest.mark.slow
@given(st.lists(st.integers(1, 4), max_size=4), st.data())
def test_blocks_when_any_elements_are_asked_for_then_they_come_in_order(shape: list[int], data: st.DataObject) -> None:
    whole = np.arange(math.prod(shape)).reshape(shape)
    first = data.draw(st.integers(0, whole.size))
    stop = data.draw(st.integers(first, whole.size))
    found = [whole[index].reshape(-1) for index in split_blocks(tuple(shape), first, stop)]
    assert np.concatenate([np.empty(0, int), *found]).tolist() == list(range(first, stop))
    assert len(found) <= 2 * len(shape) + 1


@pytest.mark.parametrize("shape", [(), (0, 3), (3,), (100, 1024, 128), (2, 3_000_000)])
def test_spans_when_put_together_then_they_are_all_and_none_is_long(shape: tuple[int, ...]) -> None:
    whole = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
    parts = [whole[index].reshape(-1) for index in split_spans(shape, 4)]
    assert np.array_equal(np.concatenate([np.empty(0, np.int32), *parts]), whole.reshape(-1))
    assert max((part.nbytes for part in parts), default=0) <= 4 << 20


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(60).view(3, 4, 5).permute(2, 0, 1),
        torch.arange(12).view(3, 4).t(),
        torch.arange(4).expand(3, 4),
        torch.arange(24)[::3],
        torch.arange(24.0).view(4, 6).to(torch.float8_e5m2).t(),
    ],
)
def test_strided_piece_when_elements_lie_in_any_order_then_gives_c_order(tensor: torch.Tensor) -> None:
    whole = tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).numpy()
    size = tensor.element_size()
    for start in range(0, len(whole), 3 * size):
        stop = min(start + 7 * size, len(whole))
        assert np.array_equal(read_strided_piece(tensor, start, stop), whole[start:stop])


def test_capture_when_tensordict_is_persistent_then_comes_back_as_a_tensordict(stored: PersistentTensorDict) -> None:
    captured = capture(stored)
    assert all(type(tensor) is FileTensor for tensor in captured.tensors.values())
    whole = {path: tensor.cpu() for path, tensor in captured.tensors.items()}
    expected = content().select(*stored.keys())  # HDF5 sorts its keys
    found = build(captured.spec, whole, captured.values)
    assert difference(expected, found) is None


def test_capture_when_tensordict_is_persistent_then_reads_no_tensor(stored: PersistentTensorDict) -> None:
    assert capture(stored).spec.batch_size == (4,)
    watched = Watched(stored.file["x"])
    tensor = FileTensor(watched, torch.float32)
    assert tensor.shape == (4, 6)
    assert tensor.nbytes == 96
    assert watched.largest == 0
    assert tensor.read_piece(4, 44).view(np.float32).tolist() == [float(number) for number in range(1, 11)]
    assert watched.largest == 5 * 4


def test_file_tensor_when_used_as_any_tensor_then_is_read(stored: PersistentTensorDict) -> None:
    tensor = dict(iter_file_items(stored))["x"]
    whole = content()["x"]
    assert tensor.cpu().equal(whole)
    assert type(tensor.cpu()) is torch.Tensor
    assert (tensor[1:] + 1).equal(whole[1:] + 1)
    assert torch.zeros(4, 6).copy_(tensor).equal(whole)
    assert tensor.to(torch.float64).dtype is torch.float64
    assert tensor.block((slice(1, 3),)).equal(whole[1:3])
    assert tensor.block((1, 2)).equal(whole[1, 2])
    assert "HDF5" in repr(tensor)


def test_capture_when_rows_of_a_file_are_given_then_reads_those_alone(stored: PersistentTensorDict) -> None:
    for index in (slice(1, 3), slice(None, None, 2), slice(3, 3)):
        rows = stored[index]
        assert is_in_file(rows)
        captured = capture(rows)
        assert captured.spec.batch_size == content()[index].batch_size
        assert type(captured.tensors[("x",)]) is FileTensor
        assert captured.tensors[("x",)].cpu().equal(content()["x"][index])
        assert captured.tensors[("n", "u")].cpu().equal(content()["n", "u"][index])
        assert captured.values[("text",)] == ["a", "b", "c", "d"][index]
    for number in (torch.tensor([3, 0]), 2):
        captured = capture(stored[number])
        assert captured.tensors[("x",)].equal(content()["x"][number])


def test_capture_when_rows_of_a_stack_are_in_files_then_they_are_read(stored: PersistentTensorDict) -> None:
    stack = LazyStackedTensorDict(stored, stored)
    found = capture(stack)
    assert found.tensors[("x",)].equal(torch.stack([content()["x"]] * 2))


def test_in_memory_when_nothing_is_in_a_file_then_is_the_same() -> None:
    td = content()
    assert read_into_memory(td) is td
    assert not is_in_file(td)


def test_capture_when_a_file_holds_a_str_then_is_the_bytes_that_tensordict_reads(tmp_path: Path) -> None:
    td = PersistentTensorDict.from_dict({"s": "text", "x": torch.zeros(2)}, tmp_path / "s.h5")
    assert capture(td).values[("s",)] == b"text"


def test_capture_when_a_file_is_of_others_then_has_its_arrays(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "o.h5", "w") as file:
        file["a/b"] = np.arange(6.0).reshape(3, 2)
        file["n"] = np.int64(7)
    td = TensorDict.from_h5(tmp_path / "o.h5")
    captured = capture(td)
    assert captured.tensors[("a", "b")].cpu().equal(torch.arange(6.0, dtype=torch.float64).view(3, 2))
    assert captured.tensors[("n",)].cpu().item() == 7


@pytest.mark.parametrize("part", ["all", "rows", "in memory"])
def test_file_when_cut_off_while_it_is_open_then_data_loss_and_no_zeros(tmp_path: Path, part: str) -> None:
    path = tmp_path / "cut.h5"
    PersistentTensorDict.from_dict(TensorDict({"x": torch.ones(1 << 20)}, [1 << 20]), path).close()
    td: Any = TensorDict.from_h5(path)
    td = td if part == "all" else td._get_sub_tensordict(slice(1 << 19, None))
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(CorruptDataError, match=r"cut\.h5.*bytes or more"):
        read_into_memory(td) if part == "in memory" else dict(iter_file_items(td))["x"].cpu()
