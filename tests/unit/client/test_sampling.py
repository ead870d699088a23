from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict

from tdserve.client.sampling import Sampled
from tests.unit.client.content import rows_content


def sampled(index: list[int], generation: list[int] | None = None, *, with_values: bool = False) -> Sampled:
    """Rows whose content is ten times their number."""
    numbers = torch.tensor(index)
    rows: list[Any] = [TensorDict({"a": 10 * number}, []) for number in numbers]
    if with_values:
        for row, number in zip(rows, index, strict=True):
            row.set_non_tensor("v", f"value {number}")
    return Sampled(rows_content(torch.stack(rows), index, generation or [2] * len(index)))


def test_build_when_whole_then_has_the_added_keys() -> None:
    td = sampled([3, 1], [2, 4]).build()
    assert td["a"].tolist() == [30, 10]
    assert td["index"].tolist() == [3, 1]
    assert td["generation"].tolist() == [2, 4]


def test_missing_when_rows_were_overwritten_then_replaced_by_others() -> None:
    rows = sampled([3, 1, 5], [2, -1, -1], with_values=True)
    assert rows.missing.tolist() == [1, 2]
    rows.replace(rows.missing, sampled([7, 8], [4, 6], with_values=True))
    assert len(rows.missing) == 0
    td = rows.build()
    assert td["a"].tolist() == [30, 70, 80]
    assert td["generation"].tolist() == [2, 4, 6]
    assert [td[row]["v"] for row in range(3)] == ["value 3", "value 7", "value 8"]


def test_split_when_of_several_batches_then_views_of_one_buffer() -> None:
    rows = sampled([1, 2, 3, 4])
    first, second = rows.split(2)
    assert (first["index"].tolist(), second["a"].tolist()) == ([1, 2], [30, 40])
    assert second.batch_size == torch.Size([2])
    assert first["a"].data_ptr() == rows.tensors[("a",)].data_ptr()
    assert len(rows.split(4)) == 1


def test_split_when_rows_have_values_then_each_batch_has_its_own() -> None:
    _, second = sampled([1, 2, 3, 4], with_values=True).split(2)
    assert [second[row]["v"] for row in range(2)] == ["value 3", "value 4"]
