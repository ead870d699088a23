"""The demo as a user runs it: it learns, other terminals can watch it, and nothing stays behind however it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest

import tdserve
from tests.integration.marked import MarkedProgram
from tests.integration.terminal import run_on_terminal
from tests.processes import wait_for

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 100.0
SETTLE_TIMEOUT_S = 20.0
NOT_OURS = {"torchinductor_root", f"torchinductor_{os.environ.get('USER', 'root')}"}
"""Files that ``import tensordict`` creates in any process."""


def shared_memory() -> dict[str, int]:
    """Returns the shared-memory objects of this machine with their inodes, without folders, which are other processes'
    temporary files."""
    return {entry.name: entry.inode() for entry in os.scandir("/dev/shm") if not entry.is_dir()}


def mapped_inodes() -> set[int]:
    """Returns the inodes of the shared-memory objects that living processes use. They are other processes', since ours
    are gone. A semaphore is mapped by the name that it had before it got its own."""
    found = set[int]()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            found.update(int(line.split()[4]) for line in maps.read_text().splitlines() if "/dev/shm/" in line)
        except OSError:
            continue  # the process has ended meanwhile
    return found


class Demo(MarkedProgram):
    """``tdserve demo``, with what it leaves behind."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.out = folder / "out"
        self._shm_before = shared_memory()
        super().__init__(folder, "-m", "tdserve", "demo", "--out", str(self.out), *arguments)

    @property
    def figures(self) -> dict[str, Any]:
        """Returns the JSON file that it wrote."""
        figures: dict[str, Any] = json.loads((self.out / "figures.json").read_text())
        return figures

    def wait(self, timeout_s: float = TIMEOUT_S) -> int:
        """Waits for its end and returns the exit code."""
        return self.process.wait(timeout_s)

    def wait_until(self, is_there: Callable[[], Any]) -> Any:
        """Waits for something to appear while the demo runs, and returns it."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline_s and self.process.poll() is None:
            found = is_there()
            if found:
                return found
            Event().wait(0.05)  # the demo needs the cores
        raise AssertionError(self.printed)

    def wait_until_it_learns(self) -> str:
        """Waits for policies that were learned and returns the server's address."""
        self.wait_until(lambda: re.search(r"version ([2-9]|\d\d)", self.printed))  # the first one begins the run
        found = re.search(r"server (127\.0\.0\.1:\d+)", self.printed)
        assert found is not None
        return found[1]

    def leftovers(self) -> dict[str, Any]:
        """Returns what is left of it: processes, temporary files, shared memory.

        Somebody else's process may have ended just now, whose semaphores go a moment later.
        """
        names = set(os.listdir(self.temporary)) - NOT_OURS
        end_s = time.monotonic() + SETTLE_TIMEOUT_S
        while True:
            objects = {name: inode for name, inode in shared_memory().items() if name not in self._shm_before}
            mapped = mapped_inodes() if objects else set[int]()
            shm = {name for name, inode in objects.items() if inode not in mapped} & shared_memory().keys()
            if not shm or time.monotonic() > end_s:
                return {"processes": self.processes(), "temporary": names, "shm": shm}
            Event().wait(0.2)


NOTHING: dict[str, Any] = {"processes": {}, "temporary": set(), "shm": set()}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Demo]]:
    started: list[Demo] = []

    def starts(*arguments: str) -> Demo:
        started.append(Demo(tmp_path, *arguments))
        return started[-1]

    yield starts
    for demo in started:
        demo.kill()


@pytest.mark.full
def test_demo_when_left_alone_then_solves_cartpole_and_leaves_only_its_figures(start: Callable[..., Demo]) -> None:
    demo = start("--seed", "0")
    assert demo.wait(350.0) == 0, demo.printed  # 70 s, and twice as long beside other tests
    assert demo.figures["solved"], demo.printed
    assert demo.figures["mean_return"] >= 475.0
    assert demo.figures["num_bytes"]["gloo"] > 1_000_000
    assert {episode["actor"] for episode in demo.figures["episodes"]} == {0, 1}
    demo.wait_gone()
    assert demo.leftovers() == NOTHING


@pytest.mark.full
def test_demo_when_the_time_is_up_then_ends_by_itself_and_leaves_only_its_figures(start: Callable[..., Demo]) -> None:
    demo = start("--max-seconds", "3", "--seed", "1")
    assert demo.wait() == 0, demo.printed
    assert demo.figures["ending"] == "time is up"
    assert (demo.out / "learning-curve.png").read_bytes().startswith(b"\x89PNG")
    assert "│ ending" in demo.printed
    demo.wait_gone()
    assert demo.leftovers() == NOTHING


@pytest.mark.full
@pytest.mark.parametrize("columns", [80, 40])
def test_demo_when_on_a_terminal_then_shows_what_it_starts_and_how_it_learns(tmp_path: Path, columns: int) -> None:
    arguments = ["demo", "--max-seconds", "20", "--target", "1000", "--out", str(tmp_path)]
    with run_on_terminal(*arguments, columns=columns) as terminal:
        for text in ("imports torch", "starts a server", "the actors start", "return", "━", "█|▁|▂", "behind"):
            terminal.wait_for(text, timeout_s=TIMEOUT_S)
        terminal.wait_for(r"ending.*time is up", timeout_s=TIMEOUT_S)
        assert terminal.process.wait(TIMEOUT_S) == 0
        assert terminal.is_as_usual


def look_into(address: str) -> None:
    """Runs the commands of a second terminal."""
    with tdserve.connect(address) as client:
        assert client.stores() == ["episodes", "policy", "transitions"]
        rows = client.replay("transitions")[:8]
        assert rows["observation"].shape == (8, 4)
        policy = client.latest("policy")
        assert policy is not None
        assert policy.metadata["num_updates"] > 0


@pytest.mark.full
@pytest.mark.parametrize(("number", "to_group"), [(signal.SIGINT, True), (signal.SIGTERM, False)])
def test_demo_when_a_signal_comes_while_others_look_into_it_then_nothing_stays(
    start: Callable[..., Demo], number: signal.Signals, to_group: bool
) -> None:
    demo = start()
    look_into(demo.wait_until_it_learns())
    assert len(demo.processes()) >= 5  # the learner, control, data worker, two actors
    (os.killpg if to_group else os.kill)(demo.process.pid, number)
    assert demo.wait() == 128 + number, demo.printed
    assert demo.figures["ending"] == f"stopped by {number.name}"
    demo.wait_gone()
    assert demo.leftovers() == NOTHING


@pytest.mark.full
@pytest.mark.parametrize(
    ("victim", "named"),
    [("demo.actor", "actor"), ("tdserve.server.server_process", "lost the server")],
)
def test_demo_when_a_process_dies_then_it_is_named_and_nothing_stays(
    start: Callable[..., Demo], victim: str, named: str
) -> None:
    demo = start()
    demo.wait_until_it_learns()
    pid = next(pid for pid, command in demo.processes().items() if victim in command)
    os.kill(pid, signal.SIGKILL)
    assert demo.wait() == 1, demo.printed
    assert named in demo.figures["ending"]
    assert {episode["actor"] for episode in demo.figures["episodes"]} <= {0, 1}
    assert demo.figures["episodes"]
    demo.wait_gone()
    assert demo.leftovers() == NOTHING


@pytest.mark.full
def test_demo_when_killed_then_the_server_and_the_others_end_too(start: Callable[..., Demo]) -> None:
    demo = start()
    demo.wait_until_it_learns()
    demo.process.kill()
    demo.process.wait()
    wait_for(lambda: not demo.processes(), f"the end of {demo.processes()}", timeout_s=TIMEOUT_S)
