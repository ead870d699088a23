"""Rows that leave a table once all the consumers have had them that were named when it was created."""

from __future__ import annotations

from typing import Any

import pytest

from tdserve.base.errors import InvalidRequestError
from tdserve.messages.row_sets import RowSet
from tdserve.rules.replay.draws.kept_draw import DrawTerms
from tdserve.rules.replay.eligibility.conditions import SampleConditions
from tdserve.rules.replay.limiter import MinSize, Queue
from tdserve.rules.replay.rank_draws import RankDraw
from tdserve.rules.replay.samplers.order import Fifo
from tdserve.rules.replay.samplers.slices import Slices
from tdserve.rules.replay.settings import MAX_CONSUMERS, Settings
from tdserve.rules.replay.table import Table
from tests.unit.rules.replay.tables import numbers, planned, rng, table_of, write


def table_of_two(capacity: int = 6) -> Table:
    """Returns a table whose rows leave once a judge and a trainer have had them."""
    return table_of(capacity, sampler=Fifo(), limiter=Queue(capacity), consumers=("judge", "trainer"))


def have(table: Table, consumer: str, *rows: int) -> int:
    """Lets a consumer have rows; returns how many were to leave by that."""
    departure = table.departures.plan_departure(RowSet.from_rows(numbers(*rows)), consumer)
    for _ in table.departures.depart_in_pieces(departure):
        pass
    return departure.num_leaving


def draw_for_ranks(table: Table, step: int, num_rows: int) -> list[int]:
    """Draws rows for two ranks of the trainer; returns their numbers."""
    terms = DrawTerms(num_rows // 2, 2, SampleConditions(consumer="trainer"))
    made = RankDraw.make(table, step, terms, rng=rng())
    assert made is not None
    made.settle()
    rows: list[int] = made.draw.rows.tolist()
    return rows


@pytest.mark.parametrize(("first", "last"), [("judge", "trainer"), ("trainer", "judge")])
def test_rows_when_the_last_consumer_has_had_them_then_leave_and_writers_get_their_room(first: str, last: str) -> None:
    table = table_of_two()
    write(table, 6)
    assert have(table, first, 0, 1, 2) == 0
    assert have(table, last, 5) == 0
    assert table.arrivals.reserve(1) is None
    assert "(judge has not had" not in table.arrivals.explain_extend(1)
    assert f"'{last}' has not had 5 rows" in table.arrivals.explain_extend(1)
    assert have(table, last, 1, 2) == 2
    assert len(table) == 4
    assert table.state.is_live(numbers(0, 1, 2, 5)).tolist() == [True, False, False, True]
    assert write(table, 2) == [1, 2]
    assert planned(table, 4, owner=1, conditions=SampleConditions(consumer=last)).rows.tolist() == [0, 3, 4, 1]


def test_rows_when_a_draw_for_ranks_has_them_then_leave_with_it_and_a_writer_is_no_reason_to_wait() -> None:
    table = table_of_two()
    write(table, 6)
    drawn = draw_for_ranks(table, 0, 4)
    assert have(table, "judge", *range(6)) == 4
    assert len(table) == 6
    assert table.arrivals.reserve(1) is None
    assert not table.draws.note_asked(0, 1, 2)
    assert table.draws.note_asked(1, 1, 2)
    assert table.arrivals.reserve(1) is not None
    assert not table.state.is_live(numbers(*drawn)).any()
    assert len(table) == 2


def test_rows_when_a_crash_came_before_they_left_then_leave_when_the_table_is_opened() -> None:
    table = table_of_two()
    write(table, 6)
    draw_for_ranks(table, 0, 2)
    table.selectors.consume("judge", numbers(0, 1, 2, 3))
    table.selectors.consume("trainer", numbers(2))
    assert len(table) == 6
    table.departures.remove_had_by_all()
    assert table.state.list_live_rows().tolist() == [0, 1, 3, 4, 5]


def test_consumer_when_it_is_none_of_them_then_refused() -> None:
    table = table_of_two()
    for consumer, is_lease in (("critic", False), ("critic", True), ("", True)):
        with pytest.raises(InvalidRequestError, match=f"'judge', 'trainer' have had them; '{consumer}' is not one"):
            table.samples.check_consumer(consumer, is_lease=is_lease)
    table.samples.check_consumer("judge", is_lease=True)
    table.samples.check_consumer("", is_lease=False)
    table_of().samples.check_consumer("critic", is_lease=True)


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"consumers": "judge"}, "not names"),
        ({"consumers": ("judge", "")}, "not names"),
        ({"consumers": ("judge", 1)}, "not names"),
        ({"consumers": ("judge", "judge")}, "different ones"),
        ({"consumers": [str(number) for number in range(MAX_CONSUMERS + 1)]}, "at most 64"),
        ({"consumers": ("judge",), "max_times_sampled": 1}, "remove rows by other rules"),
        ({"consumers": ("judge",), "is_queue": True}, "remove rows by other rules"),
        ({"consumers": ("judge",), "limiter": MinSize(2)}, r"take limiter=Queue\(n\)"),
        ({"consumers": 3}, "are not names"),
        ({"consumers": ("judge",), "sampler": Slices(4)}, "belong together"),
    ],
)
def test_settings_when_consumers_cannot_be_then_refused(parts: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason):
        Settings(**parts)


def test_settings_when_they_name_consumers_then_come_back_from_their_text() -> None:
    settings = Settings(limiter=Queue(4), consumers=["trainer", "judge"])
    assert settings.consumers == ("judge", "trainer")
    assert Settings.from_json(settings.to_json()) == settings
    assert "consumers" not in Settings().to_json()
