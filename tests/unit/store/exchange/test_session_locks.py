"""Locks of local sessions: held as long as a process may write, whatever happens to it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tdserve.base.errors import ConnectError, TDServeError
from tdserve.store.exchange import session_locks
from tdserve.store.exchange.session_locks import SessionLock, is_held, remove

HOLD = """
import os, sys
from pathlib import Path
from tdserve.store.exchange.session_locks import SessionLock
lock = SessionLock.hold(Path(sys.argv[1]), "other")
print("held", flush=True)
if sys.argv[2] == "stop":
    os.kill(os.getpid(), 19)
sys.stdin.read()
"""


def held(folder: Path, name: str = "a") -> SessionLock:
    """A lock of this process."""
    lock = SessionLock.hold(folder, name)
    assert lock is not None
    return lock


def test_lock_when_held_then_shown_until_released(tmp_path: Path) -> None:
    lock = held(tmp_path)
    assert is_held(tmp_path, "a")
    lock.release()
    lock.release()
    assert not is_held(tmp_path, "a")
    assert not is_held(tmp_path, "never made")


def test_hold_when_the_name_is_taken_then_connect_error_and_the_first_keeps_it(tmp_path: Path) -> None:
    first = held(tmp_path)
    with pytest.raises(ConnectError, match="exists"):
        SessionLock.hold(tmp_path, "a")
    assert is_held(tmp_path, "a")
    first.release()


def test_hold_when_the_file_is_a_symbolic_link_then_refused_and_its_target_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConnectError):
        SessionLock.hold(tmp_path, "a")
    assert not (tmp_path / "elsewhere").exists()
    with pytest.raises(TDServeError):
        is_held(tmp_path, "a")


def test_hold_when_the_folder_is_gone_then_connect_error(tmp_path: Path) -> None:
    with pytest.raises(ConnectError):
        SessionLock.hold(tmp_path / "none", "a")


READ_ONLY = """
import os, sys
from pathlib import Path
from tdserve.store.exchange.session_locks import SessionLock
os.setresuid(65534, 65534, 65534)
print(SessionLock.hold(Path(sys.argv[1]), "b"))
"""


def test_hold_when_this_process_may_not_write_there_then_none() -> None:
    # nobody can write to /proc/self, and a user cannot write to another user's folder.
    if os.geteuid() != 0:
        assert SessionLock.hold(Path("/"), "b") is None
        return
    done = subprocess.run([sys.executable, "-c", READ_ONLY, "/"], capture_output=True, text=True, check=False)
    if "PermissionError" in done.stderr or "ModuleNotFoundError" in done.stderr:
        pytest.skip("another user may not even import tdserve here")
    assert done.stdout.strip() == "None", done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("way", ["run", "stop"])
def test_lock_when_its_process_is_killed_then_free_and_not_while_it_is_stopped(tmp_path: Path, way: str) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path), way]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        if way == "stop":
            _, status = os.waitpid(process.pid, os.WUNTRACED)
            assert os.WIFSTOPPED(status)
        assert is_held(tmp_path, "other")
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not is_held(tmp_path, "other")


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_lock_when_its_process_has_forked_then_the_childs_release_leaves_the_parents(tmp_path: Path) -> None:
    lock = held(tmp_path)
    child = os.fork()
    if child == 0:
        lock.release()
        os._exit(0)
    os.waitpid(child, 0)
    assert is_held(tmp_path, "a")
    lock.release()


def test_lock_when_its_process_starts_another_program_then_that_does_not_inherit_it(tmp_path: Path) -> None:
    lock = held(tmp_path)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, close_fds=False) as other:
        lock.release()
        assert not is_held(tmp_path, "a")
        assert other.stdin is not None


def test_remove_when_done_then_gone_and_harmless_again(tmp_path: Path) -> None:
    held(tmp_path).release()
    remove(tmp_path, "a")
    remove(tmp_path, "a")
    assert os.listdir(tmp_path) == []
    assert session_locks.is_held(tmp_path, "a") is False
