"""tdserve/cli/shell/lasting.py: SIGTERM is heard from the first line on, and a failure ends after its pause."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tdserve.base.errors import ClosedError
from tdserve.cli.main import main
from tdserve.cli.shell.lasting import lasting
from tests.processes import alarm

ROOT = Path(__file__).parents[4]
HELD_BACK = ("env", "--block-signal=TERM")
"""As the image starts a command."""


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Restores the signal handlers that a lasting command has set."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


def start(program: str, *, prefix: tuple[str, ...] = (), delay_s: str = "") -> subprocess.Popen[str]:
    """Starts a program; SIGTERM has its default effect, as when a shell starts it."""
    environ = {**os.environ, "TDSERVE_FAIL_DELAY_S": delay_s}
    return subprocess.Popen(
        [*prefix, sys.executable, "-c", program], cwd=ROOT, env=environ, stderr=subprocess.PIPE, text=True
    )


UNWINDING = """
import os, sys
from tdserve.cli.shell.lasting import end_on_sigterm
end_on_sigterm()
try:
    os.kill(os.getpid(), 15)
finally:
    print("unwound", file=sys.stderr)
"""

SWALLOWING = """
import os, time
from tdserve.cli.shell import lasting
lasting.UNWINDING_S = 0.1
lasting.end_on_sigterm()
try:
    os.kill(os.getpid(), 15)
    time.sleep(60.0)
except SystemExit:
    time.sleep(60.0)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("program", "said"), [(UNWINDING, "unwound\n"), (SWALLOWING, "")])
def test_sigterm_when_it_comes_then_unwinds_or_ends_with_exit_code_0(program: str, said: str) -> None:
    with alarm(30.0, "its end"), start(program) as process:
        assert (process.wait(), process.communicate()[1]) == (0, said)


COMMAND = """
import os, sys, tempfile
from tdserve.cli import main as shell
@shell.cli.command()
def write():
    with tempfile.TemporaryDirectory(dir={folder!r}):
        os.kill(os.getpid(), 15)
sys.exit(shell.main(["write"]))
"""


@pytest.mark.slow
def test_command_when_sigterm_comes_then_removes_what_it_has_not_finished(tmp_path: Path) -> None:
    with alarm(30.0, "its end"), start(COMMAND.format(folder=str(tmp_path))) as process:
        assert (process.wait(), process.communicate()[1]) == (128 + signal.SIGTERM, "")
    assert list(tmp_path.iterdir()) == []


def test_command_when_it_is_done_then_the_handler_of_sigterm_is_as_before(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    assert main(["version"]) == 0
    assert signal.getsignal(signal.SIGTERM) is before


def test_command_when_run_in_another_thread_then_runs(capsys: pytest.CaptureFixture[str]) -> None:
    with ThreadPoolExecutor() as pool:
        assert pool.submit(main, ["version"]).result(30.0) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("command", "exit_code"), [("serve", 0), ("demo", 0), ("ls", 128 + signal.SIGTERM)])
def test_command_when_sigterm_comes_while_python_starts_then_ends_by_it(command: str, exit_code: int) -> None:
    program = f"import os; os.kill(os.getpid(), 15); from tdserve.cli.main import main; main(['{command}'])"
    with alarm(60.0, "its end"), start(program, prefix=HELD_BACK) as process:
        assert (process.wait(), process.communicate()[1]) == (exit_code, "")


@pytest.mark.slow
def test_command_when_it_fails_then_its_line_at_once_and_its_end_after_the_pause() -> None:
    program = "import sys; from tdserve.cli.main import main; sys.exit(main(['serve', '/nowhere', '--port', '-1']))"
    with alarm(60.0, "its end"), start(program, delay_s="3") as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("tdserve: invalid port")
        signalled_s = time.monotonic()
        assert process.poll() is None
        assert process.wait() == 1
        assert time.monotonic() - signalled_s > 1.0
        assert process.stderr.read() == ""


@pytest.mark.slow
def test_command_when_terminated_in_its_pause_then_ends_as_failed() -> None:
    program = "import sys; from tdserve.cli.main import main; sys.exit(main(['serve', '/nowhere', '--port', '-1']))"
    with alarm(60.0, "its end"), start(program, delay_s="3600") as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("tdserve: invalid port")
        process.terminate()
        assert process.wait() == 1


def test_command_when_no_pause_is_asked_for_then_fails_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @lasting
    def command() -> int:
        raise ClosedError(what="the\nstore")

    for said in ("", "soon", "-1", "inf"):
        monkeypatch.setenv("TDSERVE_FAIL_DELAY_S", said)
        assert command() == 1
        assert capsys.readouterr().err.count("\n") == 1
