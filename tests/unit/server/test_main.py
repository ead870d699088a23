from __future__ import annotations

import gc
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tdserve.base.config import ServerConfig
from tdserve.base.errors import InvalidRequestError, RootInUseError
from tdserve.server.server_process import main, run
from tdserve.server.start_lines import FAILED_PREFIX, READY_PREFIX
from tdserve.store.roots.root import Root
from tests.processes import START_TIMEOUT_S, children_of

WATCHED_START = """
import json, os, sys, tempfile

def watch(event, arguments):
    if event == "subprocess.Popen":
        large = {"grpc", "google.protobuf", "lmdb", "numpy", "tdserve.server.control_process"}
        print(json.dumps({"started": arguments[1][2], "loaded": sorted(large & sys.modules.keys())}), flush=True)
        os._exit(0)

from tdserve.server.server_process import main
os.environ.update(TDSERVE_ROOT=tempfile.mkdtemp(), TDSERVE_PORT="0")
sys.addaudithook(watch)
main([])
"""
"""Prints what a server starts first, and which of the large packages it has imported by then."""


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """What a server does to its process is undone: here it is that of the tests."""
    policy = os.sched_getscheduler(0)
    umask = os.umask(0o022)
    yield
    os.umask(umask)
    os.sched_setscheduler(0, policy, os.sched_getparam(0))
    gc.unfreeze()


def test_run_when_its_parent_is_gone_then_prints_ready_and_leaves_in_order(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ours, theirs = os.pipe()
    os.close(theirs)  # what a parent that dies does
    assert run(ServerConfig(root=str(tmp_path / "root"), port=0, grace_s=0.1), lifeline_fd=ours) == 0
    os.close(ours)
    out = capfd.readouterr().out
    assert out == "" or out.startswith(READY_PREFIX)
    Root.acquire(tmp_path / "root").release()  # nobody has it any more
    assert os.sched_getscheduler(0) == os.SCHED_BATCH


@pytest.mark.parametrize(
    ("shells", "umask", "mode"),
    [(0o000, None, 0o755), (0o077, None, 0o700), (0o022, 0o002, 0o775), (0o000, 0o027, 0o750)],
)
def test_run_when_the_shell_has_a_umask_then_only_its_user_may_write_unless_configured(
    tmp_path: Path, shells: int, umask: int | None, mode: int
) -> None:
    os.umask(shells)
    ours, theirs = os.pipe()
    os.close(theirs)
    assert run(ServerConfig(root=str(tmp_path / "root"), port=0, grace_s=0.1, umask=umask), lifeline_fd=ours) == 0
    os.close(ours)
    assert (tmp_path / "root" / "catalog").stat().st_mode & 0o777 == mode
    assert (tmp_path / "root" / "catalog" / "data.mdb").stat().st_mode & 0o777 == mode & 0o666


@pytest.mark.parametrize("is_older", [False, True])
def test_run_when_tokens_have_roles_then_no_other_user_may_enter_the_folders_of_the_root(
    tmp_path: Path, is_older: bool
) -> None:
    tokens, root = tmp_path / "tokens.json", tmp_path / "root"
    tokens.write_text('{"tokens": []}')
    if is_older:
        (root / "stores").mkdir(parents=True)
    ours, theirs = os.pipe()
    os.close(theirs)
    run(ServerConfig(root=str(root), port=0, grace_s=0.1, tokens_file=str(tokens)), lifeline_fd=ours)
    os.close(ours)
    assert {(root / name).stat().st_mode & 0o777 for name in ("catalog", "sessions", "stores")} == {0o700}
    assert (root / "nonce").stat().st_mode & 0o777 == 0o644  # below the folders, files may be lent


def test_run_when_it_advertises_an_address_then_prints_that_one(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses: list[str] = []
    monkeypatch.setattr(Root, "set_address", lambda _, address: addresses.append(address))
    for advertise in ("example.org:99", "::1"):
        ours, theirs = os.pipe()
        os.close(theirs)
        run(ServerConfig(root=str(tmp_path / "root"), port=0, grace_s=0.1, advertise=advertise), lifeline_fd=ours)
        os.close(ours)
    first, second = (address for address in addresses if address)
    assert first == "example.org:99"
    assert second.startswith("[::1]:")
    assert not second.endswith(":0")


def test_run_when_the_interface_is_not_here_then_refused_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="eth77"):
        run(ServerConfig(root=str(tmp_path / "root"), port=0, interface="eth77"))
    assert not (tmp_path / "root").exists()


def test_run_when_a_priority_was_chosen_then_it_is_left_alone(tmp_path: Path) -> None:
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    root = Root.acquire(tmp_path / "root")
    with pytest.raises(RootInUseError):
        run(ServerConfig(root=str(tmp_path / "root"), port=0))
    root.release()
    assert os.sched_getscheduler(0) == os.SCHED_IDLE


def test_run_when_the_root_is_in_use_then_error_names_the_holder(tmp_path: Path) -> None:
    root = Root.acquire(tmp_path / "root")
    with pytest.raises(RootInUseError) as raised:
        run(ServerConfig(root=str(tmp_path / "root"), port=0))
    assert str(os.getpid()) in raised.value.holder
    root.release()


def test_run_when_it_fails_after_its_fork_server_has_started_then_leaves_no_process(tmp_path: Path) -> None:
    root = Root.acquire(tmp_path / "root")
    before = children_of(os.getpid())
    with pytest.raises(RootInUseError):
        run(ServerConfig(root=str(tmp_path / "root"), port=0))
    root.release()
    assert children_of(os.getpid()) == before


def test_program_when_it_starts_then_its_fork_server_imports_beside_it() -> None:
    """A remote client waits for the fork server's torch, a second of processor time, after each restart."""
    done = subprocess.run(
        [sys.executable, "-c", WATCHED_START], capture_output=True, text=True, timeout=START_TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"started": "tdserve.worker.fork_server", "loaded": []}


def test_run_when_the_port_is_taken_then_the_error_names_the_remedy_and_the_root_is_free(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(InvalidRequestError, match="--port 0"):
            run(ServerConfig(root=str(tmp_path / "root"), port=other.getsockname()[1]))
        assert not (tmp_path / "root").exists()
        Root.acquire(tmp_path / "root").release()
        with pytest.raises(InvalidRequestError, match="--port 0"):
            run(ServerConfig(root=str(tmp_path / "root"), port=other.getsockname()[1]))
    Root.acquire(tmp_path / "root").release()


@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe", b" \n"])
def test_run_when_the_token_file_is_no_good_then_error_names_it(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidRequestError, match=str(path)):
        run(ServerConfig(root=str(tmp_path / "root"), port=0, token_file=str(path)))
    assert not (tmp_path / "root").exists()


def test_main_when_the_server_cannot_start_then_sends_its_parent_the_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TDSERVE_ROOT", "/proc/no such place")
    monkeypatch.setenv("TDSERVE_HOST", "0.0.0.0")
    assert main([]) == 1
    line = capsys.readouterr().out.strip()
    failure = json.loads(line.removeprefix(FAILED_PREFIX))
    assert (failure["error"], failure["fields"]["argument"]) == ("InvalidRequestError", "host")
