from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tdserve.examples.demo import processes as under_test
from tdserve.examples.demo.processes import Death, Processes, hold_signals

TIMEOUT_S = 60.0
# python -m timeit runs any statement: children without a module of their own
WAITING = ["-n1", "-r1", "__import__('signal').pause()"]
DEAF = ["-s", "import signal; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True)", *WAITING]


@pytest.fixture
def children(tmp_path: Path) -> Iterator[Processes]:
    started = Processes(tmp_path)
    yield started
    started.close()


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_for_death(children: Processes) -> Death:
    deadline_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline_s:
        death = children.find_death()
        if death is not None:
            return death
    raise AssertionError("no child died")


def wait_for_text(log: Path, text: str) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while text not in log.read_text():
        assert time.monotonic() < deadline_s, log.read_text()


def test_living_children_are_no_death(children: Processes) -> None:
    children.start("one", "timeit", WAITING)
    assert children.find_death() is None


def test_a_child_that_fails_is_named_with_its_last_lines(children: Processes) -> None:
    children.start("fine", "timeit", WAITING)
    children.start("broken", "timeit", ["-n1", "-r1", "raise SystemExit('out of luck')"])
    death = wait_for_death(children)
    assert (death.name, death.exit_code) == ("broken", 1)
    assert "out of luck" in death.last_lines


def test_a_killed_child_is_named_with_its_signal(children: Processes) -> None:
    os.kill(children.start("one", "timeit", WAITING), signal.SIGKILL)
    assert "one ended unexpectedly (signal 9)" in str(wait_for_death(children))


def test_close_ends_every_child(children: Processes) -> None:
    pids = [children.start(name, "timeit", WAITING) for name in ("one", "two")]
    children.close()
    assert not any(map(is_running, pids))
    assert children.find_death() is None


def test_close_kills_a_child_that_does_not_listen(
    children: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(under_test, "STOP_TIMEOUT_S", 0.1)
    pid = children.start("deaf", "timeit", DEAF)
    wait_for_text(tmp_path / "deaf.log", "deaf")
    children.close()
    assert not is_running(pid)


def test_a_child_is_out_of_reach_of_the_terminals_signals(children: Processes) -> None:
    assert os.getsid(children.start("one", "timeit", WAITING)) != os.getsid(0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_kept_and_interrupts_nothing(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with hold_signals() as received:
        assert not received
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), signal.SIGHUP)
        assert received == [number, signal.SIGHUP]
    assert signal.getsignal(number) is before
