from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.base.deadline import Deadline
from tdserve.base.errors import NotLocalError
from tdserve.client.local.end import open_local
from tdserve.client.local.root_files import FileAccess
from tdserve.v1 import control_pb2

TD = TensorDict({"a": torch.arange(3)}, [3])


@pytest.fixture
def seen_root(local_client: tdserve.Client) -> Path:
    """The server's root folder, as a client on its machine sees it."""
    local = local_client.session(Deadline.after(20.0)).local
    assert local is not None
    return local.root


def test_open_local_when_the_welcome_has_no_files_then_none_or_an_error() -> None:
    def opened(transport: str) -> object:
        return open_local(
            control_pb2.Welcome(session=1),
            transport=transport,
            access=FileAccess(),
            address="there:1",
            on_message=lambda _message: None,
            on_lost=lambda: None,
        )

    assert opened("auto") == (None, "the server runs on another machine")
    with pytest.raises(NotLocalError, match=r"there:1.*another machine"):
        opened("shm")


def test_open_local_when_the_processor_has_another_memory_order_then_goes_over_the_network_or_names_it(
    local_client: tdserve.Client,
) -> None:
    welcome = local_client.session(Deadline.after(20.0)).welcome
    assert welcome.HasField("local")  # only the processor is not the same

    def opened(transport: str) -> object:
        return open_local(
            welcome,
            transport=transport,
            access=FileAccess(),
            address="here:1",
            on_message=lambda _message: None,
            on_lost=lambda: None,
            machine="aarch64",
        )

    assert opened("auto") == (None, "this machine is aarch64; rows are shared in memory on x86-64 only")
    with pytest.raises(NotLocalError, match=r"here:1.*aarch64.*x86-64 only"):
        opened("shm")


def test_session_when_the_root_is_seen_elsewhere_then_found_where_it_is_said(
    server: tdserve.Server, tmp_path: Path, seen_root: Path
) -> None:
    (tmp_path / "seen here").symlink_to(seen_root)
    with server.client(transport="shm", root=str(tmp_path / "seen here")) as client:
        local = client.session(Deadline.after(20.0)).local
        assert local is not None
        assert local.root == tmp_path / "seen here"
        client.init_remote(TD, "seen elsewhere")
        assert client["seen elsewhere"]["a"].tolist() == [0, 1, 2]
        client.delete("seen elsewhere")


@pytest.mark.slow
@pytest.mark.parametrize("what", ["nothing", "another file", "a copy"])
def test_session_when_the_root_is_not_visible_then_reports_it_and_uses_the_network_if_allowed(
    server: tdserve.Server, tmp_path: Path, seen_root: Path, what: str
) -> None:
    if what == "another file":
        (tmp_path / "nonce").write_text("another")
    elif what == "a copy":
        shutil.copyfile(seen_root / "nonce", tmp_path / "nonce")
    reason = "does not see" if what == "nothing" else "another one"
    with server.client(transport="auto", root=str(tmp_path)) as client:
        opened = client.session(Deadline.after(20.0))
        assert opened.transport == "gloo"
        assert reason in opened.why_not_local
        assert client.stats()["why_not_shm"] == opened.why_not_local
    with pytest.raises(NotLocalError, match=reason):
        server.client(transport="shm", root=str(tmp_path)).session(Deadline.after(20.0))
