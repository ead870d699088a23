"""Strings that the server keeps for clients have a maximum length: the error for a longer one names the argument."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.base.config import PROTOCOL_VERSION
from tdserve.base.ids import make_client_id
from tdserve.control.connection import CHANNEL_OPTIONS
from tdserve.control.control_pb2_grpc import ControlServiceStub
from tdserve.structure.captures.capture import capture
from tdserve.structure.trees import codec
from tdserve.v1 import control_pb2
from tests.errors import raises
from tests.integration.test_unknown_peers import peak_mib

pytestmark = pytest.mark.integration

ROW = TensorDict({"x": torch.zeros(4)}, [])
LONG = "c" * 20_000_000


def test_consumer_when_its_name_is_long_then_refused_and_nothing_is_kept(
    server: tdserve.Server, client: tdserve.Client, name: str
) -> None:
    replay = client.create_replay(name, like=ROW, capacity=1000)
    replay.extend(ROW.expand(8).clone())
    with pytest.raises(tdserve.InvalidRequestError, match="20000000 characters"):
        replay.sample(1, consumer=LONG)
    before = peak_mib(server.pid)
    for _ in range(20):
        replay.extend(ROW.expand(2).clone())
    assert replay.sample(1, consumer="short", timeout_s=5.0).batch_size == (1,)
    assert peak_mib(server.pid) - before < 10


@pytest.mark.parametrize("field", ["host", "boot_id", "gpu"])
def test_hello_when_a_name_in_it_is_long_then_refused(server: tdserve.Server, field: str) -> None:
    said: dict[str, Any] = {"protocol_version": PROTOCOL_VERSION, "client_id": make_client_id(), "transport": "gloo"}
    hello = control_pb2.Hello(**{**said, field: "x" * 1_000_000})
    with grpc.insecure_channel(server.address, options=CHANNEL_OPTIONS) as channel:
        stub: Any = ControlServiceStub(channel)
        (answer,) = stub.Session(iter([control_pb2.ClientMessage(hello=hello)]))
    assert answer.failure.error == "InvalidRequestError"


def test_settings_when_they_are_long_then_refused(client: tdserve.Client, name: str) -> None:
    request = control_pb2.CreateStoreRequest(
        name=name,
        kind=control_pb2.STORE_KIND_REPLAY,
        capacity=10,
        spec=codec.encode(capture(ROW).spec),
        settings='{"policy": "' + "x" * 8_000_000 + '"}',
    )
    session = client.session(client.make_deadline(None))
    with raises(tdserve.InvalidRequestError, argument="settings"):
        session.send(client.requests.begin_change(), create_store=request).wait(30.0, "the creation of a table")
    assert name not in client


@pytest.mark.parametrize("transport", ["gloo", "shm"])
def test_table_when_it_has_values_and_was_never_extended_then_all_of_it_is_no_rows(
    server: tdserve.Server, name: str, transport: Any
) -> None:
    like = ROW.clone().set_non_tensor("text", "hello")
    with server.client(transport=transport) as client:
        table = client.create_replay(name, like=like, capacity=10)
        for rows in (table[:], table[0:0], table[torch.zeros(0, dtype=torch.long)]):
            assert rows.batch_size == (0,)
            assert rows["text"] == []
        table.extend(torch.stack([like, like]))
        assert table[:]["text"] in (["hello", "hello"], "hello")
