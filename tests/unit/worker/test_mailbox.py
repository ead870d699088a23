from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue

import pytest

from tdserve.base.config import MAIL_READ
from tdserve.base.errors import ConnectError, TDServeError
from tdserve.control.status import decode_failure
from tdserve.transport.gloo import CLIENT_RANK, GlooChannel
from tdserve.transport.message_channel import MAX_SENT, MessageChannel
from tdserve.transport.proving import make_session_credential
from tdserve.transport.rendezvous import KVStore
from tdserve.v1 import control_pb2, worker_pb2
from tdserve.worker.session_writes import Handled
from tdserve.worker.worker_session import Mailbox
from tests.gloo_secret import SECRET
from tests.processes import wait_for
from tests.unit.worker.peer import TIMEOUT_S


def handle(content: bytes, label: int) -> Handled:
    """Handles mail as a worker that can answer one question itself."""
    is_known = label == MAIL_READ and content == b"a known question"
    return Handled(to_client=b"an answer") if is_known else Handled(to_control=content)


class Client:
    """The other end of a mailbox; its channel is formed by ``connect``. ``reports`` are the reports to control."""

    def __init__(self) -> None:
        self.reports: SimpleQueue[worker_pb2.Report] = SimpleQueue()
        self.entries: SimpleQueue[control_pb2.Rendezvous] = SimpleQueue()
        self.answers: SimpleQueue[bytes] = SimpleQueue()
        self._kv_store = KVStore(self._publish)
        self.mailbox = Mailbox(7, self._on_report, handle)
        self.channel: GlooChannel
        self.mail: MessageChannel

    def open(self, host: str = "127.0.0.1") -> None:
        """Opens the channel as control orders it."""
        opening = worker_pb2.OpenSession(transport="gloo", host=host, is_mail=True, secret=SECRET)
        self.mailbox.open(worker_pb2.Order(order=3, session=7, open_session=opening))

    def connect(self, *, reads: bool = True) -> None:
        """Connects as a client does; with ``reads=False`` it receives nothing."""
        self.open()
        with ThreadPoolExecutor(1) as thread:
            credential = make_session_credential(SECRET, 7, is_mail=True)
            connecting = thread.submit(
                GlooChannel, self._kv_store, CLIENT_RANK, host="127.0.0.1", credential=credential, peer="the worker"
            )
            self.channel = connecting.result(TIMEOUT_S)
        if reads:
            self.mail = MessageChannel(
                self.channel,
                on_message=lambda content, _: self.answers.put(content),
                on_lost=self._ignore,
                name="client",
            )
            self.mail.begin()
        report = self.next_report()
        assert (report.order, report.session, report.HasField("done")) == (3, 7, True)

    def next_report(self) -> worker_pb2.Report:
        """Returns the oldest report that was not taken, without those of a rendezvous."""
        return self.reports.get(timeout=TIMEOUT_S)

    def next_answer(self) -> bytes:
        """Returns the oldest answer that was not taken."""
        return self.answers.get(timeout=TIMEOUT_S)

    def close(self) -> None:
        """Closes both ends."""
        self.mailbox.close()
        self._kv_store.close()

    def _publish(self, key: str, value: bytes) -> None:
        self.mailbox.feed(control_pb2.Rendezvous(key=key, value=value, is_mail=True))

    def _on_report(self, report: worker_pb2.Report) -> None:
        if report.HasField("rendezvous"):
            self.entries.put(report.rendezvous)
            self._kv_store.feed(report.rendezvous.key, report.rendezvous.value)
        else:
            self.reports.put(report)

    def _ignore(self, error: TDServeError) -> None:
        pass


@pytest.fixture
def client() -> Iterator[Client]:
    """A client whose channel is not connected yet."""
    made = Client()
    yield made
    made.close()


def test_message_when_it_comes_then_control_gets_it_in_order(client: Client) -> None:
    client.connect()
    sent = [f"question {number}".encode() for number in range(30)]
    for content in sent:
        client.mail.send(content)
    reports = [client.next_report() for _ in sent]
    assert [report.mail for report in reports] == sent
    assert {(report.order, report.session) for report in reports} == {(0, 7)}


def test_message_when_the_worker_has_the_answer_then_control_never_sees_it(client: Client) -> None:
    client.connect()
    for _ in range(3 * MAX_SENT):  # it also looks after what it has sent by itself
        client.mail.send(b"a known question", MAIL_READ)
        assert client.next_answer() == b"an answer"
    client.mail.send(b"another", MAIL_READ)
    assert client.next_report().mail == b"another"


def test_message_when_it_is_not_labelled_for_the_worker_then_control_gets_it(client: Client) -> None:
    client.connect()
    client.mail.send(b"a known question")
    assert client.next_report().mail == b"a known question"


def test_send_when_the_channel_is_not_formed_then_nothing(client: Client) -> None:
    assert not client.mailbox.send(b"x")
    client.mailbox.reap(0.0)


def test_send_when_many_were_sent_then_asks_to_reap_them(client: Client) -> None:
    client.connect()
    found = [client.mailbox.send(str(number).encode()) for number in range(2 * MAX_SENT)]
    assert found == [False] * (2 * MAX_SENT - 1) + [True]
    assert [int(client.next_answer()) for _ in found] == list(range(2 * MAX_SENT))
    client.mailbox.reap(TIMEOUT_S)
    assert not client.mailbox.send(b"x")


def test_reap_when_the_client_takes_nothing_then_its_session_is_lost(client: Client) -> None:
    client.connect(reads=False)
    while not client.mailbox.send(b"nobody reads this"):
        pass
    client.mailbox.reap(0.05)
    for _ in ("of the wait", "of the thread that reads"):  # either may come first
        lost = client.next_report()
        assert (lost.order, lost.session) == (0, 7)
        assert lost.session_lost.reason.endswith("a gloo transfer did not happen within 0.05 s")


def test_channel_when_the_client_goes_then_its_session_is_lost(client: Client) -> None:
    client.connect()
    client.channel.close()
    assert client.next_report().HasField("session_lost")
    client.mailbox.send(b"an answer that nobody waits for")  # as control may still order
    assert client.next_report().HasField("session_lost")


def test_close_when_open_then_the_client_sees_it_and_control_gets_nothing(client: Client) -> None:
    client.connect()
    client.mailbox.close()
    client.mailbox.close()
    client.mail.join()
    wait_for(lambda: all(thread.name != "tdserve-mail-7" for thread in threading.enumerate()), "the end of its thread")
    assert not client.mailbox.send(b"x")
    with pytest.raises(Empty):
        client.reports.get_nowait()


def test_close_when_the_rendezvous_is_under_way_then_it_ends(client: Client) -> None:
    client.open()
    assert client.entries.get(timeout=TIMEOUT_S).is_mail
    client.mailbox.close()
    report = client.next_report()
    assert report.order == 3
    assert isinstance(decode_failure(report.failure), ConnectError)


@pytest.mark.slow
def test_open_when_the_address_is_not_ours_then_failure(client: Client) -> None:
    client.open(host="192.0.2.1")
    assert isinstance(decode_failure(client.next_report().failure), ConnectError)
