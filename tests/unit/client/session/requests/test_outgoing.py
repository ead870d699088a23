"""Which values of new rows are sent as bundles."""

from __future__ import annotations

from typing import Any

import pytest
from tensordict import NonTensorData, NonTensorStack, TensorDict

from tdserve.client.session.requests.outgoing import Outgoing, WriteTarget
from tdserve.structure.captures.capture import capture
from tdserve.structure.trees.tree import Spec

ROW = TensorDict({"a": "", "b": NonTensorData({})}, [])

TEXTS, DICTS = NonTensorStack("x", "y"), NonTensorStack({}, {"n": 1})


def outgoing(rows: dict[str, Any], *, is_extend: bool = True) -> Outgoing:
    """Returns the content of a write to a table of such rows."""
    row = capture(ROW).spec
    stored = Spec(row.prepend((8,)).root)
    captured = capture(TensorDict(rows, [2]))
    return Outgoing([captured], WriteTarget("t", (row if is_extend else stored).fingerprint, stored))


def test_values_when_of_whole_new_rows_then_a_bundle_per_row() -> None:
    found = outgoing({"a": TEXTS, "b": DICTS})
    assert found.message.is_bundled


@pytest.mark.parametrize(
    ("rows", "is_extend"),
    [
        ({"a": TEXTS}, True),
        ({"a": TEXTS, "b": NonTensorData({}, batch_size=[2])}, True),
        ({"a": TEXTS, "b": DICTS}, False),
    ],
    ids=["a key is lacking", "rows share a value", "rows are overwritten"],
)
def test_values_when_not_each_row_has_all_then_columns(rows: dict[str, Any], is_extend: bool) -> None:
    assert not outgoing(rows, is_extend=is_extend).message.is_bundled
