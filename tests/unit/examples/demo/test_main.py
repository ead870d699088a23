from __future__ import annotations

from pathlib import Path

import pytest

from tdserve.errors import InvalidRequestError, NotSupportedError
from tdserve.examples.demo.main import SOLVED, TIME_IS_UP, Ending, Goal, run
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


def test_figures_that_cannot_be_written_are_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidRequestError) as caught:
        run(DemoOptions(out=tmp_path / "file" / "folder"))
    assert caught.value.argument == "out"


def test_an_environment_that_cannot_be_learned_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(NotSupportedError):
        run(DemoOptions(env="Pendulum-v1", out=tmp_path / "out"))
    assert not (tmp_path / "out").exists()
