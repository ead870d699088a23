from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from tdserve.selection import parse
from tdserve.server.recovery.journal import Journal
from tdserve.spec.capture import capture
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
    assert journal(index).rows(SPEC).tolist() == rows
