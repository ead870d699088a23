from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tdserve.rules.replay.draws.kept_draw import DrawTerms
from tdserve.rules.replay.eligibility.conditions import OWN, PLAIN
from tdserve.rules.replay.rank_draws import RankDraw
from tdserve.rules.replay.samplers.order import Fifo
from tdserve.rules.replay.table import Table
from tests.unit.rules.replay.tables import give_back, planned, rng, table_of, write


@pytest.fixture
def table() -> Table:
    """A table of the groups 0 (versions 1, 1), 1 (1, 3, 3) and 2 (3, 3), of a policy whose newest version is 3."""
    made = table_of(16, policy="p", sampler=Fifo())
    made.selectors.follow("a", 3)
    groups, versions = np.array([0, 0, 1, 1, 1, 2, 2]), np.array([1, 1, 1, 3, 3, 3, 3])
    write(made, 7, groups={"g": groups}, policy_versions=versions)
    return made


def discarded(table: Table) -> Any:
    """Returns how many rows have left as too old."""
    assert table.selectors.staleness is not None
    return table.selectors.staleness.num_discarded


def test_discard_when_groups_have_old_rows_then_they_leave_whole(table: Table) -> None:
    assert table.departures.discard(2, group="g") == 0
    assert table.departures.discard(1, group="g") == 5
    assert (table.state.list_live_rows().tolist(), discarded(table)) == ([5, 6], 5)
    assert table.departures.count_too_old(1) == 0


def test_discard_when_without_groups_then_only_old_rows(table: Table) -> None:
    assert table.departures.discard(1) == 3
    assert table.state.list_live_rows().tolist() == [3, 4, 5, 6]


def test_discard_when_old_rows_are_kept_then_their_groups_stay_until_the_next(table: Table) -> None:
    made = RankDraw.make(table, 0, DrawTerms(1, 1, PLAIN), rng=rng())
    assert made is not None
    assert made.draw.rows.tolist() == [0]
    assert table.departures.discard(1, group="g") == 4
    assert table.state.list_live_rows().tolist() == [0, 5, 6]
    assert table.departures.count_too_old(1) == 0, "it is not looked for again"


def test_discard_when_rows_are_on_lease_then_they_stay(table: Table) -> None:
    held = planned(table, 3, owner=7).rows
    assert held.tolist() == [0, 1, 2]
    assert table.departures.discard(1, group="g") == 0
    give_back(table, 7, OWN, held)
    assert table.departures.discard(1, group="g") == 5


def test_incomplete_when_leaves_come_later_then_counted_until_then() -> None:
    table = table_of(8)
    rows = np.array(write(table, 2) + write(table, 3, keys=[0]))
    assert table.selectors.num_incomplete == 3
    late = rows[2:4]
    table.state.hold(late)
    table.ring.hide(late)
    table.state.show(late, [1])
    table.state.let_go(late)
    assert table.selectors.num_incomplete == 1
    table.state.remove(rows[[0, 4]])
    assert table.selectors.num_incomplete == 0
