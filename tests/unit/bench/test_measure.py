from __future__ import annotations

from tdserve.bench.measure import Pacing, Round, Task, alternate, time_round


def test_time_round_when_operations_are_short_then_runs_until_the_most_it_may() -> None:
    done = time_round(lambda: None, Pacing(10.0, min_ops=2, max_ops=7))
    assert len(done.op_s) == 7


def test_time_round_when_time_is_up_at_once_then_still_runs_the_fewest_it_must() -> None:
    done = time_round(lambda: None, Pacing(0.0, min_ops=3))
    assert len(done.op_s) == 3


def test_time_round_when_given_before_and_finish_then_calls_them_in_order() -> None:
    events: list[str] = []
    time_round(
        lambda: events.append("op"),
        Pacing(0.0, min_ops=2),
        before=lambda: events.append("before"),
        finish=lambda: events.append("finish"),
    )
    assert events == ["before", "op", "before", "op", "finish"]


def test_time_round_when_finish_takes_long_then_counts_it_once_and_before_never() -> None:
    def busy() -> None:
        sum(range(200_000))

    with_finish = time_round(lambda: None, Pacing(0.0, min_ops=1), finish=busy)
    with_before = time_round(lambda: None, Pacing(0.0, min_ops=1), before=busy)
    assert with_finish.elapsed_s > sum(with_finish.op_s)
    assert with_before.elapsed_s == sum(with_before.op_s)


def test_alternate_when_run_then_floors_and_subject_take_turns_and_the_first_turn_is_dropped() -> None:
    events: list[str] = []

    def task(name: str) -> Task:
        def run_round(_: Pacing) -> Round:
            events.append(name)
            return Round((float(len(events)),), 1.0)

        return Task(run_round, lambda _: events.append(f"check {name}"))

    found = alternate({"floor": task("floor"), "own": task("own")}, 2, Pacing(0.0))
    assert events == ["floor", "check floor", "own", "check own"] * 3
    assert [each.op_s for each in found["own"]] == [(7.0,), (11.0,)]


def test_alternate_when_a_round_has_details_then_keeps_them_and_drops_what_was_checked() -> None:
    task = Task(lambda _: Round((1.0,), 1.0, last="checked", details={"part": 2.0}))
    assert alternate({"subject": task}, 1, Pacing(0.0)) == {"subject": [Round((1.0,), 1.0, details={"part": 2.0})]}
