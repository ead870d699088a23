"""Tables whose rows have left, or end trajectories, as their readers see them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import tdserve
from tests.errors import raises

pytestmark = pytest.mark.integration


def rows(*numbers: int) -> TensorDict:
    """Rows with these numbers."""
    return TensorDict({"number": torch.tensor(numbers)}, [len(numbers)])


@pytest.mark.slow
@pytest.mark.parametrize("gone", [range(20), range(5, 8), range(39), range(0, 40, 2), range(40)])
def test_iteration_when_rows_have_left_the_table_then_the_others_once_each(
    client: tdserve.Client, name: str, gone: range
) -> None:
    replay = client.create_replay(name, rows(0)[0], 3000)
    replay.extend(rows(*range(40)))
    replay.delete(torch.tensor(list(gone)))
    left = [number for number in range(40) if number not in gone]
    assert [int(row["number"]) for row in replay] == left
    assert [int(row["number"]) for row in client[name]] == left
    assert replay[10:30]["number"].tolist() == [number for number in left if 10 <= number < 30]


def test_extend_when_ends_are_fewer_than_rows_then_refused_and_nothing_is_written(
    client: tdserve.Client, name: str
) -> None:
    replay = client.create_replay(name, rows(0)[0], 100, sampler=tdserve.Slices(slice_len=2))
    for ends in ([True], [True, False], np.ones(1, np.bool_)):
        with raises(tdserve.InvalidRequestError, argument="ends"):
            replay.extend(rows(0, 1, 2, 3), ends=ends)
    assert len(replay) == 0
    replay.extend(rows(0), ends=[True])
    replay.extend(rows(1, 2), ends=False)
    assert sorted(replay.sample(2)["number"].tolist()) == [1, 2]
