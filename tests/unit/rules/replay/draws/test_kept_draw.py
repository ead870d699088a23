from __future__ import annotations

from typing import Any

import numpy as np

from tdserve.rules.replay.draws.kept_draw import DrawTerms, KeptDraw
from tdserve.rules.replay.eligibility.conditions import SampleConditions
from tests.unit.rules.replay.tables import numbers


def draw_of(terms: DrawTerms) -> KeptDraw:
    """Returns a draw of the rows from 10 on."""
    rows = np.arange(10, 10 + terms.num_drawn)
    columns: dict[str, Any] = {"priority": rows.astype(np.float32), "times_sampled": rows + 1}
    return KeptDraw(5, terms, rows, 2 * rows, columns, rows[:1], 2 * rows[:1])


def test_deal_when_of_groups_then_they_stay_whole() -> None:
    draw = draw_of(DrawTerms(4, 2, SampleConditions(group="g", group_size=2)))
    draw.deal(np.array([9, 9, 1, 1, 1, 1, 9, 9]))
    assert draw.shares is not None
    assert draw.shares.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_record_when_read_then_the_same_draw() -> None:
    terms = DrawTerms(2, 2, SampleConditions((0, 3), group="g", group_size=2, max_lag=1), ("next", "tokens"))
    for terms_of_it in (terms, DrawTerms(2, 2, SampleConditions())):
        draw = draw_of(terms_of_it)
        assert KeptDraw.from_bytes(draw.to_bytes()).shares is None
        draw.deal(numbers(1, 2, 3, 4))
        found = KeptDraw.from_bytes(draw.to_bytes())
        assert (found.step, found.terms) == (draw.step, draw.terms)
        for name in ("rows", "row_ids", "spent", "spent_ids", "shares"):
            assert getattr(found, name).tolist() == getattr(draw, name).tolist(), name
        assert {name: (str(column.dtype), column.tolist()) for name, column in found.columns.items()} == {
            name: (str(column.dtype), column.tolist()) for name, column in draw.columns.items()
        }


def test_is_over_when_all_ranks_are_beyond_then_true() -> None:
    draw = draw_of(DrawTerms(1, 2, SampleConditions()))
    draw.ranks_beyond.add(1)
    assert not draw.is_over
    draw.ranks_beyond.add(0)
    assert draw.is_over
