"""tdserve/cli/rows/first_rows.py: content of any tensordict as columns."""

from __future__ import annotations

import json

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, tensorclass

from tdserve.cli.rows.first_rows import iter_columns, nest_leaves
from tdserve.cli.screen.render import to_jsonable
from tests.ragged import CASES


@tensorclass
class Agent:
    """A tensorclass as users define them."""

    pose: torch.Tensor
    label: str


def content() -> TensorDict:
    """Every kind of entry that a store may hold."""
    return TensorDict(
        {
            "obs": torch.arange(6.0).view(3, 2),
            "next": {"shape": torch.arange(3)},
            "text": NonTensorStack("a", "b", "c"),
            "tag": NonTensorData({"k": [1]}, batch_size=[3]),
            "agent": Agent(pose=torch.zeros(3), label="red", batch_size=[3]),  # type: ignore[call-arg]
            "half": torch.ones(3, dtype=torch.bfloat16),
        },
        [3],
    )


def test_flat_when_content_has_every_kind_then_each_is_a_column_of_its_rows() -> None:
    assert {tuple(column.make_cells(3)) for column in iter_columns(content())} == {
        ("obs", "float32", "[0, 1]", "[2, 3]", "[4, 5]"),
        ("('next', 'shape')", "int64", "0", "1", "2"),
        ("text", "value", "'a'", "'b'", "'c'"),
        ("tag", "value", *["{'k': [1]}"] * 3),
        ("('agent', 'pose')", "float32", "0", "0", "0"),
        ("('agent', 'label')", "value", "'red'", "'red'", "'red'"),
        ("half", "bfloat16", "1", "1", "1"),
    }


def test_flat_when_batch_size_is_empty_then_there_is_one_value() -> None:
    (column,) = iter_columns(TensorDict({"a": torch.arange(3)}, []))
    assert column.make_cells(1) == ["a", "int64", "[0, 1, 2]"]


def test_flat_when_no_row_is_there_then_there_is_no_value() -> None:
    (column,) = iter_columns(TensorDict({"a": torch.zeros(0, 4)}, [0]))
    assert column.make_cells(0) == ["a", "float32"]


def test_nest_leaves_when_given_columns_then_gives_dicts_in_dicts() -> None:
    tree = nest_leaves(iter_columns(content().select("text", ("next", "shape"), "tag")))
    assert {**tree, "next": tree["next"]["shape"].tolist()} == {
        "next": [0, 1, 2],
        "text": ["a", "b", "c"],
        "tag": {"k": [1]},
    }


@pytest.mark.parametrize("case", CASES)
def test_flat_when_rows_differ_then_they_are_plain_lists_and_dicts(case: str) -> None:
    td = CASES[case]
    columns = list(iter_columns(td))
    assert all(column.make_cells(td.batch_size[0] if td.batch_size else 1) for column in columns)
    json.dumps(to_jsonable(nest_leaves(columns)))


def test_flat_when_a_part_is_ragged_then_it_is_one_column() -> None:
    columns = {column.path: column.value for column in iter_columns(CASES["histories beside others"])}
    assert columns["h",] == [
        {"role": texts, "content": texts} for texts in (["turn 0", "turn 1"], ["turn 0", "turn 1", "turn 2"])
    ]
    assert [len(tokens) for tokens in columns["t",]] == [3, 4]
