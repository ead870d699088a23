from __future__ import annotations

from collections.abc import Iterator
from queue import Empty, SimpleQueue
from threading import active_count

import pytest

from tdserve.base.config import MAIL_BYTES
from tdserve.base.errors import CapacityError, DeadlineExceededError, PeerLostError, TDServeError
from tdserve.transport.channel import Channel
from tdserve.transport.loopback import LoopbackChannel
from tdserve.transport.message_channel import MAX_SENT, SLOTS, MessageChannel
from tests.channel_pairs import gloo_pair
from tests.conformance.transport_suite import Connect

TIMEOUT_S = 20.0


class Box:
    """One end of a channel, and what it has received. With ``echoes`` it sends all of it back, reversed."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.echoes = False
        self._messages: SimpleQueue[bytes] = SimpleQueue()
        self._lost: SimpleQueue[TDServeError] = SimpleQueue()
        self.mail = MessageChannel(channel, on_message=self._on_message, on_lost=self._lost.put, name="box")
        self.mail.begin()

    def next(self) -> bytes:
        """The oldest message that was not taken."""
        return self._messages.get(timeout=TIMEOUT_S)

    def reason(self) -> TDServeError:
        """Why the channel is gone; told once."""
        error = self._lost.get(timeout=TIMEOUT_S)
        self.mail.join()
        with pytest.raises(Empty):
            self._lost.get_nowait()
        return error

    def _on_message(self, message: bytes, label: int) -> None:
        if self.echoes:
            self.mail.send(message[::-1])
        else:
            self._messages.put(message)


Boxes = tuple[Box, Box]


@pytest.fixture(params=[LoopbackChannel.make_pair, gloo_pair], ids=["loopback", "gloo"])
def boxes(request: pytest.FixtureRequest) -> Iterator[Boxes]:
    """Two ends of one channel."""
    connect: Connect = request.param
    first, second = connect()
    made = Box(first), Box(second)
    yield made
    for box in made:
        box.channel.close()
        box.mail.join()


def test_send_when_there_are_more_messages_than_slots_then_all_arrive_in_order(boxes: Boxes) -> None:
    for sender, receiver in (boxes, boxes[::-1]):
        sent = [f"message {number}".encode() for number in range(5 * SLOTS)]
        for message in sent:
            sender.mail.send(message)
        assert [receiver.next() for _ in sent] == sent


@pytest.mark.parametrize("message", [b"", b"\0", b"\0\1\0", bytes(range(256)) * (MAIL_BYTES // 256), b"x" * MAIL_BYTES])
def test_send_when_of_any_length_that_fits_then_as_it_was(boxes: Boxes, message: bytes) -> None:
    boxes[0].mail.send(message)
    assert boxes[1].next() == message


def test_send_when_too_long_then_refused_and_nothing_was_sent(boxes: Boxes) -> None:
    with pytest.raises(CapacityError) as raised:
        boxes[0].mail.send(bytes(MAIL_BYTES + 1))
    assert (raised.value.asked, raised.value.free) == (MAIL_BYTES + 1, MAIL_BYTES)
    assert boxes[0].mail.num_sent == 0
    boxes[0].mail.send(b"next")
    assert boxes[1].next() == b"next"


def test_send_when_from_within_on_message_then_the_answer_arrives(boxes: Boxes) -> None:
    asking, answering = boxes
    answering.echoes = True
    for number in range(3 * SLOTS):
        asking.mail.send(f"question {number}".encode())
        assert asking.next() == f"question {number}".encode()[::-1]


@pytest.mark.parametrize("who", [0, 1], ids=["ours", "theirs"])
def test_channel_when_closed_by_either_end_then_both_lose_it_once(boxes: Boxes, who: int) -> None:
    boxes[who].channel.close()
    for box in boxes:
        assert isinstance(box.reason(), PeerLostError)
        with pytest.raises(PeerLostError):
            box.mail.send(b"too late")


def test_reap_when_everything_was_taken_then_keeps_the_last(boxes: Boxes) -> None:
    num_messages = MAX_SENT + 10
    for number in range(num_messages):
        boxes[0].mail.send(str(number).encode())
    assert boxes[0].mail.num_sent == num_messages
    assert [int(boxes[1].next()) for _ in range(num_messages)] == list(range(num_messages))
    for keep in (MAX_SENT, 3, 0):
        boxes[0].mail.reap(TIMEOUT_S, keep=keep)
        assert boxes[0].mail.num_sent == keep


def test_reap_when_the_other_end_takes_nothing_then_deadline_and_the_channel_is_closed() -> None:
    ours, _ = LoopbackChannel.make_pair()
    box = Box(ours)
    box.mail.send(b"nobody is there")
    box.mail.reap(0.0)  # that one is kept: it is not asked for
    with pytest.raises(DeadlineExceededError):
        box.mail.reap(0.01, keep=0)
    assert isinstance(box.reason(), PeerLostError)


def test_join_when_the_channel_was_closed_then_the_threads_are_gone() -> None:
    before = active_count()
    made = [Box(channel) for channel in LoopbackChannel.make_pair()]
    assert active_count() == before + 2
    made[0].channel.close()
    for box in made:
        box.mail.join()
    assert active_count() == before


def test_mail_when_it_has_not_begun_then_what_came_waits_for_it() -> None:
    ours, theirs = LoopbackChannel.make_pair()
    came: SimpleQueue[tuple[bytes, int]] = SimpleQueue()
    num_threads = active_count()
    mail = MessageChannel(ours, on_message=lambda *message: came.put(message), on_lost=lambda _: None, name="later")
    MessageChannel(theirs, on_message=lambda *_: None, on_lost=lambda _: None, name="sending").send(b"x")
    assert (active_count(), came.empty()) == (num_threads, True)
    mail.begin()
    assert came.get(timeout=TIMEOUT_S) == (b"x", 0)
    ours.close()
    mail.join()


def test_join_when_called_by_the_thread_itself_then_does_not_wait() -> None:
    ours, theirs = LoopbackChannel.make_pair()
    reported: SimpleQueue[str] = SimpleQueue()

    def on_message(message: bytes, label: int) -> None:
        receiving.join()
        reported.put("joined")

    def ignore(*_: object) -> None:
        pass

    receiving = MessageChannel(ours, on_message=on_message, on_lost=ignore, name="receiving")
    receiving.begin()
    MessageChannel(theirs, on_message=ignore, on_lost=ignore, name="sending").send(b"x")
    assert reported.get(timeout=TIMEOUT_S) == "joined"
    ours.close()
    receiving.join()


def test_send_when_a_label_is_given_then_it_arrives_with_the_message() -> None:
    ours, theirs = LoopbackChannel.make_pair()
    came: SimpleQueue[tuple[bytes, int]] = SimpleQueue()
    mail = MessageChannel(ours, on_message=lambda *message: came.put(message), on_lost=lambda _: None, name="receiving")
    mail.begin()
    sending = MessageChannel(theirs, on_message=lambda *_: None, on_lost=lambda _: None, name="sending")
    sending.send(bytes(MAIL_BYTES), 7)
    assert came.get(timeout=TIMEOUT_S) == (bytes(MAIL_BYTES), 7)
    ours.close()
    mail.join()


def test_mail_when_on_message_fails_then_on_lost_is_called() -> None:
    ours, theirs = LoopbackChannel.make_pair()
    lost: SimpleQueue[Exception] = SimpleQueue()

    def fail(content: bytes, label: int) -> None:
        raise ZeroDivisionError

    MessageChannel(ours, on_message=fail, on_lost=lost.put, name="a").begin()
    MessageChannel(theirs, on_message=fail, on_lost=lambda _: None, name="b").send(b"x")
    lost.get(timeout=20.0)
