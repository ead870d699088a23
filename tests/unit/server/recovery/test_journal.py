from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tdserve.messages.row_sets import RowSet
from tdserve.messages.selection.selection import parse
from tdserve.server.recovery.journal import Journal
from tdserve.structure.captures.capture import capture
from tdserve.v1 import content_pb2, control_pb2

SPEC = capture(TensorDict({"a": torch.zeros(5, 2)}, [5])).spec


def journal(index: Any = (), **fields: Any) -> Journal:
    """A write of a selection."""
    asked = control_pb2.WriteRequest(
        store="x",
        selection=parse(index).to_message(),
        keys=[content_pb2.Path(parts=("a",))],
        content=control_pb2.Content(inline=b"\n\0\xff"),
    )
    common = {"client_id": b"\n" * 16, "request": 2**40, "staging": "/a\nb"}
    return Journal(**{**common, "done": control_pb2.Done(version=3), "asked": asked, **fields})


@pytest.mark.parametrize("done", [control_pb2.Done(version=3), control_pb2.Done(inline=b"\n\n")])
def test_journal_when_written_and_read_then_equal(done: control_pb2.Done) -> None:
    written = journal(slice(1, 3), done=done)
    assert vars(Journal.from_bytes(written.to_bytes())) == vars(written)
    assert json.loads(written.to_bytes().partition(b"\n")[0])["request"] == 2**40


@pytest.mark.parametrize(
    ("index", "rows"),
    [((), [0, 1, 2, 3, 4]), (3, [3]), (-1, [4]), ([4, 1, 1], [1, 4]), (slice(None, None, 2), [0, 2, 4])],
)
def test_rows_when_a_selection_names_some_then_each_once(index: Any, rows: list[int]) -> None:
    assert journal(index).selection.compute_row_set(SPEC.batch_size).rows.tolist() == rows


@pytest.mark.parametrize(
    ("generations", "content_version", "is_applied"),
    [([2, 2, 2, 2, 2, 6], 3, True), ([2, 3, 2, 2, 2, 7], 3, False), ([2, 2, 2, 2, 2, 4], 2, False)],
)
def test_is_applied_when_a_crash_came_then_only_where_its_rows_and_its_version_are_there(
    generations: list[int], content_version: int, is_applied: bool
) -> None:
    assert journal().is_applied(RowSet.run(0, 5), np.array(generations), content_version) is is_applied
