"""tdserve/base/failpoints.py: the table and the places of its failpoints, and how one is switched on."""

from __future__ import annotations

import ast
import errno
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tdserve.base import failpoints
from tdserve.base.errors import InvalidRequestError
from tdserve.base.failpoints import FAILPOINTS, reach
from tests.errors import raises

PACKAGE = Path(failpoints.__file__).parents[1]


@pytest.fixture(autouse=True)
def _switched_off() -> Iterator[None]:
    """Switches failpoints off after the test."""
    yield
    failpoints.arm("")


def run_until_killed(setting: str, *names: str) -> str:
    """Reaches failpoints in a child process; returns the one at which it was killed."""
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if not pid:
        failpoints.arm(setting)
        for name in names:
            os.write(write_fd, f"{name} ".encode())
            reach(name)
        os._exit(0)
    os.close(write_fd)
    _, status = os.waitpid(pid, 0)
    with open(read_fd) as file:
        reached = file.read().split()
    return reached[-1] if os.waitstatus_to_exitcode(status) == -signal.SIGKILL else ""


def list_places() -> list[str]:
    """Returns the name of each failpoint in the package's source, once per place."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text()
        if "reach(" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "reach":
                assert isinstance(node.args[0], ast.Constant), (
                    f"{path.name}: the name of a failpoint is not written out"
                )
                found.append(str(node.args[0].value))
    return found


@pytest.mark.slow
def test_failpoints_when_listed_then_each_has_one_place_in_the_source() -> None:
    assert sorted(list_places()) == sorted(FAILPOINTS)


def test_failpoint_when_nothing_is_switched_on_then_nothing_happens() -> None:
    reach("commit.recorded")
    assert failpoints.on_reach is None


@pytest.mark.slow
def test_process_when_it_gets_to_the_failpoint_that_is_switched_on_then_it_is_killed() -> None:
    assert run_until_killed("commit.recorded", "commit.shown", "commit.recorded", "put.changed") == "commit.recorded"
    assert run_until_killed("commit.recorded", "commit.shown") == ""


@pytest.mark.slow
def test_process_when_a_count_is_given_then_it_is_killed_at_that_time() -> None:
    times = ["commit.recorded", "put.changed", "commit.recorded"]
    assert run_until_killed("commit.recorded:2", *times) == "commit.recorded"
    assert run_until_killed("commit.recorded:3", *times) == ""


def test_call_when_an_error_is_given_then_it_fails_once_with_that() -> None:
    failpoints.arm("files.made=ENOSPC")
    with pytest.raises(OSError, match="No space left") as failure:
        reach("files.made")
    assert failure.value.errno == errno.ENOSPC
    reach("files.made")


@pytest.mark.slow
def test_failpoint_when_it_is_in_a_file_then_it_strikes_once_in_all_processes(tmp_path: Path) -> None:
    path = tmp_path / "failpoint"
    setting = f"@{path}"
    assert run_until_killed(setting, "put.changed") == ""
    path.write_text("put.changed:2\n")
    assert run_until_killed(setting, "put.changed") == ""
    assert run_until_killed(setting, "put.changed", "put.changed") == "put.changed"
    assert not path.exists()
    assert run_until_killed(setting, "put.changed", "put.changed") == ""


@pytest.mark.parametrize("setting", ["nothing.known", "commit.recorded:0", "commit.recorded:x", "files.made=EWRONG"])
def test_setting_when_it_names_no_failpoint_then_it_is_refused(setting: str) -> None:
    with raises(InvalidRequestError, argument="TDSERVE_FAILPOINT"):
        failpoints.arm(setting)
