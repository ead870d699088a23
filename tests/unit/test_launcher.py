from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tdserve
from tdserve.base.errors import InvalidRequestError, RootInUseError, WrongStateError
from tdserve.store.roots.root import Root


@pytest.mark.parametrize(
    "settings", [{"port": -1}, {"num_workers": 0}, {"host": "0.0.0.0"}, {"grace_s": -1.0}, {"devices": ["cpu"]}]
)
def test_server_when_a_setting_cannot_be_then_refused_and_nothing_is_made(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    with pytest.raises(InvalidRequestError):
        tdserve.Server(tmp_path / "root", **settings)
    assert not (tmp_path / "root").exists()


def test_server_when_a_setting_has_another_name_then_the_error_has_the_right_one(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"workers": 2}
    with pytest.raises(
        InvalidRequestError, match=r"workers.*tdserve\.Server has no such setting; did you mean num_worker"
    ):
        tdserve.Server(tmp_path / "root", **settings)


@pytest.mark.parametrize("root", [None, 5, "", b"folder"], ids=repr)
def test_server_when_the_root_names_no_folder_then_refused(root: Any) -> None:
    with pytest.raises(InvalidRequestError, match="names no folder"):
        tdserve.Server(root)


def test_server_when_devices_are_given_then_a_worker_for_each(tmp_path: Path) -> None:
    config = tdserve.Server(tmp_path / "root", devices=["cuda:0", "cuda:1"]).config
    assert (config.num_workers, config.devices) == (2, ("cuda:0", "cuda:1"))


def test_server_when_not_started_then_has_no_address(tmp_path: Path) -> None:
    server = tdserve.Server(tmp_path / "root")
    assert not server.is_alive
    assert repr(server) == f"<Server of {tmp_path / 'root'} not running>"
    for ask in (lambda: server.address, lambda: server.pid, server.client):
        with pytest.raises(WrongStateError):
            ask()
    server.shutdown()
    server.shutdown()


@pytest.mark.slow
@pytest.mark.usefixtures("borrows_nothing")  # it waits for its own child
def test_server_when_it_was_killed_then_can_be_started_again_and_leaves_no_pipe_open(tmp_path: Path) -> None:
    with tdserve.Server(tmp_path / "root") as server:
        num_files = len(os.listdir("/proc/self/fd"))
        os.kill(server.pid, signal.SIGKILL)
        os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOWAIT)
        assert not server.is_alive
        server.start()
        assert len(os.listdir("/proc/self/fd")) == num_files


@pytest.fixture
def many_files() -> Iterator[None]:
    """Leaves only descriptors above 1,023 to a test."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip("this user may not open so many files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    opened = [os.open(os.devnull, os.O_RDONLY)]
    while opened[-1] < 1024:
        opened.append(os.dup(opened[0]))
    yield
    for fd in opened:
        os.close(fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.slow
@pytest.mark.usefixtures("many_files")
def test_start_when_very_many_files_are_open_then_starts_all_the_same(tmp_path: Path) -> None:
    with tdserve.Server(tmp_path / "root") as server, server.client() as client:
        assert client.stores() == []


@pytest.mark.slow
def test_start_when_the_root_is_in_use_then_its_error_arrives_and_no_process_stays(tmp_path: Path) -> None:
    root = Root.acquire(tmp_path / "root")
    server = tdserve.Server(tmp_path / "root")
    with pytest.raises(RootInUseError) as raised:
        server.start()
    assert str(os.getpid()) in raised.value.holder
    assert not server.is_alive
    root.release()
