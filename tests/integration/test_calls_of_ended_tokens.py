"""Calls that wait while the token of their caller ends, or its entry changes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.control.connection import ControlConnection
from tdserve.v1 import control_pb2
from tests.integration.conftest import FreshServer
from tests.integration.token_files import TIMEOUT_S, TokenFile
from tests.processes import wait_for

pytestmark = pytest.mark.integration

ROW = TensorDict({"x": torch.zeros(())}, [])

BUSY_S = 4.0
"""Time that a test allows for the end of a call, which is one second: the machine may be busy with other tests."""


@pytest.fixture
def tokens(tmp_path: Path) -> TokenFile:
    """A file without tokens."""
    return TokenFile(tmp_path / "tokens.json")


@pytest.fixture
def server(tokens: TokenFile, fresh_server: FreshServer) -> tdserve.Server:
    """A server that uses it."""
    return fresh_server(tokens_file=str(tokens.path))


@pytest.fixture
def operator(tokens: TokenFile, server: tdserve.Server) -> Iterator[tdserve.Client]:
    """A client that may do everything."""
    token = tokens.add("operator", "admin")
    wait_for(lambda: _is_known(server, token), "the token")
    with server.client(token=token) as client:
        yield client


def _is_known(server: tdserve.Server, token: str) -> bool:
    """Returns whether the server has read the file with a token."""
    with closing(ControlConnection(server.address, token=token)) as connection:
        try:
            connection.call("ListStores", control_pb2.ListStoresRequest(), timeout_s=TIMEOUT_S)
        except tdserve.UnauthenticatedError:
            return False
    return True


def _wait_for_store(address: str, token: str, timeout_s: float) -> Future[Any]:
    """Makes the call that waits for the store "later"; returns its answer or error once it is there."""
    asked, ended = control_pb2.DescribeStoreRequest(name="later", timeout_s=timeout_s), Future[Any]()

    def call() -> None:
        with closing(ControlConnection(address, token=token)) as connection:
            try:
                ended.set_result(connection.call("DescribeStore", asked, timeout_s=timeout_s))
            except tdserve.TDServeError as error:
                ended.set_exception(error)

    threading.Thread(target=call, name="test-call", daemon=True).start()
    return ended


@pytest.mark.slow
def test_call_when_its_token_is_revoked_while_it_waits_then_ends_and_others_wait_on(
    tokens: TokenFile, server: tdserve.Server, operator: tdserve.Client
) -> None:
    revoked, other = (tokens.add(name, "read") for name in ("revoked", "other"))
    for token in (revoked, other):
        wait_for(lambda token=token: _is_known(server, token), "the token")  # type: ignore[misc]
    ended, waiting = (_wait_for_store(server.address, token, TIMEOUT_S) for token in (revoked, other))
    tokens.remove("revoked")
    error = ended.exception(timeout=BUSY_S)
    assert isinstance(error, tdserve.UnauthenticatedError)
    assert "revoked" in str(error)
    operator.create_replay("later", ROW, 10)
    assert waiting.result(timeout=BUSY_S).name == "later"


@pytest.mark.slow
def test_call_when_the_entry_of_its_token_changes_while_it_waits_then_the_client_asks_again_with_what_it_grants_now(
    tokens: TokenFile, server: tdserve.Server, operator: tdserve.Client
) -> None:
    token = tokens.add("member", "read")
    wait_for(lambda: _is_known(server, token), "the token")
    with server.client(token=token) as client:
        ended = Future[Any]()

        def call() -> None:
            try:
                ended.set_result(client.replay("later", timeout_s=TIMEOUT_S))
            except tdserve.TDServeError as error:
                ended.set_exception(error)

        threading.Thread(target=call, name="test-call", daemon=True).start()
        tokens.change("member", stores=["other*"])
        assert isinstance(ended.exception(timeout=TIMEOUT_S), tdserve.PermissionDeniedError)
