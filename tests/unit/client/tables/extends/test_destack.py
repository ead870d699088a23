from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDict, lazy_stack

from tdserve.client.tables.extends.destack import destack
from tdserve.structure.captures.capture import capture
from tdserve.structure.captures.declaring import declare_ragged
from tdserve.structure.trees.tree import Spec
from tests.sameness import assert_same


def row(number: int, num_turns: int, **more: Any) -> TensorDict:
    """Returns a history of so many turns, with a score."""
    said = NonTensorStack(*[f"{number}, {turn}" for turn in range(num_turns)])
    turns = TensorDict({"x": torch.full((num_turns,), number), "said": said}, [num_turns])
    return TensorDict({"turns": turns, "score": torch.tensor(0.5 * number), "who": f"w{number}", **more}, [])


@pytest.fixture
def structure() -> Spec:
    """The structure of rows that differ in their number of turns."""
    captured = capture(row(0, 2))
    return declare_ragged(captured.spec, captured.values, ["turns"], store="t")


@pytest.mark.parametrize("sizes", [(3, 1), (2, 2), (1,)])
def test_rows_when_one_part_may_differ_then_the_others_are_dense(structure: Spec, sizes: tuple[int, ...]) -> None:
    rows = [row(number, size) for number, size in enumerate(sizes)]
    found = destack(lazy_stack(rows), structure)
    assert found is not None
    assert type(found) is TensorDict
    assert type(found["turns"]) is LazyStackedTensorDict
    assert found["score"].tolist() == [0.5 * number for number in range(len(sizes))]
    assert found.get("who").tolist() == [f"w{number}" for number in range(len(sizes))]
    for number, expected in enumerate(rows):
        assert_same(expected["turns"], found[number]["turns"])


@pytest.mark.parametrize(
    "batch",
    [
        lazy_stack([row(0, 3), row(1, 1, more=torch.zeros(2))]),
        lazy_stack([row(0, 3), row(1, 1).exclude("score")]),
        lazy_stack([row(0, 3, score=torch.zeros(2)), row(1, 1)]),
        torch.stack([row(0, 2), row(1, 2)]),
        row(0, 2),
        "text",
    ],
)
def test_rows_when_they_are_no_stack_of_such_rows_then_none(structure: Spec, batch: Any) -> None:
    assert destack(batch, structure) is None


def test_rows_when_no_part_of_theirs_may_differ_then_none() -> None:
    assert destack(lazy_stack([row(0, 3), row(1, 1)]), capture(row(0, 2)).spec) is None
