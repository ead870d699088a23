from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tdserve.base.errors import InvalidRequestError, StepForgottenError, WrongStateError
from tdserve.rules.replay.draws.kept_draw import DrawTerms, KeptDraw
from tdserve.rules.replay.draws.kept_draws import MAX_KEPT_DRAWS, MAX_RUNS, KeptDraws
from tdserve.rules.replay.eligibility.conditions import PLAIN, SampleConditions
from tdserve.rules.replay.rank_draws import RankDraw, plan_share
from tdserve.rules.replay.remover import Lifo, LowestPriority, Remover
from tdserve.rules.replay.settings import Settings
from tdserve.rules.replay.table import Table
from tdserve.rules.replay.table_state import TableState
from tests.unit.rules.replay.tables import clear, delete, numbers, planned, rng, table_of, write

TWO = DrawTerms(2, 2, PLAIN)


def drawn(table: Table, step: int, terms: DrawTerms = TWO) -> KeptDraw:
    """Draws for a step, which must be possible."""
    made = RankDraw.make(table, step, terms, rng=rng())
    assert made is not None
    made.draw.deal()
    return made.draw


def full_table(capacity: int = 8, **parts: Any) -> Table:
    """Returns a table that is full."""
    table = table_of(capacity, **parts)
    write(table, capacity)
    return table


def go_on(table: Table, step: int, world_size: int = 2) -> None:
    """Notes that all ranks ask for a step."""
    for rank in range(world_size):
        table.draws.note_asked(rank, step, world_size)


def test_find_when_kept_then_the_draw_and_otherwise_none() -> None:
    table = full_table()
    draw = drawn(table, 3)
    assert table.draws.find(3, TWO) is draw
    assert table.draws.find(4, TWO) is None


@pytest.mark.parametrize(
    ("terms", "argument"),
    [
        (DrawTerms(2, 3, PLAIN), "world_size"),
        (DrawTerms(1, 2, PLAIN), "num_rows"),
        (DrawTerms(2, 2, PLAIN, ("n",)), "balance"),
        (DrawTerms(2, 2, SampleConditions(max_lag=1)), "max_lag"),
        (DrawTerms(2, 2, SampleConditions(group="g", group_size=2)), "group_by"),
    ],
)
def test_find_when_on_other_terms_then_refused_by_name(terms: DrawTerms, argument: str) -> None:
    table = full_table()
    drawn(table, 3)
    with pytest.raises(InvalidRequestError, match="step 3 of table 'replay'") as raised:
        table.draws.find(3, terms)
    assert raised.value.argument == argument


@pytest.mark.parametrize(
    ("kept", "asked", "words"),
    [
        (TWO, DrawTerms(2, 3, PLAIN), "was drawn with world_size=2, not with world_size=3;"),
        (TWO, DrawTerms(2, 2, PLAIN, ("n",)), "was drawn without balance, not with balance='n';"),
        (DrawTerms(2, 2, PLAIN, ("a", "n")), TWO, "was drawn with balance=('a', 'n'), not without balance;"),
        (DrawTerms(2, 2, SampleConditions(consumer="me")), TWO, "was drawn with consumer='me', not without consumer;"),
        (TWO, DrawTerms(2, 2, SampleConditions(max_lag=0)), "was drawn without max_lag, not with max_lag=0;"),
        (TWO, DrawTerms(2, 2, SampleConditions(require=(0,))), "was drawn with another require;"),
        (TWO, DrawTerms(2, 2, SampleConditions(group="g", group_size=2)), "was drawn with another group_by;"),
    ],
)
def test_find_when_on_other_terms_then_the_error_has_words_of_the_caller(
    kept: DrawTerms, asked: DrawTerms, words: str
) -> None:
    draws, no_rows = KeptDraws("replay"), np.empty(0, np.int64)
    draws.keep(KeptDraw(3, kept, no_rows, no_rows, {}, no_rows, no_rows), table_of(1).state)
    with pytest.raises(InvalidRequestError) as raised:
        draws.find(3, asked)
    assert words in str(raised.value)


def test_keep_when_there_are_too_many_then_the_lowest_step_is_forgotten() -> None:
    table = full_table()
    for step in (*range(1, MAX_KEPT_DRAWS), 0, MAX_KEPT_DRAWS):
        drawn(table, step)
    assert [draw.step for draw in table.draws] == list(range(1, MAX_KEPT_DRAWS + 1))
    with pytest.raises(StepForgottenError) as raised:
        table.draws.find(0, TWO)
    assert (raised.value.kept, raised.value.next) == ("1 to 16", 17)
    assert table.draws.erasable == [("", 0)]


def test_find_when_as_many_later_steps_are_kept_as_can_be_then_forgotten_before_it_is_drawn() -> None:
    table = full_table()
    for step in range(100, 100 + MAX_KEPT_DRAWS):
        assert table.draws.find(3, TWO) is None
        drawn(table, step)
    with pytest.raises(StepForgottenError) as raised:
        table.draws.find(3, TWO)
    assert (raised.value.kept, raised.value.next) == ("100 to 115", 116)
    assert table.draws.find(116, TWO) is None
    other = TWO._replace(run="other")
    assert table.draws.find(3, other) is None
    first = drawn(table, 3, other)  # in the place of one of the run that has drawn least lately
    assert table.draws.find(3, other) is first


def test_extend_when_rows_are_drawn_then_they_are_not_overwritten() -> None:
    table = full_table()
    draw = drawn(table, 0)
    for _ in range(4):
        assert not set(write(table, 2)) & set(draw.rows.tolist())
    assert plan_share(table, draw, 1).rows.tolist() == draw.rows[[1, 3]].tolist()


def test_extend_when_it_needs_rows_of_a_draw_then_waits_until_all_ranks_go_on() -> None:
    table = full_table(4)
    drawn(table, 0)
    assert table.arrivals.reserve(4) is None
    assert "4 are kept for the ranks of a step" in table.arrivals.explain_extend(1)
    assert not table.draws.note_asked(0, 1, 2)
    assert table.arrivals.reserve(4) is None
    assert table.draws.note_asked(1, 1, 2)
    assert len(write(table, 1)) == 1
    with pytest.raises(StepForgottenError, match=r"kept are: none.*step=1 "):
        table.draws.find(0, TWO)


@pytest.mark.parametrize("parts", [{}, {"remover": LowestPriority()}])
def test_extend_when_a_draw_comes_between_its_parts_then_gets_the_others_once_that_is_over(
    parts: dict[str, Any],
) -> None:
    table = full_table(**parts)
    assert table.arrivals.begin_reserving(7)
    assert table.arrivals.reserve_part(3) is not None
    drawn(table, 0)
    assert table.arrivals.reserve_part(4) is None
    assert len(table.draws) == 1
    go_on(table, 1)
    last = table.arrivals.reserve_part(4)
    assert last is not None
    assert len(last) == 4
    assert (len(table.draws), table.ring.num_reserved) == (0, 7)


def test_extend_when_the_number_of_ranks_has_changed_then_earlier_steps_are_over() -> None:
    table = full_table(4)
    drawn(table, 0)
    assert table.draws.note_asked(0, 1, 3)
    assert len(write(table, 4)) == 4


def test_forget_when_rows_were_spent_then_they_leave_and_were_not_counted_before() -> None:
    table = full_table(max_times_sampled=1)
    drawn(table, 0)
    assert (len(table), table.counts.num_rows, table.draws.num_spent) == (4, 4, 4)
    assert table.samples.draw_sample(8, rng=rng(), is_apart=True) is None
    table.draws.forget_all(table.state)
    assert (len(table), len(table.ring.list_live_rows()), len(table.ring.pins)) == (4, 4, 0)


def test_forget_when_another_draw_has_a_spent_row_then_it_leaves_with_that() -> None:
    table = full_table(4, max_times_sampled=2)
    later = drawn(table, 2)
    drawn(table, 1)  # uses up rows that the draw of a later step has too
    go_on(table, 2)
    assert table.draws.forget_over(table.state)
    assert plan_share(table, later, 0).rows.tolist() == later.rows[[0, 2]].tolist()
    go_on(table, 3)
    assert table.draws.forget_over(table.state)
    assert len(table.ring.list_live_rows()) == 0


def test_forget_when_two_draws_have_a_row_then_it_is_pinned_until_the_second() -> None:
    table = full_table(4)
    drawn(table, 0)
    drawn(table, 1)
    go_on(table, 1)
    assert table.draws.forget_over(table.state)
    assert len(table.ring.pins) == 4
    go_on(table, 2)
    assert table.draws.forget_over(table.state)
    assert len(table.ring.pins) == 0


def test_forget_when_new_run_then_steps_begin_at_zero() -> None:
    table = full_table()
    drawn(table, 5)
    table.draws.forget_all(table.state)
    with pytest.raises(StepForgottenError):
        table.draws.find(5, TWO)
    table.draws.forget_all(table.state, restarts=True)
    assert table.draws.find(5, TWO) is None


def of_run(run: str) -> DrawTerms:
    """Returns the terms of a run."""
    return TWO._replace(run=run)


def test_find_when_another_run_asks_then_its_steps_are_its_own() -> None:
    table = full_table()
    first = drawn(table, 5, of_run("a"))
    assert table.draws.find(5, of_run("b")) is None
    second = drawn(table, 0, of_run("b"))
    assert table.draws.find(5, of_run("a")) is first
    assert table.draws.find(0, of_run("b")) is second
    table.draws.forget_all(table.state)
    with pytest.raises(StepForgottenError):
        table.draws.find(5, of_run("a"))
    assert table.draws.find(5, of_run("b")) is None
    with pytest.raises(StepForgottenError):
        table.draws.find(0, of_run("b"))


def test_extend_when_a_new_run_has_begun_then_gets_the_rows_of_the_old_one() -> None:
    table = full_table(4)
    drawn(table, 7, of_run("a"))
    with pytest.raises(AssertionError):
        write(table, 1)
    assert table.draws.note_asked(0, 0, 2, "b")
    assert not table.draws.note_asked(1, 0, 2, "b")
    assert len(write(table, 4)) == 4
    assert len(table.draws) == 0


def test_keep_when_there_are_too_many_then_those_of_the_run_that_drew_least_lately_go_first() -> None:
    table = full_table()
    for step in range(4):
        drawn(table, step, of_run("a"))
    for step in range(MAX_KEPT_DRAWS - 2):
        drawn(table, step, of_run("b"))
    kept = [(draw.terms.run, draw.step) for draw in table.draws]
    assert kept == [("a", 2), ("a", 3), *(("b", step) for step in range(MAX_KEPT_DRAWS - 2))]
    drawn(table, 4, of_run("a"))  # it goes on after all
    kept = [(draw.terms.run, draw.step) for draw in table.draws]
    assert kept == [*(("b", step) for step in range(1, MAX_KEPT_DRAWS - 2)), ("a", 2), ("a", 3), ("a", 4)]


def test_keep_when_there_are_very_many_runs_then_their_number_is_bounded() -> None:
    table = full_table()
    for run in range(3 * MAX_RUNS):
        drawn(table, 0, of_run(str(run)))
    assert (len(table.draws), len(table.draws.horizons)) == (MAX_KEPT_DRAWS, MAX_RUNS)
    assert table.draws.horizons[-1] == (str(3 * MAX_RUNS - 1), -1)


def test_delete_when_a_row_is_drawn_then_its_place_is_used_again_and_its_share_ends() -> None:
    table = full_table(4)
    draw = drawn(table, 0)
    gone = int(draw.rows[0])
    delete(table, numbers(gone))
    assert write(table, 1) == [gone]
    with pytest.raises(WrongStateError, match="rank 0 in step 0"):
        plan_share(table, draw, 0)
    plan_share(table, draw, 1)
    again = drawn(table, 1)
    table.draws.note_asked(0, 1, 2)
    table.draws.note_asked(1, 1, 2)
    table.draws.forget_over(table.state)
    assert table.ring.pins.contains(again.rows).all(), "the row of the place belongs to another draw"


def test_clear_when_draws_are_kept_then_they_are_forgotten() -> None:
    table = full_table(max_times_sampled=1)
    drawn(table, 0)
    assert clear(table) == 4
    assert (len(table), len(table.ring.pins), len(table.draws)) == (0, 0, 0)
    assert len(write(table, 8)) == 8


def test_evict_when_the_least_important_rows_are_drawn_then_others_go() -> None:
    table = table_of(4, remover=LowestPriority())
    write(table, 4, priorities=np.arange(4.0))
    draw = drawn(table, 0, DrawTerms(1, 1, PLAIN))
    pinned = int(draw.rows[0])
    kept = [row for row in range(4) if row != pinned]
    assert [write(table, 1, priorities=np.full(1, 9.0))[0] for _ in range(3)] == kept
    go_on(table, 1, 1)
    table.draws.forget_over(table.state)
    table.update_priority(numbers(pinned), np.zeros(1), None)
    assert write(table, 1, priorities=np.full(1, 9.0)) == [pinned]


@pytest.mark.parametrize("remover", [Lifo(), LowestPriority()])
def test_evict_when_a_draw_or_a_sample_was_undone_then_its_rows_make_room_again(remover: Remover) -> None:
    table = full_table(remover=remover, max_times_sampled=2)
    for step in range(2):  # the second time, their last one
        made = RankDraw.make(table, step, DrawTerms(4, 2, PLAIN), rng=rng())
        assert made is not None
        if step:
            made.undo()
    under_way = planned(table, 8, is_apart=True)  # has them for the last time while the draw of step 0 is forgotten
    go_on(table, 1)
    assert table.draws.forget_over(table.state)
    table.samples.undo(under_way)
    assert len(table) == 8
    assert sorted(write(table, 8)) == list(range(8))


def test_evict_when_an_undone_sample_has_rows_of_a_draw_then_they_stay() -> None:
    table = full_table(4, remover=Lifo(), max_times_sampled=2)
    draw = drawn(table, 0, DrawTerms(1, 1, PLAIN))
    table.samples.undo(planned(table, 4, is_apart=True))
    assert sorted(write(table, 3)) == [row for row in range(4) if row != int(draw.rows[0])]
    assert table.arrivals.reserve(4) is None


def restarted(table: Table, draws: list[KeptDraw]) -> Table:
    """Returns the table as it is after a restart."""
    capacity = table.ring.capacity
    generations = table.plan_rows(np.arange(capacity), {}).generations
    columns = {"sequence": table.columns.sequence, "times_sampled": table.columns.times_sampled}
    settings, state = Settings(max_times_sampled=table.settings.max_times_sampled), table.state.get_state()

    def make(name: str, dtype: Any, shape: tuple[int, ...]) -> Any:
        return columns.get(name, np.zeros(shape, dtype))

    found = Table(TableState.restore("replay", generations, settings, state, make_column=make))
    found.draws.restore([KeptDraw.from_bytes(draw.to_bytes()) for draw in draws], found.state)
    return found


def test_restore_when_rows_are_there_then_kept_pinned_and_spent() -> None:
    table = full_table(max_times_sampled=1)
    draw = drawn(table, 0)
    again = restarted(table, [draw])
    assert (len(again), len(again.ring.pins)) == (4, 4)
    found = again.draws.find(0, TWO)
    assert found is not None
    for rank in (0, 1):
        assert plan_share(again, found, rank).rows.tolist() == plan_share(table, draw, rank).rows.tolist()
    assert not set(draw.rows.tolist()) & set(drawn(again, 1).rows.tolist())


def test_restore_when_a_row_has_gone_then_only_its_share_ends() -> None:
    table = full_table()
    draws = [drawn(table, 0), drawn(table, 1)]
    assert draws[0].shares is not None
    delete(table, draws[0].rows[draws[0].shares[1][:1]])
    again = restarted(table, draws)
    found = again.draws.find(0, TWO)
    assert found is not None
    assert plan_share(again, found, 0).rows.tolist() == plan_share(table, draws[0], 0).rows.tolist()
    with pytest.raises(WrongStateError, match="1 of its"):
        plan_share(again, found, 1)
    again.draws.forget_all(again.state)
    assert len(again.ring.pins) == 0


def test_restore_when_all_rows_have_gone_then_forgotten() -> None:
    table = full_table()
    draws = [drawn(table, 0), drawn(table, 1)]
    delete(table, draws[0].rows)
    again = restarted(table, draws)
    with pytest.raises(StepForgottenError):
        again.draws.find(0, TWO)


def test_rename_when_rows_get_new_generations_then_the_draw_has_them_too() -> None:
    table = full_table(max_times_sampled=1)
    draw = drawn(table, 0)
    before, spent = draw.row_ids, draw.spent_ids
    draw.rename(lambda rows, row_ids: row_ids + 2 * rows)
    assert (draw.row_ids - before).tolist() == (2 * draw.rows).tolist()
    assert (draw.spent_ids - spent).tolist() == (2 * draw.spent).tolist()


def test_restore_when_one_row_has_gone_then_the_others_that_were_spent_leave() -> None:
    table = full_table(8, max_times_sampled=2)
    draws = [drawn(table, 0), drawn(table, 1, DrawTerms(4, 2, PLAIN))]
    once = np.setdiff1d(np.arange(8), draws[0].rows)
    delete(table, once[:1])
    again = restarted(table, draws)
    assert (len(table), len(again)) == (3, 3)
    plan = again.samples.draw_sample(3, rng=rng())
    assert plan is not None
    assert set(plan.rows.tolist()) <= set(once[1:].tolist())


def test_forget_when_another_draw_has_the_spent_rows_then_it_is_to_be_recorded_with_them() -> None:
    table = full_table(4, max_times_sampled=2)
    kept, forgotten = drawn(table, 1), drawn(table, 0)
    go_on(table, 1)
    assert table.draws.forget_over(table.state)
    assert table.draws.list_changed() == [kept]
    assert sorted(kept.spent.tolist()) == sorted(forgotten.rows.tolist())
    assert len(restarted(table, [kept])) == 0


def test_restore_when_several_runs_have_drawn_then_each_has_its_steps_and_the_order_stays() -> None:
    table = full_table()
    draws = [drawn(table, step, of_run(run)) for run, step in (("b", 0), ("a", 0), ("b", 1))]
    again = restarted(table, draws)
    assert [(draw.terms.run, draw.step) for draw in again.draws] == [("a", 0), ("b", 0), ("b", 1)]
    assert again.draws.find(0, of_run("c")) is None
