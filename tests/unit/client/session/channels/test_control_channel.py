from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue
from threading import Event

import pytest

from tdserve.base.config import MAIL_BYTES, MAIL_READ, MAIL_WRITE
from tdserve.base.errors import ConnectError, TDServeError, TransportError
from tdserve.client.session.channels.client_control_channel import ClientControlChannel
from tdserve.transport.gloo import WORKER_RANK, GlooChannel
from tdserve.transport.message_channel import MessageChannel
from tdserve.transport.rendezvous import KVStore
from tdserve.v1 import control_pb2
from tests.gloo_secret import CREDENTIAL
from tests.processes import wait_for

TIMEOUT_S = 20.0


class Server:
    """The other end of a control channel; its channel is formed by ``connect``."""

    def __init__(self) -> None:
        self.entries: SimpleQueue[control_pb2.Rendezvous] = SimpleQueue()
        self.answers: SimpleQueue[control_pb2.ServerMessage] = SimpleQueue()
        self.lost: SimpleQueue[TDServeError] = SimpleQueue()
        self._requests: SimpleQueue[tuple[bytes, int]] = SimpleQueue()
        self._kv_store = KVStore(self._publish)
        self.control_channel = ClientControlChannel(
            lambda: "127.0.0.1", self._on_entry, self.answers.put, credential=CREDENTIAL, peer="the server"
        )
        self.control_channel.begin()
        self.channel: GlooChannel
        self.mail: MessageChannel

    def connect(self) -> None:
        """Connects as the worker does, and then waits for the client."""
        with ThreadPoolExecutor(1) as thread:
            connecting = thread.submit(
                GlooChannel,
                self._kv_store,
                WORKER_RANK,
                host="127.0.0.1",
                credential=CREDENTIAL,
                peer="the client",
                timeout_s=TIMEOUT_S,
            )
            self.channel = connecting.result(TIMEOUT_S)
        self.mail = MessageChannel(
            self.channel,
            on_message=lambda content, label: self._requests.put((content, label)),
            on_lost=self.lost.put,
            name="server",
        )
        self.mail.begin()
        wait_for(lambda: self.control_channel.is_open, "the opening")

    def next_request(self) -> control_pb2.ClientMessage:
        """The oldest that was not taken."""
        return control_pb2.ClientMessage.FromString(self._requests.get(timeout=TIMEOUT_S)[0])

    def next_mail(self) -> tuple[control_pb2.ClientMessage, int]:
        """Returns the oldest request that was not taken, and its label."""
        content, label = self._requests.get(timeout=TIMEOUT_S)
        return control_pb2.ClientMessage.FromString(content), label

    def next_label(self) -> int:
        """Returns the label of the oldest request that was not taken."""
        return self._requests.get(timeout=TIMEOUT_S)[1]

    def close(self) -> None:
        """Ends both ends."""
        self.control_channel.close()
        self._kv_store.close()

    def _publish(self, key: str, value: bytes) -> None:
        self.control_channel.feed(control_pb2.Rendezvous(key=key, value=value, is_mail=True))

    def _on_entry(self, entry: control_pb2.Rendezvous) -> None:
        self.entries.put(entry)
        self._kv_store.feed(entry.key, entry.value)


@pytest.fixture
def server() -> Iterator[Server]:
    """A server whose channel is not formed yet."""
    made = Server()
    yield made
    made.close()


def reading(store: str, request: int = 1) -> control_pb2.ClientMessage:
    """A request."""
    return control_pb2.ClientMessage(request=request, read=control_pb2.ReadRequest(store=store))


def extending(request: int) -> control_pb2.ClientMessage:
    """Rows, which must not overtake those before them."""
    return control_pb2.ClientMessage(request=request, extend=control_pb2.ExtendRequest(store="x"))


def test_extend_when_another_went_another_way_then_it_does_too_until_that_is_answered(server: Server) -> None:
    assert not server.control_channel.send(extending(1))
    assert not server.control_channel.is_turning, "there is nothing to turn to"
    server.connect()
    assert server.control_channel.is_turning
    assert server.control_channel.send(reading("x", 2))
    assert not server.control_channel.send(extending(3))
    server.control_channel.forget(1)
    assert not server.control_channel.is_turning, "what is long goes another way for ever, and nobody waits for that"
    assert not server.control_channel.send(extending(5))
    server.control_channel.forget(3)
    server.control_channel.forget(5)
    assert server.control_channel.send(extending(4))
    assert [server.next_request().request for _ in range(2)] == [2, 4]


def wishing(request: int, store: str = "x") -> control_pb2.ClientMessage:
    """Rows that the worker may write by itself."""
    asked = control_pb2.ExtendRequest(store=store, wished_claim=10)
    return control_pb2.ClientMessage(request=request, extend=asked)


def test_extend_when_the_worker_may_write_it_then_it_learns_the_oldest_without_an_answer(server: Server) -> None:
    server.connect()
    found = []
    for request in (1, 2, 3):
        assert server.control_channel.send(wishing(request))
        found.append(server.next_mail())
    assert [label for _, label in found] == [MAIL_WRITE] * 3
    assert [message.extend.follows for message, _ in found] == [0, 1, 1]
    server.control_channel.forget(1)
    assert server.control_channel.send(wishing(4))
    assert server.control_channel.send(wishing(5, store="y"))
    assert [server.next_mail()[0].extend.follows for _ in range(2)] == [2, 0]


def test_extend_when_control_has_one_of_the_table_then_those_behind_it_go_there_too(server: Server) -> None:
    server.connect()
    assert server.control_channel.send(extending(1))
    assert server.control_channel.send(wishing(2))
    assert server.control_channel.send(wishing(3, store="y"))
    assert [server.next_label() for _ in range(3)] == [0, 0, MAIL_WRITE]
    server.control_channel.forget(1)
    server.control_channel.forget(2)
    assert server.control_channel.send(wishing(4))
    assert server.next_label() == MAIL_WRITE


def test_send_when_the_channel_is_not_formed_then_goes_another_way(server: Server) -> None:
    assert not server.control_channel.is_open
    assert not server.control_channel.send(reading("x"))


def test_send_when_the_channel_is_formed_then_rides_it_and_so_does_the_answer(server: Server) -> None:
    server.connect()
    for request in range(1, 30):
        assert server.control_channel.send(reading("x", request))
        assert server.next_request() == reading("x", request)
        answer = control_pb2.ServerMessage(request=request, done=control_pb2.Done(version=request))
        server.mail.send(answer.SerializeToString())
        assert server.answers.get(timeout=TIMEOUT_S) == answer


def test_send_when_the_worker_may_answer_then_the_label_permits_it(server: Server) -> None:
    server.connect()
    get = control_pb2.ClientMessage(request=2, get=control_pb2.GetRequest(store="x"))
    with_versions = control_pb2.ClientMessage(request=3, get=control_pb2.GetRequest(store="x", asks_versions=True))
    for message, label in ((reading("x"), MAIL_READ), (get, MAIL_READ), (with_versions, 0)):
        assert server.control_channel.send(message)
        assert server.next_label() == label
    assert server.control_channel.send(extending(4))
    assert server.next_label() == 0


def test_send_when_the_message_is_too_long_then_goes_another_way(server: Server) -> None:
    server.connect()
    overhead = reading("x" * 1000).ByteSize() - 1000
    fitting, longer = reading("x" * (MAIL_BYTES - overhead)), reading("x" * (MAIL_BYTES - overhead + 1))
    assert (fitting.ByteSize(), longer.ByteSize()) == (MAIL_BYTES, MAIL_BYTES + 1)
    assert not server.control_channel.send(longer)
    assert server.control_channel.send(fitting)
    assert server.next_request() == fitting


def test_send_when_the_channel_is_lost_then_transport_error(server: Server) -> None:
    server.connect()
    server.channel.close()
    server.lost.get(timeout=TIMEOUT_S)

    def is_lost() -> bool:
        try:
            server.control_channel.send(reading("x"))
        except TransportError:
            return True
        return False

    assert wait_for(is_lost, "the loss")


def test_rendezvous_when_published_then_marked_as_that_of_the_mail(server: Server) -> None:
    entry = server.entries.get(timeout=TIMEOUT_S)
    assert entry.is_mail
    assert entry.value


def test_close_when_open_then_the_other_end_gets_a_transport_error(server: Server) -> None:
    server.connect()
    server.control_channel.close()
    server.control_channel.close()
    assert isinstance(server.lost.get(timeout=TIMEOUT_S), TransportError)
    with pytest.raises(TransportError):
        server.control_channel.send(reading("x"))


def test_close_when_the_rendezvous_is_under_way_then_it_ends(server: Server) -> None:
    server.entries.get(timeout=TIMEOUT_S)  # it waits for the server's from here on
    server.control_channel.close()
    wait_for(
        lambda: all(thread.name != "tdserve-open-mail" for thread in threading.enumerate()), "the end of its thread"
    )
    assert not server.control_channel.is_open


def test_control_channel_when_there_is_no_way_to_the_server_then_stays_closed() -> None:
    tried = Event()

    def make_host() -> str:
        tried.set()
        raise ConnectError(address="the server", reason="it does not resolve")

    reported: SimpleQueue[object] = SimpleQueue()
    control_channel = ClientControlChannel(
        make_host, reported.put, reported.put, credential=CREDENTIAL, peer="the server"
    )
    control_channel.begin()
    assert tried.wait(TIMEOUT_S)
    control_channel.close()
    assert not control_channel.is_open
    assert not control_channel.send(reading("x"))
    with pytest.raises(Empty):
        reported.get_nowait()
