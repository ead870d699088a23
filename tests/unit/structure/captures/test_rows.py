from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from tensordict import MemoryMappedTensor, NonTensorData, NonTensorStack, TensorClass, TensorDict

from tdserve.base.errors import LocalProtocolError, NotSupportedError, SpecMismatchError
from tdserve.structure.captures import rows as structure_rows
from tdserve.structure.captures.capture import capture
from tdserve.structure.captures.captured import Captured
from tdserve.structure.captures.declaring import declare_ragged
from tdserve.structure.captures.rows import RowReader, RowSlots, copy_leaves
from tests.errors import raises
from tests.ragged import turns
from tests.tensordict_strategies import tensordicts


class Step(TensorClass):
    """A row as a class, with a field that need not be a tensor."""

    x: torch.Tensor
    note: str | None = None


def row(**more: Any) -> TensorDict:
    """A row of three tensors on two levels."""
    return TensorDict({"b": torch.arange(3.0), "a": torch.tensor(True), "n": {"c": torch.ones(2, 2)}, **more})


def reader(td: Any) -> RowReader:
    """Returns a reader of rows like this one."""
    return RowReader(capture(td).spec, store="frames")


def test_read_when_row_is_plain_then_its_own_tensors_in_canonical_order() -> None:
    td = row()
    tensors, values = reader(row()).read(td)
    assert [id(tensor) for tensor in tensors] == [id(td["a"]), id(td["b"]), id(td["n", "c"])]
    assert list(values) == []


def test_read_when_entries_stand_in_another_order_then_same() -> None:
    td = TensorDict({"n": {"c": torch.ones(2, 2)}, "a": torch.tensor(True), "b": torch.arange(3.0)})
    assert reader(row()).read(td)[0][1] is td["b"]


@pytest.mark.parametrize(
    ("td", "key"),
    [
        (row(d=torch.ones(1)), "d"),
        (row().exclude("a"), "a"),
        (row().exclude("a").set("d", torch.ones(1)), "a"),
        (row().exclude("n"), "n"),
        (row(n={"c": torch.ones(2, 2), "d": torch.ones(1)}), "('n', 'd')"),
        (row(n=torch.ones(2)), "n"),
        (row(a={"x": torch.ones(2)}), "a"),
        (row(b=torch.arange(4.0)), "b"),
        (row(b=torch.arange(3)), "b"),
        (row(b=torch.ones(1, 3)), "b"),
        (row(b="text"), "b"),
        (TensorDict({"b": torch.ones(2, 3), "a": torch.ones(2), "n": {"c": torch.ones(2, 2)}}, [2]), ""),
    ],
)
def test_read_when_row_does_not_fit_then_error_names_store_and_key(td: Any, key: str) -> None:
    with pytest.raises(SpecMismatchError) as raised:
        reader(row()).read(td)
    assert (raised.value.store, raised.value.key) == ("frames", key)


@pytest.mark.parametrize(
    "td",
    [
        row(b=torch.ones(3, device="meta")),
        row(b=torch.ones(3).to_sparse()),
        [row()],
        None,
    ],
)
def test_read_when_row_cannot_be_sent_then_not_supported(td: Any) -> None:
    with pytest.raises(NotSupportedError):
        reader(row()).read(td)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.nn.Parameter(torch.arange(3.0)),
        torch.arange(3.0).requires_grad_(),
        MemoryMappedTensor.from_tensor(torch.arange(3.0)),
        torch.arange(6.0)[::2] / 2,
    ],
)
def test_read_when_a_tensor_is_special_then_its_content_without_gradient(tensor: torch.Tensor) -> None:
    found = reader(row()).read(row(b=tensor))[0][1]
    assert not found.requires_grad
    assert found.tolist() == tensor.tolist()


@pytest.mark.parametrize("is_nested", [False, True])
def test_read_when_row_is_a_tensorclass_then_captured_only_the_first_time(
    is_nested: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = [Step(x=torch.tensor(number), batch_size=[]) for number in range(3)]
    rows = [TensorDict({"s": step, "y": torch.tensor(0)}) if is_nested else step for step in steps]
    subject, captured = reader(rows[0]), list[Any]()

    def note_capture(row: Any, **options: Any) -> Captured:
        captured.append(row)
        return capture(row, **options)

    monkeypatch.setattr(structure_rows, "capture", note_capture)
    assert [subject.read(row)[0][0].item() for row in rows] == [0, 1, 2]
    assert len(captured) == 1
    assert captured[0] is rows[0]


def test_read_when_tensorclass_is_another_then_error() -> None:
    subject = reader(Step(x=torch.tensor(0), batch_size=[]))
    subject.read(Step(x=torch.tensor(0), batch_size=[]))
    with pytest.raises(SpecMismatchError):
        subject.read(TensorDict({"x": torch.tensor(0)}))
    with raises(SpecMismatchError, key="note"):
        subject.read(Step(x=torch.tensor(0), note="more", batch_size=[]))


def test_read_when_there_are_values_then_in_canonical_order() -> None:
    td = row(z="last", v={"k": "first"})
    tensors, values = reader(td).read(row(z="other", v={"k": "more"}))
    assert len(tensors) == 3
    assert capture(td).spec.values[0][0] == ("v", "k")
    assert list(values) == ["more", "other"]


def test_read_when_row_has_dimensions_then_a_shared_value_is_one_per_element() -> None:
    shared = TensorDict({"x": torch.ones(2, 3), "v": "a"}, [2, 3])
    each = TensorDict({"x": torch.ones(2), "v": NonTensorStack("a", "b")}, [2])
    assert reader(shared).read(shared)[1] == [[["a"] * 3] * 2]
    assert reader(each).read(each)[1] == [["a", "b"]]


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(tensordicts())
def test_read_when_row_is_anything_then_the_tensors_that_capture_finds(td: Any) -> None:
    captured = capture(td)
    subject = reader(td)
    for _ in range(2):  # the second time its tensorclasses are known
        tensors, values = subject.read(td)
        places = [tensor.data_ptr() for tensor in tensors]
        assert places == [captured.tensors[path].data_ptr() for path, _ in captured.spec.tensors]
        assert len(values) == len(captured.spec.values)


def test_slots_when_rows_are_copied_in_then_the_batch_has_them() -> None:
    subject = reader(row())
    slots = RowSlots(capture(row()).spec, 4)
    for number in range(4):
        copy_leaves(slots.rows[number], subject.read(row(b=torch.full((3,), float(number))))[0])
    assert slots.tensors[1].tolist() == [[float(number)] * 3 for number in range(4)]
    assert slots.tensors[0].tolist() == [True] * 4
    assert slots.tensors[2].shape == (4, 2, 2)


def test_slots_when_made_in_inference_mode_then_writable_outside_of_it() -> None:
    with torch.inference_mode():
        slots = RowSlots(capture(row()).spec, 2)
        copy_leaves(slots.rows[0], reader(row()).read(row())[0])
    copy_leaves(slots.rows[1], reader(row()).read(row())[0])
    assert slots.tensors[1].tolist() == [[0.0, 1.0, 2.0]] * 2


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint16, torch.uint64, torch.bfloat16, torch.float8_e5m2, torch.complex64]
)
def test_copy_leaves_when_dtype_is_rare_then_bytes_are_the_same(dtype: torch.dtype) -> None:
    td = TensorDict({"x": torch.tensor([1, 0, 1]).to(dtype)})
    slots = RowSlots(capture(td).spec, 1)
    copy_leaves(slots.rows[0], reader(td).read(td)[0])
    assert slots.tensors[0][0].view(torch.uint8).tolist() == td["x"].view(torch.uint8).tolist()


def test_copy_leaves_when_numbers_differ_then_our_bug() -> None:
    with pytest.raises(LocalProtocolError):
        copy_leaves([torch.ones(1)], [])
    copy_leaves([], [])


def test_nbytes_when_asked_then_content_and_what_surrounds_it() -> None:
    spec = capture(row()).spec
    assert RowSlots.compute_nbytes(spec, 2) == 2 * (spec.nbytes + 3 * RowSlots.VIEW_BYTES)


def test_read_when_pickle_is_allowed_then_values_of_any_type_are_let_through() -> None:
    td = TensorDict({"v": NonTensorData(range(1))})
    spec = capture(td, allow_pickle=True).spec
    assert RowReader(spec, store="x", allow_pickle=True).read(td)[1] == [range(1)]
    with pytest.raises(NotSupportedError, match="'v'"):
        RowReader(spec, store="x").read(td)


def test_read_when_the_row_itself_is_packed_then_it_is_the_only_value() -> None:
    spec = declare_ragged(capture(turns(2)).spec, {}, [()], store="frames")
    history = turns(3)
    tensors, values = RowReader(spec, store="frames").read(history)
    assert tensors == []
    assert len(values) == 1
    assert values[0].entry is history._tensordict
