"""Access to a server. All that a malicious peer can do is to lose its own session."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.base.config import PROTOCOL_VERSION
from tdserve.base.ids import make_client_id
from tdserve.client.session.requests.request_numbers import RequestNumbers
from tdserve.client.session.session import Session
from tdserve.control.connection import ControlConnection, check_health
from tdserve.control.control_pb2_grpc import ControlServiceStub
from tdserve.structure.captures.capture import capture
from tdserve.structure.trees import codec
from tdserve.v1 import content_pb2, control_pb2
from tests.contents import content_of
from tests.processes import listening_addresses, ready_worker, wait_for

pytestmark = pytest.mark.integration

LOOPBACK = {"0100007F", "00000000000000000000000001000000"}
"""127.0.0.1 and ::1 as in /proc/net."""

ROW = TensorDict({"x": torch.zeros(4096)}, [])
BATCH = ROW.expand(64).clone()
CAPACITY = 1000
STORED_FINGERPRINT = capture(ROW).spec.prepend((CAPACITY,)).fingerprint
"""Fingerprint of the table with such rows."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tdserve.Server]:
    """A server that every test here attacks, and that must be alive after each."""
    with tdserve.Server(tmp_path_factory.mktemp("attacked"), port=0, transfer_timeout_s=2.0) as started:
        yield started


@pytest.fixture(scope="module")
def client(server: tdserve.Server) -> Iterator[tdserve.Client]:
    """A well-behaved client."""
    with server.client(transport="gloo", timeout_s=30.0) as connected:
        connected.create_replay("replay", like=ROW, capacity=CAPACITY).extend(BATCH)
        connected.init_remote(BATCH, "store")
        yield connected


@pytest.fixture(autouse=True)
def _others_go_on(request: pytest.FixtureRequest) -> Iterator[None]:
    """Checks after each attack that the control process is the same and that another client's calls work."""
    if "attacker" not in request.fixturenames:
        yield
        return
    server, client = request.getfixturevalue("server"), request.getfixturevalue("client")
    pid = server.pid
    yield
    assert server.is_alive
    assert server.pid == pid
    replay = client.replay("replay")
    rows = replay.extend(BATCH + 1)
    assert (replay[rows]["x"] == 1).all()
    assert (client.from_remote_init("store")["x"] == 0).all()
    wait_for(lambda: replay.info()["reserved_rows"] == 0, "the end of every reservation")


class Attacker:
    """A session whose messages a test writes by hand."""

    def __init__(self, server: tdserve.Server) -> None:
        self.connection = ControlConnection(server.address)
        self.connection.wait_ready(20.0)
        self.session = Session(
            self.connection, client_id=make_client_id(), transport="gloo", requests=RequestNumbers(), timeout_s=30.0
        )

    def answer(self, request: int = 1, **body: Any) -> tdserve.TDServeError | control_pb2.ServerMessage:
        """Sends a request; returns its answer, or the error in which it or the session ended."""
        try:
            return self.session.send(request, **body).wait(20.0, "an attack")
        except tdserve.TDServeError as error:
            return error

    def close(self) -> None:
        """Closes the session."""
        self.session.close()
        self.connection.close()


@pytest.fixture
def attacker(server: tdserve.Server, client: tdserve.Client) -> Iterator[Attacker]:
    """A malicious session."""
    made = Attacker(server)
    yield made
    made.close()


def content(batch: Any = BATCH, *, inline: bool = False) -> control_pb2.Content:
    """Returns valid content of an extend."""
    return content_of(capture(batch), fingerprint=STORED_FINGERPRINT, is_inline=inline)


def extend(**changes: Any) -> control_pb2.ExtendRequest:
    """Returns an extend by 64 rows."""
    given: dict[str, Any] = {"store": "replay", "num_rows": 64, "content": content(), "timeout_s": 5.0, **changes}
    return control_pb2.ExtendRequest(**given)


@pytest.mark.slow
def test_server_when_nothing_is_said_then_it_and_its_workers_listen_on_loopback_only(
    server: tdserve.Server, client: tdserve.Client
) -> None:
    client.replay("replay").extend(BATCH)  # over gloo: its listener is open now
    worker = ready_worker(client)["pid"]
    for pid in (server.pid, worker, os.getpid()):
        assert listening_addresses(pid) <= LOOPBACK
    assert listening_addresses(server.pid)
    assert listening_addresses(worker)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "some-name"])
def test_server_when_others_could_reach_it_then_refused_without_token_or_insecure(host: str, tmp_path: Path) -> None:
    with pytest.raises(tdserve.InvalidRequestError, match="insecure"):
        tdserve.Server(tmp_path / "root", host=host)
    assert not (tmp_path / "root").exists()


@pytest.mark.slow
def test_token_when_it_is_missing_or_wrong_then_every_call_but_health_is_refused(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("right\n")
    with tdserve.Server(tmp_path / "root", port=0, token_file=str(tmp_path / "token")) as server:
        for token in (None, "wrong", "Bearer right", "right "):
            with pytest.raises(tdserve.UnauthenticatedError):
                server.client(token=token)
        with grpc.insecure_channel(server.address) as channel:
            stub: Any = ControlServiceStub(channel)
            for method in control_pb2.DESCRIPTOR.services_by_name["ControlService"].methods:
                request = getattr(control_pb2, method.input_type.name)()
                call = getattr(stub, method.name)
                with pytest.raises(grpc.RpcError) as caught:
                    list(call(iter([request]))) if method.client_streaming else call(request)
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED, method.name
        assert check_health(server.address, timeout_s=10.0)
        with server.client(token="right") as client:
            client.publish("p", BATCH)
            assert client.stores() == ["p"]


def test_session_when_the_first_message_is_not_hello_then_refused(server: tdserve.Server, attacker: Attacker) -> None:
    with grpc.insecure_channel(server.address) as channel:
        stub: Any = ControlServiceStub(channel)
        with pytest.raises(grpc.RpcError):
            list(stub.Session(iter([control_pb2.ClientMessage(request=1, extend=extend())])))
        garbage = channel.stream_stream("/tdserve.v1.ControlService/Session")  # type: ignore[call-arg]
        with pytest.raises(grpc.RpcError):
            list(garbage(iter([b"\xff" * 1000])))
        unary = channel.unary_unary("/tdserve.v1.ControlService/DescribeStore")  # type: ignore[call-arg]
        with pytest.raises(grpc.RpcError):
            unary(b"\xff\xff\xff\xff")


def hello(**changes: Any) -> control_pb2.ClientMessage:
    """Returns a Hello."""
    given: dict[str, Any] = {
        "protocol_version": PROTOCOL_VERSION,
        "client_id": b"c" * 16,
        "transport": "gloo",
        **changes,
    }
    return control_pb2.ClientMessage(hello=control_pb2.Hello(**given))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"protocol_version": 99}, "ProtocolVersionError"),
        ({"transport": "carrier pigeon"}, "NotSupportedError"),
        ({"client_id": b"short"}, "InvalidRequestError"),
    ],
)
def test_hello_when_it_cannot_be_served_then_a_typed_failure(
    server: tdserve.Server, attacker: Attacker, changes: dict[str, Any], error: str
) -> None:
    with grpc.insecure_channel(server.address) as channel:
        stub: Any = ControlServiceStub(channel)
        (answer,) = list(stub.Session(iter([hello(**changes)])))
    assert answer.failure.error == error


def with_sizes(*sizes: int) -> control_pb2.Content:
    """Returns content that announces other messages than its layout has."""
    lie = content()
    del lie.message_nbytes[:]
    lie.message_nbytes.extend(sizes)
    return lie


def deep_selection() -> content_pb2.Selection:
    """Returns a selection with more index items than a store can have dimensions."""
    return content_pb2.Selection(items=[content_pb2.IndexItem(at=0)] * 100_000)


ATTACKS: dict[str, dict[str, Any]] = {
    "nothing asked": {},
    "a second Hello": {"hello": control_pb2.Hello(protocol_version=PROTOCOL_VERSION)},
    "no messages announced": {"extend": extend(content=with_sizes())},
    "one byte announced": {"extend": extend(content=with_sizes(1))},
    "too much announced": {"extend": extend(content=with_sizes(2**62))},
    "zero announced": {"extend": extend(content=with_sizes(0))},
    "more rows than sent": {"extend": extend(num_rows=65)},
    "no rows": {"extend": extend(num_rows=0)},
    "rows beyond every number": {"extend": extend(num_rows=2**63)},
    "inline too short": {"extend": extend(content=content(BATCH[:1], inline=True))},
    "unknown structure": {"extend": extend(content=control_pb2.Content(fingerprint=b"?" * 32, inline=b""))},
    "invalid values": {
        "extend": extend(
            content=control_pb2.Content(
                fingerprint=STORED_FINGERPRINT, inline=content(inline=True).inline, values=b"\xff\xff"
            )
        )
    },
    "negative time": {"extend": extend(timeout_s=-1.0)},
    "no number as time": {"extend": extend(timeout_s=float("nan"))},
    "not a replay": {"extend": extend(store="store")},
    "a path as name": {"extend": extend(store="../../etc/passwd")},
    "a huge sample": {"sample": control_pb2.SampleRequest(store="replay", num_rows=2**62, num_batches=2**31)},
    "an empty sample": {"sample": control_pb2.SampleRequest(store="replay", num_rows=0)},
    "deep selection": {"read": control_pb2.ReadRequest(store="store", selection=deep_selection())},
    "unknown key": {"read": control_pb2.ReadRequest(store="store", keys=[content_pb2.Path(parts=["nothing"])])},
    "index array that lies": {
        "read": control_pb2.ReadRequest(
            store="store",
            selection=content_pb2.Selection(
                items=[content_pb2.IndexItem(positions=content_pb2.IntArray(shape=[2**40], data=b"\0" * 8))]
            ),
        )
    },
    "index out of range": {
        "write": control_pb2.WriteRequest(
            store="store",
            selection=content_pb2.Selection(items=[content_pb2.IndexItem(at=2**62)]),
            content=control_pb2.Content(fingerprint=capture(BATCH).spec.fingerprint, inline=b""),
        )
    },
    "inline write too short": {
        "write": control_pb2.WriteRequest(
            store="store", content=control_pb2.Content(fingerprint=capture(BATCH).spec.fingerprint, inline=b"short")
        )
    },
    "publish without structure": {
        "publish": control_pb2.PublishRequest(
            store="weights", content=control_pb2.Content(fingerprint=b"?" * 32, inline=b"")
        )
    },
    "publish under a path": {
        "publish": control_pb2.PublishRequest(
            store="a/b",
            spec=codec.encode(capture(ROW).spec),
            content=control_pb2.Content(fingerprint=STORED_FINGERPRINT, inline=b""),
        )
    },
    "publish that keeps too few": {
        "publish": control_pb2.PublishRequest(
            store="keep",
            spec=codec.encode(capture(ROW).spec),
            keep=2**32 - 1,
            content=control_pb2.Content(fingerprint=STORED_FINGERPRINT, inline=b"short"),
        )
    },
    "create by content": {
        "write": control_pb2.WriteRequest(
            store="never made", new_store=control_pb2.CreateStoreRequest(name="never made"), content=content()
        )
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTACKS)
def test_request_when_it_makes_no_sense_then_a_typed_error_and_nothing_else(attacker: Attacker, name: str) -> None:
    answer = attacker.answer(**ATTACKS[name])
    assert isinstance(answer, tdserve.TDServeError), answer
    assert type(answer) is not tdserve.LocalProtocolError, answer
    assert not isinstance(answer, tdserve.DeadlineExceededError), answer


def test_request_when_its_number_is_under_way_then_it_waits_and_counts_as_what_waits(attacker: Attacker) -> None:
    attacker.session.send(1, read=control_pb2.ReadRequest(store="nothing", timeout_s=20.0))
    pending = attacker.session.send(1, latest=control_pb2.LatestRequest(store="nothing", timeout_s=20.0))
    attacker.session.cancel(1)
    with pytest.raises(tdserve.TransferAbortedError):
        pending.wait(20.0, "an attack")
    assert not attacker.session.is_lost


@pytest.mark.slow
@pytest.mark.parametrize("key", ["0/1", "", "x" * 100_000])
def test_rendezvous_when_it_is_garbage_then_only_its_session_has_no_channel(
    server: tdserve.Server, client: tdserve.Client, attacker: Attacker, key: str
) -> None:
    for value in (b"", b"\xff" * 4096):
        entry = control_pb2.Rendezvous(key=key, value=value)
        attacker.session.notify(control_pb2.ClientMessage(rendezvous=entry))
    answer = attacker.answer(read=control_pb2.ReadRequest(store="store", timeout_s=1.0))
    assert isinstance(answer, (tdserve.TDServeError, control_pb2.ServerMessage))


def test_content_when_it_is_longer_than_it_was_said_to_be_then_the_others_go_on(
    server: tdserve.Server, client: tdserve.Client, attacker: Attacker
) -> None:
    channel = attacker.session.contents.get(attacker.session.contents.current)
    pending = attacker.session.send(7, extend=extend())
    (nbytes,) = content().message_nbytes
    work = channel.send(torch.zeros(2 * nbytes, dtype=torch.uint8), 7)
    with pytest.raises(tdserve.TDServeError):  # the data worker is gone, and with it this session
        pending.wait(20.0, "an attack")
    wait_for(lambda: client.stats()["workers"][0]["is_ready"], "the next data worker", timeout_s=60.0)
    del work


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"kind": 77}, "kind"),
        ({"kind": control_pb2.STORE_KIND_UNSPECIFIED}, "kind"),
        ({"name": ""}, "name"),
        ({"name": "../x"}, "name"),
        ({"capacity": 0}, "capacity"),
        ({"capacity": 2**63}, "capacity"),
        ({"capacity": 2**39}, "no room"),
        ({"settings": "{"}, "settings"),
        ({"settings": '{"sampler": "telepathy"}'}, "telepathy"),
    ],
)
def test_create_when_it_makes_no_sense_then_a_typed_error_and_nothing_is_made(
    server: tdserve.Server, client: tdserve.Client, attacker: Attacker, changes: dict[str, Any], error: str
) -> None:
    given: dict[str, Any] = {"name": "made", "kind": control_pb2.STORE_KIND_REPLAY, "capacity": 10, **changes}
    request = control_pb2.CreateStoreRequest(spec=codec.encode(capture(ROW).spec), **given)
    answer = attacker.answer(create_store=request)
    assert isinstance(answer, tdserve.TDServeError)
    assert error in str(answer)
    assert not isinstance(answer, tdserve.LocalProtocolError)
    assert client.stores() == sorted({"replay", "store", *client.stores()} - {"made"})
    assert not (Path(server.config.root) / "stores" / "made").exists()


@pytest.mark.slow
def test_read_when_others_have_moved_secrets_then_none_of_them_lies_between_its_leaves(
    server: tdserve.Server, client: tdserve.Client
) -> None:
    narrow = TensorDict({"a": torch.zeros(100, 3).byte(), "b": torch.zeros(100, 30).byte()}, [100])
    client.init_remote(narrow, "narrow")
    client.create_replay("narrow-rows", like=narrow[0], capacity=100).extend(narrow)
    client.init_remote(TensorDict({"a": torch.full((100, 34), 0xAB).byte()}, [100]), "secret")
    order = torch.randperm(100)
    with server.client(transport="gloo") as reader:
        store, replay = reader["narrow"], reader.replay("narrow-rows")
        asks: list[Callable[[], Any]] = [lambda: store[:], lambda: store[order], lambda: replay.sample(90)]
        for ask in asks:
            for _ in range(20):
                assert bool((client["secret"][order]["a"] == 0xAB).all())
                assert 0xAB not in memory_of(ask()["b"])


def memory_of(leaf: torch.Tensor) -> list[int]:
    """Returns all bytes of the buffer in which a leaf arrived, including those around it."""
    storage: Any = leaf.untyped_storage()
    found: list[int] = storage.tolist()
    return found
