"""Corner cases of names; ``test_torch_selection`` compares names with tensordict's for all kinds of expressions."""

from __future__ import annotations

from typing import Any

import pytest

from tdserve.messages.selection import selection
from tdserve.messages.selection.dimension_names import select_names


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        (slice(None, None, -1), ("d0", "d1", "d2")),
        ((slice(None, None, -2), 0), ("d0", "d2")),
        ((0, slice(None, None, -1)), ("d1", "d2")),
        ((0, 0, 0), None),
        (None, (None, "d0", "d1", "d2")),
    ],
)
def test_names_when_a_step_is_negative_then_as_when_positive(index: Any, expected: Any) -> None:
    chosen = selection.encode(index, batch_size=(3, 3, 3))
    assert select_names(("d0", "d1", "d2"), (3, 3, 3), chosen) == expected


def test_names_when_there_are_none_then_none() -> None:
    assert select_names(None, (3,), selection.Selection()) is None
    assert select_names((None,), (3,), selection.Selection()) is None
