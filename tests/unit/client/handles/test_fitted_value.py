"""A value for rows of several servers: each writes the same as one server would write there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict, lazy_stack, set_list_to_stack

from tdserve.base.errors import SpecMismatchError
from tdserve.client.handles.coerce import FittedValue, coerce_value
from tdserve.structure.captures.capture import capture
from tdserve.structure.trees.tree import Path
from tests.errors import raises
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


def fit(value: Any, path: Path, num_rows: int = 4) -> FittedValue:
    chosen = STORED.with_rows(num_rows).select([path])
    return coerce_value(value, chosen, at=path, store="s", is_whole=True, is_exact=False)


def list_rows(fitted: FittedValue) -> dict[Path, list[Any]]:
    """The rows of each leaf that a server writes."""
    captured = fitted.captured
    found: dict[Path, list[Any]] = {key: list(tensor.tolist()) for key, tensor in captured.tensors.items()}
    for key, leaf in captured.spec.values:
        rows = captured.values[key]
        is_each = leaf.per_row or leaf.ragged is not None
        rows = list(rows) if is_each else [rows] * captured.spec.batch_size[0]
        found[key] = [row.tolist() if isinstance(row, torch.Tensor) else read_texts(row) for row in rows]
    return found


def read_texts(row: Any) -> Any:
    entry = getattr(row, "entry", row)
    if isinstance(entry, NonTensorStack):
        return entry.tolist()
    return list(entry.content) if hasattr(entry, "content") else entry


@pytest.mark.parametrize("case", GIVEN)
@pytest.mark.parametrize("where", [*HALVES, slice(1, 3), slice(0, 0)])
def test_choose_when_a_value_fits_all_rows_then_these_rows_of_it(case: str, where: Any) -> None:
    path, value = GIVEN[case]
    fitted = fit(value, path)
    part = fitted.choose(where)
    numbers = list(range(4))[where] if isinstance(where, slice) else where.tolist()
    assert list_rows(part) == {key: [rows[number] for number in numbers] for key, rows in list_rows(fitted).items()}
    assert part.captured.spec == fitted.captured.spec.with_rows(len(numbers))
    part.check_fits(STORED.with_rows(len(numbers)).select([path]), store="s")


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
def test_coerce_value_when_for_as_many_rows_as_one_server_has_then_refused(path: Path, value: Any) -> None:
    with pytest.raises(SpecMismatchError):
        fit(value, path)


def test_choose_when_a_number_is_for_all_rows_then_not_copied_for_each() -> None:
    chosen = fit(7, ("d",)).choose(torch.tensor([2, 0])).captured.tensors["d",]
    assert chosen.tolist() == [[7.0] * 4] * 2
    assert chosen.untyped_storage().nbytes() == chosen.element_size()


@pytest.mark.parametrize("value", [torch.zeros(4, 4), torch.zeros(4, 3, dtype=torch.int64)])
def test_check_fits_when_the_leaf_is_another_by_now_then_refused(value: torch.Tensor) -> None:
    now = capture(TensorDict({"d": value.to(torch.float64)}, [4])).spec
    with raises(SpecMismatchError, key="d"):
        fit(0, ("d",)).check_fits(now, store="s")
