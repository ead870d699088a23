"""Requests that no client of ours sends: the peer gets a typed error and changes nothing, and all others are served
on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import pytest

import tdserve
from tdserve.base.config import PROTOCOL_VERSION
from tdserve.base.ids import make_client_id
from tdserve.control.connection import ControlConnection
from tdserve.control.status import decode_failure
from tdserve.structure.captures.capture import capture
from tdserve.structure.trees import codec
from tdserve.v1 import control_pb2, spec_pb2
from tests.integration.conftest import example

pytestmark = pytest.mark.integration


@pytest.fixture
def wire(server: tdserve.Server) -> Iterator[ControlConnection]:
    """A bare connection, for requests that no client of ours would send."""
    connection = ControlConnection(server.address)
    yield connection
    connection.close()


def contradictions() -> dict[str, spec_pb2.Spec]:
    """Structures that cannot be."""
    two_names = spec_pb2.Node(has_names=True, names=[spec_pb2.DimName(), spec_pb2.DimName()])

    def changed(change: Callable[[Any], object]) -> spec_pb2.Spec:
        message = codec.encode(capture(example()).spec)
        change(message.root)
        return message

    return {
        "leaf outside of the batch": changed(lambda root: root.entries[0].tensor.shape.__setitem__(0, 5)),
        "node outside of the batch": changed(lambda root: root.entries[1].node.batch_size.__setitem__(0, 5)),
        "negative size": changed(lambda root: root.entries[0].tensor.shape.__setitem__(1, -3)),
        "too large": changed(lambda root: root.entries[0].tensor.shape.extend([2**40, 2**40])),
        "same key twice": changed(lambda root: root.entries.append(root.entries[0])),
        "no dtype": changed(lambda root: root.entries[0].tensor.ClearField("dtype")),
        "unknown dtype": changed(lambda root: setattr(root.entries[0].tensor, "dtype", 99)),
        "empty entry": changed(lambda root: root.entries.add(key="z")),
        "too many names": changed(lambda root: root.MergeFrom(two_names)),
        "no root": spec_pb2.Spec(),
    }


@pytest.mark.parametrize("what", contradictions())
def test_spec_when_it_contradicts_itself_then_invalid_spec_and_nothing_is_made(
    client: tdserve.Client, wire: ControlConnection, name: str, what: str
) -> None:
    for kind in (control_pb2.STORE_KIND_TENSORDICT, control_pb2.STORE_KIND_REPLAY):
        spec = contradictions()[what]
        request = control_pb2.CreateStoreRequest(name=name, kind=kind, spec=spec, capacity=3)
        with pytest.raises(tdserve.InvalidSpecError):
            raise first_answer(wire, hello(), control_pb2.ClientMessage(request=1, create_store=request))
    assert name not in client


def test_create_when_the_request_is_strange_then_typed_error(client: tdserve.Client, wire: ControlConnection) -> None:
    spec = codec.encode(capture(example()).spec)
    tensordict, ring = control_pb2.STORE_KIND_TENSORDICT, control_pb2.STORE_KIND_REPLAY
    for request, error in [
        (control_pb2.CreateStoreRequest(name="strange", spec=spec), tdserve.InvalidRequestError),
        (control_pb2.CreateStoreRequest.FromString(b"\x0a\x01s\x10\x4d"), tdserve.InvalidRequestError),  # kind 77
        (control_pb2.CreateStoreRequest(name="strange", kind=tensordict), tdserve.InvalidSpecError),
        (control_pb2.CreateStoreRequest(name="../x", kind=tensordict, spec=spec), tdserve.InvalidRequestError),
        (control_pb2.CreateStoreRequest(name="strange", kind=ring, spec=spec, capacity=0), tdserve.InvalidRequestError),
        (control_pb2.CreateStoreRequest(name="strange", kind=ring, spec=spec, capacity=2**63), tdserve.TDServeError),
        (
            control_pb2.CreateStoreRequest(name="strange", kind=ring, spec=spec, capacity=4, settings="{"),
            tdserve.RequestError,
        ),
    ]:
        with pytest.raises(error):
            raise first_answer(wire, hello(), control_pb2.ClientMessage(request=1, create_store=request))
    assert "strange" not in client


def first_answer(wire: ControlConnection, *messages: control_pb2.ClientMessage) -> Any:
    """The server's answer to a session that begins like this."""
    answers: SimpleQueue[Any] = SimpleQueue()
    stream = wire.open_session(on_message=answers.put, on_lost=answers.put)
    for message in messages:
        stream.send(message)
    answer = answers.get(timeout=20.0)
    while isinstance(answer, control_pb2.ServerMessage) and answer.HasField("welcome"):
        answer = answers.get(timeout=20.0)
    stream.close()
    return decode_failure(answer.failure) if hasattr(answer, "HasField") and answer.HasField("failure") else answer


def hello(**changed: Any) -> control_pb2.ClientMessage:
    arguments = {"protocol_version": PROTOCOL_VERSION, "client_id": make_client_id(), "transport": "gloo", **changed}
    return control_pb2.ClientMessage(hello=control_pb2.Hello(**arguments))


def test_hello_when_of_another_version_then_both_versions_are_named(wire: ControlConnection) -> None:
    error = first_answer(wire, hello(protocol_version=99))
    assert isinstance(error, tdserve.ProtocolVersionError)
    assert {error.expected, error.actual} == {99, PROTOCOL_VERSION}


def test_hello_when_strange_then_typed_error(wire: ControlConnection) -> None:
    assert isinstance(first_answer(wire, hello(transport="pigeon")), tdserve.NotSupportedError)
    assert isinstance(first_answer(wire, hello(client_id=b"short")), tdserve.InvalidRequestError)
    assert isinstance(first_answer(wire, control_pb2.ClientMessage(request=1)), tdserve.TDServeError)


def requests(name: str) -> list[control_pb2.ClientMessage]:
    """Requests that contradict the store of ``example()`` or themselves."""
    fingerprint = capture(example()).spec.fingerprint
    short = control_pb2.Content(fingerprint=fingerprint, inline=b"short")
    message, write = control_pb2.ClientMessage, control_pb2.WriteRequest
    mask = {"items": [{"mask": {"shape": [4], "data": b"\1"}}]}
    return [
        message(request=1, write=write(store=name, content=short)),
        message(request=1, write=write(store=name, content=control_pb2.Content(fingerprint=b"other", inline=b""))),
        message(request=1, write=write(store=name, content=short, keys=[{"parts": ["z"]}])),
        message(request=1, write=write(store=name, content=short, new_store={"name": name})),
        message(request=1, write=write(store=name, content=short, selection=mask)),
        message(request=1, write=write(store=name, content=short, selection={"items": [{}]})),
        message(request=1, read=control_pb2.ReadRequest(store=name, selection={"items": [{"at": 9}]})),
        message(request=1, read=control_pb2.ReadRequest(store=name, selection=mask)),
        message(request=1, read=control_pb2.ReadRequest(store=name, keys=[{"parts": ["z"]}])),
        message(request=1, read=control_pb2.ReadRequest(store="../x")),
        message(request=1, extend=control_pb2.ExtendRequest(store=name, num_rows=1)),
        message(request=1, sample=control_pb2.SampleRequest(store=name, num_rows=1)),
        message(request=1, publish=control_pb2.PublishRequest(store=name)),
        message(request=1, latest=control_pb2.LatestRequest(store=name)),
        message(request=1),
    ]


@pytest.mark.parametrize("number", range(len(requests(""))))
def test_request_when_it_contradicts_the_store_then_fails_and_changes_nothing(
    wire: ControlConnection, store: Any, number: int
) -> None:
    answers: SimpleQueue[Any] = SimpleQueue()
    stream = wire.open_session(on_message=answers.put, on_lost=answers.put)
    stream.send(hello())
    assert answers.get(timeout=20.0).HasField("welcome")
    stream.send(requests(store.name)[number])
    answer = answers.get(timeout=20.0)
    assert isinstance(answer, control_pb2.ServerMessage)
    assert answer.request == 1
    assert isinstance(decode_failure(answer.failure), tdserve.TDServeError)
    assert not isinstance(decode_failure(answer.failure), tdserve.LocalProtocolError)
    stream.close()


def test_extend_request_when_it_contradicts_the_ring_then_fails_and_changes_nothing(
    wire: ControlConnection, replay: Any
) -> None:
    fingerprint = replay.spec.prepend((replay.capacity,)).fingerprint
    for num_rows, inline, values in [
        (0, b"", b""),
        (2, b"short", b""),
        (9, b"x" * 180, b""),
        (2**62, b"", b""),
        (2, b"x" * 40, b"\xff\xff"),
    ]:
        body = control_pb2.Content(fingerprint=fingerprint, inline=inline, values=values)
        extend = control_pb2.ExtendRequest(store=replay.name, num_rows=num_rows, content=body, timeout_s=5.0)
        answers: SimpleQueue[Any] = SimpleQueue()
        stream = wire.open_session(on_message=answers.put, on_lost=answers.put)
        stream.send(hello())
        assert answers.get(timeout=20.0).HasField("welcome")
        stream.send(control_pb2.ClientMessage(request=1, extend=extend))
        error = decode_failure(answers.get(timeout=20.0).failure)
        assert not isinstance(error, tdserve.LocalProtocolError), error
        stream.close()
    assert replay.info()["reserved_rows"] == 0
