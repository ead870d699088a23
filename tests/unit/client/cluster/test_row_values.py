"""What each server writes of a value for rows of several: the same as one server would write there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict, lazy_stack, set_list_to_stack

from tdserve.base.errors import SpecMismatchError
from tdserve.client.cluster.row_values import split_value
from tdserve.client.handles.coerce import coerce_value
from tdserve.structure.capture import capture
from tdserve.structure.tree import Path
from tests.ragged import jagged, strided, turns


def ragged_texts(texts: list[list[str]]) -> Any:
    with set_list_to_stack(True):
        return TensorDict({"p": texts}, [len(texts)]).get("p")


STORED = capture(
    TensorDict(
        {
            "n": TensorDict({"a": torch.zeros(4, 2), "t": jagged([1, 2, 3, 4])}, [4]),
            "d": torch.zeros(4, 4),
            "u": strided(*[(size, 2) for size in range(1, 5)]),
            "s": NonTensorStack(*"abcd"),
            "h": lazy_stack([turns(size) for size in (1, 2, 3, 4)]),
            "p": ragged_texts([["a"], ["b", "c"], ["x"], ["d"]]),
        },
        [4],
    )
).spec
PIECES = [torch.full((size,), size) for size in (3, 0, 2, 1)]
HALVES = (torch.tensor([2, 0]), torch.tensor([1, 3]))  # so that a server has as many rows as a value may have elements

GIVEN: dict[str, tuple[Path, Any]] = {
    "of each row": (("d",), torch.arange(16.0).view(4, 4)),
    "an array of each row": (("d",), np.arange(16, dtype=np.float32).reshape(4, 4)),
    "lists of each row": (("d",), torch.arange(16.0).view(4, 4).tolist()),
    "behind a dimension of 1": (("d",), torch.arange(16.0).view(1, 4, 4)),
    "of each row, broadcast": (("d",), torch.arange(4.0)[:, None]),
    "one for all": (("d",), torch.arange(4.0)),
    "a number": (("d",), 7),
    "jagged": (("n", "t"), torch.nested.nested_tensor(PIECES, layout=torch.jagged)),
    "listed tensors": (("n", "t"), PIECES),
    "listed arrays": (("n", "t"), [piece.numpy() for piece in PIECES]),
    "dense for a ragged leaf": (("n", "t"), torch.arange(8).view(4, 2)),
    "one tensor for a ragged leaf": (("n", "t"), torch.arange(4)),
    "numbers for a ragged leaf": (("n", "t"), [1, 2, 3, 4]),
    "strided": (("u",), strided((1, 2), (3, 1), (2, 2), (0, 0))),
    "texts": (("s",), list("efgh")),
    "an array of texts": (("s",), np.array(list("efgh"))),
    "a stack of texts": (("s",), NonTensorStack(*"efgh")),
    "a list for all": (("s",), ["e", "f"]),
    "a tuple for all": (("s",), tuple("efgh")),
    "a text for all": (("s",), "efgh"),
    "lists of texts": (("p",), [["e"], ["k"], ["f", "g"], ["h"]]),
    "a stack of lists of texts": (("p",), ragged_texts([["e"], ["i", "j"], ["f", "g"], ["h"]])),
    "a part": (("n",), TensorDict({"a": torch.rand(4, 2), "t": jagged([4, 3, 2, 1])}, [4])),
    "a part by key": (("n",), {"a": torch.rand(2), "t": PIECES}),
    "histories": (("h",), lazy_stack([turns(size) for size in (4, 3, 2, 1)])),
    "one history of as many turns": (("h",), turns(4)),
}


def coerce(value: Any, path: Path, num_rows: int) -> dict[Path, list[Any]]:
    """The rows of each leaf that a server writes."""
    captured, _ = coerce_value(value, STORED.with_rows(num_rows).select([path]), at=path, store="s", is_exact=False)
    found: dict[Path, list[Any]] = {key: list(tensor.tolist()) for key, tensor in captured.tensors.items()}
    for key, leaf in captured.spec.values:
        rows = captured.values[key]
        rows = list(rows) if leaf.per_row or not isinstance(rows, (str, list, tuple)) else [rows] * num_rows
        found[key] = [row.tolist() if isinstance(row, torch.Tensor) else read_texts(row) for row in rows]
    return found


def read_texts(row: Any) -> Any:
    entry = getattr(row, "entry", row)
    if isinstance(entry, NonTensorStack):
        return entry.tolist()
    return list(entry.content) if hasattr(entry, "content") else entry


@pytest.mark.parametrize("case", GIVEN)
def test_split_when_a_value_fits_then_servers_write_the_same_as_one(case: str) -> None:
    path, value = GIVEN[case]
    choose = split_value(value, STORED.find(path), path, store="s")
    whole = coerce(value, path, 4)
    for where in HALVES:
        part = coerce(choose(where), path, 2)
        assert part == {key: [rows[number] for number in where.tolist()] for key, rows in whole.items()}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("d",), torch.zeros(2, 4)),
        (("n", "t"), PIECES[:2]),
        (("n", "t"), torch.zeros(2, 3, dtype=torch.int64)),
        (("u",), strided((1, 2), (3, 1))),
        (("s",), NonTensorStack("e", "f")),
        (("n",), TensorDict({"a": torch.zeros(2, 2)}, [2])),
        (("n",), {"a": torch.zeros(2, 2)}),
        (("h",), lazy_stack([turns(1), turns(2)])),
    ],
)
def test_split_when_a_value_is_for_as_many_rows_as_one_server_has_then_refused(path: Path, value: Any) -> None:
    with pytest.raises(SpecMismatchError, match=r"\[4"):
        split_value(value, STORED.find(path), path, store="s")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("d",), TensorDict({}, [4])),
        (("d",), "text"),
        (("d",), jagged([1, 2, 3, 4])),
        (("n",), "text"),
        (("n",), {"nope": torch.zeros(4)}),
    ],
)
def test_split_when_a_value_is_of_another_kind_then_left_to_the_servers(path: Path, value: Any) -> None:
    chosen = split_value(value, STORED.find(path), path, store="s")(HALVES[0])
    assert chosen is value or chosen == value


def test_split_when_a_tensor_is_for_all_leaves_of_a_part_then_divided_for_each() -> None:
    chosen = split_value(torch.arange(4.0)[:, None], STORED.find(("n",)), ("n",), store="s")(HALVES[0])
    assert {key: value.tolist() for key, value in chosen.items()} == {"a": [[2.0], [0.0]]}
