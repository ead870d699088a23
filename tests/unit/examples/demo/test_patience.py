from __future__ import annotations

import pytest

from tdserve.base.errors import ConnectError, DeadlineExceededError, NotLocalError, StoreNotFoundError
from tdserve.examples.demo import patience
from tdserve.examples.demo.patience import Patience


class Clock:
    """Goes on by as much as each reading says."""

    def __init__(self, step_s: float) -> None:
        self.now_s = 0.0
        self.step_s = step_s

    def __call__(self) -> float:
        self.now_s += self.step_s
        return self.now_s


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "PAUSE_S", 0.0)


def failing(num_failures: int, error: Exception) -> object:
    """Work that fails so often and then returns 7."""
    left = iter([error] * num_failures)

    def work() -> int:
        for failure in left:
            raise failure
        return 7

    return work


@pytest.mark.parametrize("error", [ConnectError(address="a:1", reason="refused"), DeadlineExceededError(what="x")])
def test_call_when_the_server_comes_back_then_its_result(error: Exception) -> None:
    lines: list[str] = []
    assert Patience(100.0, say=lines.append, clock=Clock(1.0)).call(failing(5, error)) == 7  # type: ignore[arg-type]
    assert 1 <= len(lines) <= 2, "one line in five seconds"
    assert str(error) in lines[0]


def test_call_when_it_does_not_come_back_then_the_last_failure() -> None:
    error = ConnectError(address="a:1", reason="refused")
    with pytest.raises(ConnectError):
        Patience(10.0, say=lambda _: None, clock=Clock(1.0)).call(failing(20, error))  # type: ignore[arg-type]


@pytest.mark.parametrize("error", [StoreNotFoundError(name="x"), NotLocalError(address="a", reason="b")])
def test_call_when_trying_again_does_not_help_then_raised_at_once(error: Exception) -> None:
    with pytest.raises(type(error)):
        Patience(1e9, say=lambda _: None, clock=Clock(1.0)).call(failing(1, error))  # type: ignore[arg-type]


def test_bear_when_something_succeeded_meanwhile_then_counts_from_there() -> None:
    borne = Patience(5.0, say=lambda _: None, clock=Clock(1.0))
    for _ in range(50):
        borne.bear(ConnectError(address="a:1", reason="refused"))
        borne.renew()
