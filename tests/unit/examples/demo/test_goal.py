from __future__ import annotations

import pytest

from tdserve.examples.demo.goal import SOLVED, TIME_IS_UP, Ending, Goal, target_of
from tdserve.examples.demo.options import DemoOptions
from tdserve.examples.demo.watch import Snapshot


@pytest.mark.parametrize(
    ("seen", "ending"),
    [
        (Snapshot(seconds=5.0, mean_return=None), None),
        (Snapshot(seconds=5.0, mean_return=474.9), None),
        (Snapshot(seconds=5.0, mean_return=475.0), SOLVED),
        (Snapshot(seconds=10.0, mean_return=475.0), SOLVED),
        (Snapshot(seconds=10.0, mean_return=100.0), TIME_IS_UP),
    ],
)
def test_a_run_ends_at_its_goal_or_when_the_time_is_up(seen: Snapshot, ending: Ending | None) -> None:
    assert Goal(475.0, 10.0).ending(seen) == ending


def test_a_run_without_a_target_ends_when_the_time_is_up() -> None:
    goal = Goal(None, 10.0)
    assert goal.ending(Snapshot(seconds=9.0, mean_return=1e9)) is None
    assert goal.ending(Snapshot(seconds=10.0, mean_return=1e9)) == TIME_IS_UP


def test_target_of_when_none_is_told_then_the_environments_own() -> None:
    assert target_of(DemoOptions(env="CartPole-v1")) == 475.0
    assert target_of(DemoOptions(env="CartPole-v1", target=0.0)) == 0.0
