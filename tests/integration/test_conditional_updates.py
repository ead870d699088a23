"""Leaves that are written into rows only if these are still the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import tdserve
from tests.errors import raises

pytestmark = pytest.mark.integration


def make_rows(*numbers: int) -> TensorDict:
    number = torch.tensor(numbers)
    return TensorDict(
        {"x": number.float(), "n": {"y": number}, "text": [str(each) for each in numbers]}, [len(numbers)]
    )


@pytest.fixture
def table(client: tdserve.Client, name: str) -> Any:
    """A ring of eight rows."""
    made = client.create_replay(name, like=make_rows(0)[0], capacity=8)
    made.extend(make_rows(*range(8)))
    return made


@pytest.mark.slow
def test_update_when_some_rows_are_others_then_only_the_same_are_written(table: Any) -> None:
    rows, generations = table.get_with_generations(range(8))
    assert rows["n", "y"].tolist() == list(range(8))
    table.extend(make_rows(20, 21))
    table.delete([5])
    written = table.update_if_present(range(8), {"x": torch.full((8,), -1.0)}, generation=generations)
    assert written.tolist() == [False, False, True, True, True, False, True, True]
    assert table[:]["x"].tolist() == [20.0, 21.0, -1.0, -1.0, -1.0, -1.0, -1.0]
    assert table[:]["n", "y"].tolist() == [20, 21, 2, 3, 4, 6, 7]
    assert (table.find_generations([1, 5]) >= 0).tolist() == [True, False]


def test_update_when_a_sample_is_given_then_its_rows_are_meant(table: Any) -> None:
    sample = table.sample(64)
    values = TensorDict({"n": {"y": 100 + sample["n", "y"]}, "text": [f"new {each}" for each in sample["text"]]}, [64])
    assert table.update_if_present(sample, values).all()
    drawn = set(sample["index"].tolist())
    rows = table[:]
    assert rows["n", "y"].tolist() == [number + 100 * (number in drawn) for number in range(8)]
    assert list(rows["text"]) == [f"new {number}" if number in drawn else str(number) for number in range(8)]
    assert table.update_if_present(sample, {"x": np.zeros(64, np.float32)}).all()  # they are the same rows


def test_update_when_a_row_occurs_twice_then_the_last_counts(table: Any) -> None:
    generations = table.find_generations([3, 4, 3])
    assert table.update_if_present([3, 4, 3], {"x": torch.tensor([1.0, 2.0, 9.0])}, generation=generations).all()
    assert table[:]["x"].tolist() == [0.0, 1.0, 2.0, 9.0, 2.0, 5.0, 6.0, 7.0]


@pytest.mark.slow
@pytest.mark.parametrize("order", [[5, 0], [7, 1, 6, 0], [1, 5, 1], [6, 6, 0, 0, 1]])
@pytest.mark.parametrize("is_unchanged", [False, True])
def test_update_when_rows_of_several_rounds_are_in_any_order_then_each_has_its_generation(
    table: Any, order: list[int], is_unchanged: bool
) -> None:
    table.extend(make_rows(20, 21))  # the ring has come to rows 0 and 1 a second time
    generations = table.find_generations(order)
    values = torch.arange(100.0, 100.0 + len(order))
    written = table.update_if_present(order, {"x": values}, generation=generations, is_unchanged=is_unchanged)
    assert written.all()
    assert {row: table[row]["x"].item() for row in order} == dict(zip(order, values.tolist(), strict=True))
    table.extend(make_rows(*range(30, 36)))  # rows 2 to 7
    values = torch.full((len(order),), -1.0)
    written = table.update_if_present(order, {"x": values}, generation=generations)
    assert written.tolist() == [row in (0, 1) for row in order]


def test_set_at_when_a_batch_has_rows_of_several_rounds_then_all_are_written(table: Any) -> None:
    table.extend(make_rows(20, 21))
    sample = table.sample(64)  # with repetitions, in no order
    table.set_at_("x", -sample["x"], sample)
    expected = {row: -number for row, number in zip(sample["index"].tolist(), sample["x"].tolist(), strict=True)}
    assert {row: table[row]["x"].item() for row in expected} == expected
    table.extend(make_rows(40, 41, 42, 43, 44, 45, 46, 47))
    with pytest.raises(tdserve.SelectionError, match="overwritten"):
        table.set_at_("x", sample["x"], sample)
    assert (table[:]["x"] >= 40).all()


def test_set_at_when_a_row_is_named_with_two_generations_then_nothing_is_written(table: Any) -> None:
    earlier, later = table[[3]], table[[3]]
    earlier["index"] = later["index"] = torch.tensor([3])
    earlier["generation"] = table.find_generations([3])
    table.extend(make_rows(20, 21, 22, 23))
    later["generation"] = table.find_generations([3])
    for batch in (torch.cat([earlier, later]), torch.cat([later, earlier])):
        with pytest.raises(tdserve.SelectionError, match="overwritten"):
            table.set_at_("x", torch.zeros(2), batch)
    table.set_at_("x", torch.tensor([1.0, 2.0]), torch.cat([later, later]))
    assert table[3]["x"] == 2


def test_update_when_rows_must_be_unchanged_then_a_leaf_that_was_written_since_counts(table: Any) -> None:
    generations = table.find_generations([0, 1])
    table.set_at_("x", torch.tensor([5.0]), [1])
    for expected in ([True, False], [False, False]):  # the first call has written row 0
        values = {"n": {"y": torch.tensor([70, 71])}}
        written = table.update_if_present([0, 1], values, generation=generations, is_unchanged=True)
        assert written.tolist() == expected
    assert table[:2]["n", "y"].tolist() == [70, 1]
    assert table.get_with_generations(1)[0]["x"] == 5


def test_update_when_it_does_not_fit_then_nothing_is_written(table: Any) -> None:
    generations = table.find_generations([0, 1])
    with raises(tdserve.InvalidRequestError, argument="generation"):
        table.update_if_present([0, 1], {"x": torch.zeros(2)})
    with pytest.raises(tdserve.InvalidRequestError, match="1 of int64 for 2 rows"):
        table.update_if_present([0, 1], {"x": torch.zeros(2)}, generation=generations[:1])
    with pytest.raises(tdserve.InvalidRequestError, match="3 values for 2 rows"):
        table.update_if_present([0, 1], {"x": torch.zeros(3)}, generation=generations)
    with pytest.raises(tdserve.InvalidRequestError, match="neither a tensordict nor a dict"):
        table.update_if_present([0, 1], torch.zeros(2), generation=generations)
    with raises(tdserve.SpecMismatchError, key="other"):
        table.update_if_present([0, 1], {"other": torch.zeros(2)}, generation=generations)
    assert table[:]["x"].tolist() == [float(number) for number in range(8)]
    assert not len(table.update_if_present([], {"x": torch.zeros(0)}, generation=torch.zeros(0, dtype=torch.int64)))
