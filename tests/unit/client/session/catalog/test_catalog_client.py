from __future__ import annotations

import os
import socket
import time
from threading import Event
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.base.deadline import ONCE_GRACE_S, Deadline
from tdserve.base.errors import (
    ConnectError,
    DeadlineExceededError,
    ForkedClientError,
    InvalidRequestError,
    StoreNotFoundError,
)
from tdserve.client.session.catalog.catalog_client import CatalogClient
from tdserve.v1 import control_pb2
from tests.errors import raises

TD = TensorDict({"b": torch.zeros(4), "a": {"c": torch.zeros(4, 2)}}, [4])


@pytest.mark.parametrize("address", ["", "host", "host:", ":x", "host:port", "host:99999", 7, None])
def test_client_when_the_address_is_none_then_refused(address: Any) -> None:
    with pytest.raises(InvalidRequestError, match="HOST:PORT"):
        CatalogClient(address)


def test_stores_when_created_then_listed_by_prefix(client: tdserve.Client, name: str) -> None:
    for suffix in ("b", "a"):
        client.init_remote(TD, f"{name}.{suffix}")
    assert client.stores(f"{name}.") == [f"{name}.a", f"{name}.b"]
    assert f"{name}.a" in client.stores()
    assert f"{name}.a" in client
    assert f"{name}.c" not in client
    assert "../" not in client


@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("is_leaf", [False, True])
def test_keys_when_asked_then_as_the_tensordict_has_them(
    client: tdserve.Client, name: str, is_nested: bool, is_leaf: bool
) -> None:
    client.init_remote(TD, name)
    assert client.keys(name, is_nested, is_leaf) == list(TD.keys(is_nested, is_leaf))
    assert client.keys(name, is_nested, is_leaf, sort=True) == list(TD.keys(is_nested, is_leaf, sort=True))


@pytest.mark.parametrize("token", [b"secret", 5, "secret\n", "sécret"], ids=ascii)
def test_client_when_the_token_cannot_be_sent_then_refused_without_showing_it(token: Any) -> None:
    with raises(InvalidRequestError, argument="token") as raised:
        CatalogClient("127.0.0.1:1", token=token)
    assert "cret" not in str(raised.value)


def test_describe_when_it_is_not_there_then_by_the_way_of_asking(client: tdserve.Client, name: str) -> None:
    with raises(StoreNotFoundError, name=name):
        client.describe(name)
    with raises(DeadlineExceededError, name=name):
        client.describe(name, timeout_s=0.05)
    with raises(DeadlineExceededError, name=name):
        client.describe(name, timeout_s=1e-6)  # which the first look takes


def test_delete_when_done_then_gone(client: tdserve.Client, name: str) -> None:
    client.init_remote(TD, name)
    client.delete(name)
    assert name not in client
    with pytest.raises(StoreNotFoundError):
        client.delete(name)


def test_client_when_used_after_fork_then_the_error_names_the_remedy(
    server: tdserve.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = server.client()
    with monkeypatch.context() as forked:
        forked.setattr(os, "getpid", lambda: 1)
        with pytest.raises(ForkedClientError, match=r"call tdserve\.connect\(\) in the child"):
            client.stores()
        client.close()  # closes nothing that is the parent's
        assert client.is_closed
    client.catalog.is_closed = False
    assert isinstance(client.stores(), list)
    client.close()


def test_call_when_an_earlier_step_has_taken_all_the_time_then_ends_soon_and_names_the_time_of_the_whole() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        deadline = Deadline(at_s=time.monotonic() - 1.0, timeout_s=0.3)
        begun_s = time.monotonic()
        with (
            CatalogClient(f"127.0.0.1:{silent.getsockname()[1]}", timeout_s=60.0) as catalog,
            pytest.raises((ConnectError, DeadlineExceededError)),
        ):
            catalog.get_fingerprint("store", deadline)
        assert time.monotonic() - begun_s < ONCE_GRACE_S


def test_call_when_its_session_is_lost_meanwhile_then_only_the_rest_of_its_time_is_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        catalog = CatalogClient(f"127.0.0.1:{silent.getsockname()[1]}", timeout_s=60.0)
        asked: list[float] = []

        def lose_session(method: str, request: object, deadline: Deadline) -> None:
            wait_s = deadline.limit(60.0)
            asked.append(wait_s)
            Event().wait(wait_s)

        catalog.ask_session = lose_session
        begun_s = time.monotonic()
        with catalog, pytest.raises((ConnectError, DeadlineExceededError)):
            catalog.call("ListStores", control_pb2.ListStoresRequest(), timeout_s=4.0)
        assert asked
        assert time.monotonic() - begun_s < 7.5
