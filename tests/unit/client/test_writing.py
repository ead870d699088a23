from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.deadline import Deadline
from tdserve.errors import StoreNotFoundError

SMALL, LARGE = 3, 100_000


def rows(num_rows: int) -> TensorDict:
    """Rows that tell which they are."""
    return TensorDict({"a": torch.arange(num_rows)}, [num_rows])


@pytest.fixture
def replay(client: tdserve.Client, name: str) -> tdserve.ReplayHandle:
    """An empty ring."""
    made: tdserve.ReplayHandle = client.create_replay(name, rows(1)[0], 10 * LARGE)
    return made


@pytest.mark.parametrize("num_rows", [SMALL, LARGE])
@pytest.mark.parametrize("return_early", [False, True])
def test_write_when_the_session_was_lost_before_then_stored_once(
    client: tdserve.Client, replay: tdserve.ReplayHandle, num_rows: int, return_early: bool
) -> None:
    client.session(Deadline.after(10.0)).close()
    done = replay.extend(rows(num_rows), return_early=return_early)
    indices = done.result(20.0) if return_early else done
    assert torch.equal(indices, torch.arange(num_rows))
    assert replay.info()["inserts"] == num_rows


@pytest.mark.parametrize("num_rows", [SMALL, LARGE])
def test_write_when_the_session_is_lost_in_the_middle_then_stored_once(
    client: tdserve.Client, replay: tdserve.ReplayHandle, num_rows: int
) -> None:
    done = [replay.extend(rows(num_rows), return_early=True) for _ in range(3)]
    client.session(Deadline.after(10.0)).close()
    found = torch.cat([each.result(20.0) for each in done])
    assert torch.equal(found.sort().values, torch.arange(3 * num_rows))
    assert replay.info()["inserts"] == 3 * num_rows


@pytest.mark.parametrize("num_rows", [SMALL, LARGE])
def test_write_when_refused_early_then_the_future_says_so_and_the_next_works(
    client: tdserve.Client, replay: tdserve.ReplayHandle, name: str, num_rows: int
) -> None:
    client.delete(replay.name)
    with pytest.raises(StoreNotFoundError):
        replay.extend(rows(num_rows), return_early=True).result(20.0)
    again = client.create_replay(name, rows(1)[0], LARGE)
    assert torch.equal(again.extend(rows(num_rows)), torch.arange(num_rows))
