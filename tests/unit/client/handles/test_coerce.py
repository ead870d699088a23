from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import NonTensorData, TensorDict, UnbatchedTensor, lazy_stack

from tdserve.base.errors import NotSupportedError, SpecMismatchError
from tdserve.client.handles.coerce import Manner, broadcast, coerce_value, is_none, is_number, is_unset_field
from tdserve.structure.building.packing import pack, unpack
from tdserve.structure.captures.capture import capture
from tdserve.structure.captures.unbatched import to_value
from tests.ragged import Turns, jagged, turns

CHOSEN = capture(TensorDict({"a": torch.zeros(3, 2), "n": {"c": torch.zeros(3, dtype=torch.int64)}}, [3])).spec


@pytest.mark.parametrize(
    "value",
    [
        TensorDict({"a": torch.ones(3, 2), "n": {"c": torch.ones(3, dtype=torch.int64)}}, [3]),
        TensorDict({"a": torch.ones(2), "n": {"c": torch.tensor(1)}}, []),
        {"a": torch.ones(3, 2), "n": {"c": torch.ones(3, dtype=torch.int64)}},
    ],
)
def test_coerce_value_when_everything_is_given_then_whole_and_no_keys(value: Any) -> None:
    captured, keys = coerce_value(value, CHOSEN, store="x", manner=Manner.COPY)
    assert keys == []
    assert captured.tensors[("a",)].tolist() == [[1.0, 1.0]] * 3
    assert captured.tensors[("n", "c")].tolist() == [1, 1, 1]


LEAF = CHOSEN.select([("a",)])

TAKEN: dict[Manner, tuple[list[int], ...]] = {
    Manner.ENTRY: ([3, 2],),
    Manner.BROADCAST_AFTER_BATCH: ([3, 2], [3, 1]),
    Manner.COPY: ([3, 2], [3, 1], [1, 2], [2], [1], []),
    Manner.ROWS: ([3, 2], [3, 1], [1, 2], [2], [1], [], [1, 3, 2], [1, 1, 2]),
}


@pytest.mark.parametrize("manner", Manner)
@pytest.mark.parametrize("shape", [*TAKEN[Manner.ROWS], [3], [3, 3], [2, 3, 2]], ids=str)
def test_coerce_value_when_a_tensor_has_another_shape_then_as_far_broadcast_as_that_call_does(
    manner: Manner, shape: list[int]
) -> None:
    if shape in TAKEN[manner]:
        captured, _ = coerce_value(torch.ones(shape), LEAF, at=("a",), store="x", manner=manner)
        assert captured.tensors["a",].shape == (3, 2)
        return
    with pytest.raises(SpecMismatchError, match=r"float32\[3, 2\]"):
        coerce_value(torch.ones(shape), LEAF, at=("a",), store="x", manner=manner)


@pytest.mark.parametrize("manner", Manner)
def test_coerce_value_when_a_tensor_goes_over_a_nested_part_then_only_rows_take_it(manner: Manner) -> None:
    part = CHOSEN.select([("n",)])
    if manner is Manner.ROWS:
        assert coerce_value(torch.tensor(2), part, at=("n",), store="x")[0].tensors["n", "c"].tolist() == [2, 2, 2]
        return
    with pytest.raises(SpecMismatchError, match=r"expected TensorDict\[3\]"):
        coerce_value(torch.tensor(2), part, at=("n",), store="x", manner=manner)


def test_broadcast_when_of_rows_then_whole_trailing_dimensions() -> None:
    td = TensorDict({"a": torch.zeros(2)}, [2])
    rows: Any = broadcast(td, (3, 2), Manner.ROWS)
    copied: Any = broadcast(td[0], (2,), Manner.COPY)
    assert (rows.batch_size, copied.batch_size) == ((3, 2), (2,))
    assert broadcast(td[0], (2,), Manner.ROWS) is broadcast(td, (2, 3), Manner.COPY) is None
    assert broadcast(td, (3, 2), Manner.ENTRY) is None


def test_number_and_none_when_asked_then_distinguished_from_others() -> None:
    assert is_number(1)
    assert is_number(torch.tensor(1.0))
    assert not is_number(torch.ones(1))
    assert not is_number("1")
    assert is_none(None)
    assert is_none(NonTensorData(None))
    assert not is_none(NonTensorData(0))


def test_field_when_it_holds_nothing_then_none_goes_there() -> None:
    history = Turns("user", "text", batch_size=[3])  # type: ignore[call-arg]
    spec = capture(TensorDict({"h": history}, [3])).spec
    assert is_unset_field(spec.root, ("h", "tokens"))
    assert not any(is_unset_field(spec.root, path) for path in [("h", "role"), ("h", "other"), ("z", "tokens")])
    captured, _ = coerce_value({"h": {"tokens": None}}, spec, store="x")
    assert captured.tensors == captured.values == {}


def test_coerce_value_when_a_part_is_given_then_its_keys() -> None:
    captured, keys = coerce_value({"n": {"c": torch.tensor([1, 2, 3])}}, CHOSEN, store="x")
    assert keys == [("n", "c")]
    assert list(captured.tensors) == [("n", "c")]
    with pytest.raises(SpecMismatchError) as raised:
        coerce_value({"n": {"c": torch.tensor([1, 2, 3])}}, CHOSEN, store="x", is_whole=True)
    assert raised.value.key == "a"


def test_coerce_value_when_the_store_has_what_requires_grad_then_any_tensor_of_that_dtype_and_shape() -> None:
    stored = capture(TensorDict({"a": torch.nn.Parameter(torch.zeros(2)), "b": torch.zeros(2)}, [2])).spec
    for value in (
        TensorDict({"a": torch.ones(2), "b": torch.ones(2, requires_grad=True)}, [2]),
        TensorDict({"a": torch.ones(2, requires_grad=True).clone(), "b": torch.ones(2)}, [2]),
    ):
        captured, _ = coerce_value(value, stored, store="s")
        assert captured.spec == stored
        assert captured.tensors[("a",)].tolist() == [1, 1]


def test_coerce_value_when_one_leaf_is_meant_then_broadcast_as_an_assignment_would() -> None:
    captured, _ = coerce_value(2.5, CHOSEN.select([("a",)]), at=("a",), store="x")
    assert captured.tensors[("a",)].tolist() == [[2.5, 2.5]] * 3


@pytest.mark.parametrize(
    ("value", "key"),
    [
        ({"a": torch.ones(4, 2)}, "a"),
        ({"a": torch.ones(3, 2, dtype=torch.float64)}, "a"),
        ({"z": torch.ones(3)}, "z"),
        ({"a": "text"}, "a"),
    ],
)
def test_coerce_value_when_it_does_not_fit_then_error_names_the_key(value: Any, key: str) -> None:
    with pytest.raises(SpecMismatchError) as raised:
        coerce_value(value, CHOSEN, store="x")
    assert (raised.value.store, raised.value.key) == ("x", key)


def test_coerce_value_when_pickle_is_allowed_then_values_of_any_type_are_let_through() -> None:
    td = TensorDict({"v": NonTensorData(range(1), batch_size=[2])}, [2])
    spec = capture(td, allow_pickle=True).spec
    assert coerce_value(td, spec, store="x", allow_pickle=True)[0].values == {("v",): range(1)}
    with pytest.raises(NotSupportedError, match="'v'"):
        coerce_value(td, spec, store="x")


RAGGED = capture(
    TensorDict({"t": jagged([3, 1]), "h": lazy_stack([turns(2), turns(3)]), "a": torch.zeros(2)}, [2])
).spec


def test_coerce_value_when_leaf_is_ragged_then_any_form_of_its_elements() -> None:
    captured, keys = coerce_value({"t": [torch.arange(2), torch.arange(5)]}, RAGGED, store="x")
    assert keys == [("t",)]
    assert [len(element) for element in captured.values["t",]] == [2, 5]
    with pytest.raises(SpecMismatchError, match=r"expected ragged int64\[2, -1\], got float32\[2, 3\]"):
        coerce_value({"t": torch.zeros(2, 3)}, RAGGED, store="x")


def test_coerce_value_when_node_is_packed_then_its_elements_or_one_for_all() -> None:
    histories = lazy_stack([turns(1), turns(4)])
    captured, _ = coerce_value({"h": histories}, RAGGED, store="x")
    assert [element.entry.batch_size[0] for element in captured.values["h",]] == [1, 4]
    captured, _ = coerce_value({"h": turns(5)}, RAGGED, store="x")
    assert [element.entry.batch_size[0] for element in captured.values["h",]] == [5, 5]


@pytest.mark.parametrize(
    "value", [lazy_stack([turns(1)] * 3), TensorDict({"a": torch.zeros(2, 3)}, [2, 3]), 3, torch.zeros(2)]
)
def test_coerce_value_when_it_does_not_fit_a_packed_node_then_names_it(value: Any) -> None:
    with pytest.raises(SpecMismatchError) as raised:
        coerce_value({"h": value}, RAGGED, store="x")
    assert raised.value.key == "h"


def test_coerce_value_when_whole_rows_come_then_everything() -> None:
    td = TensorDict({"t": jagged([0, 9]), "h": lazy_stack([turns(1), turns(4)]), "a": torch.ones(2)}, [2])
    captured, keys = coerce_value(td, RAGGED, store="x")
    assert keys == []
    assert {*captured.tensors, *captured.values} == {("a",), ("t",), ("h",)}


def test_coerce_value_when_key_lies_in_a_packed_node_then_the_error_names_what_to_write() -> None:
    with pytest.raises(NotSupportedError, match="write h"):
        coerce_value(["x"], RAGGED, at=("h", "role"), store="x")


def test_coerce_value_when_what_it_replaces_requires_grad_then_content_counts() -> None:
    td = TensorDict({"a": torch.zeros(3, 2).requires_grad_()}, [3])
    chosen = capture(td, is_exact=True).spec
    captured, _ = coerce_value(TensorDict({"a": torch.ones(3, 2)}, [3]), chosen, store="x")
    assert captured.tensors[("a",)].tolist() == [[1.0, 1.0]] * 3


def test_coerce_value_when_rows_describe_themselves_then_parameters_stay_what_they_are() -> None:
    rows = [TensorDict({"w": torch.nn.Parameter(torch.ones(2))}), TensorDict({"v": torch.ones(1)})]
    chosen = capture(lazy_stack(rows), is_exact=True).spec
    captured, _ = coerce_value(lazy_stack(rows), chosen, store="x")
    assert type(unpack(pack(captured.values[()][0])).get("w")) is torch.nn.Parameter


def unbatched(value: float) -> Any:
    """Returns a value for whole batches."""
    make: Any = UnbatchedTensor
    return make(torch.full((2,), value))


def test_coerce_value_when_an_unbatched_tensor_is_meant_then_another_and_nothing_else() -> None:
    spec = capture(TensorDict({"table": unbatched(0.0), "a": torch.zeros(3)}, [3])).spec
    captured, keys = coerce_value(unbatched(1.0), spec.select([("table",)]), at=("table",), store="x")
    assert (captured.values["table",], captured.spec.find(("table",)), keys) == (
        to_value(unbatched(1.0)),
        spec.find(("table",)),
        [],
    )
    with pytest.raises(SpecMismatchError, match=r"expected UnbatchedTensor, got float32\[2\]"):
        coerce_value(torch.ones(2), spec.select([("table",)]), at=("table",), store="x")


def test_coerce_value_when_rows_of_a_stack_differ_in_structure_then_refused_where_they_must_not() -> None:
    stacks = [
        lazy_stack([TensorDict({"a": torch.ones(size), **more}) for size, more in ((1, {}), (2, each))])
        for each in ({}, {"b": torch.ones(1)})
    ]
    spec = capture(TensorDict({"s": stacks[0]}, [2])).spec
    with pytest.raises(SpecMismatchError, match=r"key 's': .*a lazy stack whose rows differ in structure"):
        coerce_value(stacks[1], spec, at=("s",), store="x")
