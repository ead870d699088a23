"""A batch that is used after its rows have gone: the rows that came instead stay as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tdserve

pytestmark = pytest.mark.integration


def rows(*numbers: int) -> TensorDict:
    """Rows of one leaf."""
    return TensorDict({"number": torch.tensor(numbers)}, [len(numbers)])


def create(client: tdserve.Client, name: str) -> Any:
    """A full table of four rows, which all have the same priority."""
    replay = client.create_replay(name, rows(0)[0], 4, sampler=tdserve.Prioritized(alpha=1.0, eps=0.0))
    replay.extend(rows(0, 1, 2, 3))
    return replay


@pytest.mark.parametrize("ends", ["delete", "clear"])
def test_batch_when_its_table_was_made_anew_or_cleared_then_new_rows_are_not_changed(
    client: tdserve.Client, name: str, ends: str
) -> None:
    replay = create(client, name)
    batch = replay.sample(64)
    if ends == "delete":
        client.delete(name)
        create(client, name)
    else:
        replay.clear()
        replay.extend(rows(0, 1, 2, 3))
    assert replay.update_priority(batch, torch.full((64,), 9.0)) == 64
    with pytest.raises(tdserve.SelectionError, match="overwritten since it was read"):
        replay.set_at_("number", batch["number"] + 9, batch)
    after = replay.sample(64)
    assert set(after["number"].tolist()) == {0, 1, 2, 3}
    assert set(after["priority"].tolist()) == {1.0}
