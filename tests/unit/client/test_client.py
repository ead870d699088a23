from __future__ import annotations

import inspect
import socket
import sys
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.base.errors import (
    ClosedError,
    ConnectError,
    InvalidRequestError,
    InvalidSpecError,
    UnauthenticatedError,
    WrongStateError,
)
from tdserve.v1 import control_pb2
from tests.errors import raises

ROW = TensorDict({"a": torch.zeros(2)}, [])


def test_connect_when_no_server_runs_then_connect_error_and_nothing_stays() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"  # taken, and nobody listens
        with raises(ConnectError, address=address):
            tdserve.connect(address, timeout_s=0.05)


@pytest.mark.slow
def test_connect_when_no_address_is_given_then_variables_name_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("secret\n")
    with tdserve.Server(tmp_path / "root", token_file=str(tmp_path / "token")).start() as server:
        monkeypatch.setenv("TDSERVE_ADDRESS", server.address)
        with pytest.raises(UnauthenticatedError):
            tdserve.connect()
        monkeypatch.setenv("TDSERVE_TOKEN", "secret")
        with tdserve.connect() as client:
            assert client.address == server.address
        with pytest.raises(UnauthenticatedError):
            tdserve.connect(server.address)  # a token is for the server that the same variables name
        with pytest.raises(UnauthenticatedError):
            tdserve.connect(token="another one")
        monkeypatch.setenv("TDSERVE_TOKEN", "")
        monkeypatch.setenv("TDSERVE_TOKEN_FILE", str(tmp_path / "token"))
        monkeypatch.setenv("TDSERVE_TRANSPORT", "gloo")
        with tdserve.connect() as client:
            assert client.stats()["transport"] == "gloo"
        with tdserve.connect(transport="shm") as client:
            assert client.stats()["transport"] == "shm"


def test_connect_when_nothing_names_a_server_then_error_names_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidRequestError, match="TDSERVE_ADDRESS") as caught:
        tdserve.connect()
    assert caught.value.argument == "address"


def test_client_when_shown_then_names_its_server(client: tdserve.Client) -> None:
    assert repr(client) == f"<Client of {client.address}>"


@pytest.mark.parametrize(("capacity", "min_size"), [(0, 1), (-1, 1), (2.0, 1), (5, 6), (5, 0)])
def test_create_replay_when_a_number_is_wrong_then_refused(
    client: tdserve.Client, name: str, capacity: Any, min_size: Any
) -> None:
    with pytest.raises(InvalidRequestError):
        client.create_replay(name, ROW, capacity, min_size=min_size)
    assert name not in client


def test_create_replay_when_a_key_is_ours_then_refused(client: tdserve.Client, name: str) -> None:
    with pytest.raises(InvalidSpecError, match="'index'"):
        client.create_replay(name, TensorDict({"index": torch.zeros(2)}, []), 5)


def test_replay_when_it_exists_then_the_same_table(client: tdserve.Client, name: str) -> None:
    made = client.create_replay(name, ROW, 5, min_size=2)
    made.extend(ROW.expand(3))
    assert len(client.create_replay(name, ROW, 5, min_size=2, exists_ok=True)) == 3
    assert len(client.replay(name)) == 3
    client.init_remote(ROW, f"{name}.td")
    with pytest.raises(WrongStateError, match="is not a replay"):
        client.replay(f"{name}.td")


def test_stats_when_asked_then_plain_values(client: tdserve.Client, name: str) -> None:
    client.init_remote(ROW, name)
    stats = client.stats()
    session = next(each for each in stats["sessions"] if each["session"] == stats["session"])
    assert (session["host"], session["transport"]) == (socket.gethostname(), client.transport)
    assert stats["num_stores"] >= 1
    assert stats["workers"][0]["is_ready"]
    fields = {field.name for field in control_pb2.GetStatsResponse.DESCRIPTOR.fields}
    reasons = ("why_not_shm", "why_not_gloo", "why_not_nccl")
    assert stats.keys() == {*fields, *reasons, "address", "transport", "session"}
    assert [stats[reason] for reason in reasons] == ["", "", ""]
    assert stats["address"] == client.address
    assert stats["transports"]["inline" if client.transport == "gloo" else "shm"]["transfers_in"] >= 1


@pytest.mark.parametrize("step", range(4))
def test_delete_when_the_client_is_closed_amid_it_then_done_or_refused_as_closed(
    server: tdserve.Server, name: str, step: int
) -> None:
    client, code, lines = server.client(), inspect.unwrap(tdserve.Client.delete).__code__, list[int]()

    def close_at_a_line(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code is not code:
            return None
        if event == "line":
            lines.append(frame.f_lineno)
            if len(lines) == step + 1:
                client.close()
        return close_at_a_line

    client.init_remote(ROW, name)
    before = sys.gettrace()
    sys.settrace(close_at_a_line)
    try:
        with suppress(ClosedError):
            client.delete(name)
    finally:
        sys.settrace(before)
        client.close()
    assert len(lines) >= step
    with server.client() as other:
        if name in other:
            other.delete(name)
