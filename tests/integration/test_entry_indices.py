"""Indices with more dimensions than the rows: for an entry, an ellipsis also stands for the entry's own dimensions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tests.sameness import difference

pytestmark = pytest.mark.integration

EVEN = torch.tensor([True, False, True, False, True])

some_index = pytest.mark.parametrize(
    "index", [(..., 1), (..., None), (..., [0, 4]), (1, ..., slice(1, 3)), (..., EVEN)], ids=str
)


@pytest.fixture
def td() -> TensorDict:
    """The local tensordict of the test."""
    return TensorDict({"obs": torch.arange(60.0).reshape(4, 3, 5)}, [4, 3])


@pytest.fixture
def store(client: tdserve.Client, name: str, td: TensorDict) -> Any:
    """A store with the same content."""
    return client.memmap(td, name)


@some_index
def test_get_at_when_the_index_goes_on_behind_the_rows_then_equals_the_local_one(
    store: Any, td: TensorDict, index: Any
) -> None:
    assert torch.equal(td.get_at("obs", index), store.get_at("obs", index))


@some_index
def test_set_at_when_a_part_of_rows_is_meant_then_refused_and_nothing_is_written(
    store: Any, td: TensorDict, index: Any
) -> None:
    with pytest.raises(tdserve.NotSupportedError, match="part of a row"):
        store.set_at_("obs", td.get_at("obs", index), index)
    assert difference(store.to_tensordict(), td) is None
