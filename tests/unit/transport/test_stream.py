from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tdserve.base.errors import DeadlineExceededError, PeerLostError
from tdserve.messages.layout import LARGE_LEAF_BYTES, Layout, Message, Trailing
from tdserve.structure.trees.tree import Node, Spec, TensorLeaf
from tdserve.transport.channel import PerMessage, Work
from tdserve.transport.copy_ahead import MIN_APART_BYTES
from tdserve.transport.loopback import LoopbackChannel
from tdserve.transport.pool import BufferPool
from tdserve.transport.sources_sinks import FlatBuffer, IndexedSource, LeafBuffers
from tdserve.transport.stream import (
    FILLED_UNDER_WAY,
    MESSAGES_AT_ONCE,
    RECEIVES_UNDER_WAY,
    pack,
    recv_messages,
    send_messages,
    start_send,
    unpack,
)

STATE = Trailing("state", "int64", (1,))


def layout_of(num_large: int, *, num_small: int = 0, trailing: tuple[Trailing, ...] = ()) -> Layout:
    """Leaves that travel alone, and of 12 bytes, which do not; the small ones lie first."""
    leaves = [TensorLeaf("uint8", (LARGE_LEAF_BYTES,))] * num_large + [TensorLeaf("float32", (3,))] * num_small
    entries = tuple((f"k{number}", leaf) for number, leaf in enumerate(leaves))
    return Layout.from_spec(Spec(Node((), None, None, None, entries)), trailing)


def small_leaves() -> tuple[list[torch.Tensor], Layout]:
    """Forty leaves that travel four at a time in ten messages."""
    leaves = [random_bytes(LARGE_LEAF_BYTES - 1) for _ in range(40)]
    entries = tuple((f"k{number:02}", TensorLeaf("uint8", (len(leaf),))) for number, leaf in enumerate(leaves))
    return leaves, Layout.from_spec(Spec(Node((), None, None, None, entries)))


def random_bytes(nbytes: int) -> torch.Tensor:
    """Content."""
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8)


def test_send_messages_when_the_end_is_direct_memory_then_the_last_message_is_made_after_the_rest_left() -> None:
    ours, theirs = LoopbackChannel.make_pair()
    layout = layout_of(4, trailing=(STATE,))
    leaves = [random_bytes(LARGE_LEAF_BYTES) for _ in range(4)]
    received = torch.zeros(layout.nbytes, dtype=torch.uint8)
    has_arrived: list[bool] = []

    def make_columns() -> list[NDArray[np.int64]]:
        # The loopback takes a send only when it is received, so messages that have left lie there.
        for slot, leaf in zip(layout.slots[:4], leaves, strict=True):
            has_arrived.append(torch.equal(received[slot.offset : slot.offset + slot.nbytes], leaf))
        return [np.array([77])]

    with ThreadPoolExecutor(1) as thread:
        source = IndexedSource(layout, leaves.__getitem__, make_columns)
        sending = thread.submit(send_messages, ours, 0, layout.messages, source, pool=BufferPool(), timeout_s=5.0)
        recv_messages(theirs, 0, layout.messages, FlatBuffer(received), pool=BufferPool(), timeout_s=5.0)
        sending.result(5.0)
    assert has_arrived == [True] * 4
    assert received[layout.slots[-1].offset :][:8].view(torch.int64).item() == 77


def wait_for_posted(queues: Any, num_posted: int) -> None:
    """Waits until so many messages wait for the other end."""
    end = time.monotonic() + 5.0
    while sum(map(len, list(queues.values()))) != num_posted and time.monotonic() < end:
        Event().wait(0.001)
    assert sum(map(len, list(queues.values()))) == num_posted


def test_move_when_memory_is_direct_and_nothing_else_is_announced_then_all_is_posted_before_any_of_it_moves() -> None:
    layout = layout_of(20)
    content, received = random_bytes(layout.nbytes), torch.zeros(layout.nbytes, dtype=torch.uint8)
    ours, theirs = LoopbackChannel.make_pair()
    with ThreadPoolExecutor(1) as thread:
        sending = thread.submit(
            send_messages,
            ours,
            0,
            layout.messages,
            FlatBuffer(content),
            pool=BufferPool(),
            timeout_s=5.0,
            fills_last_after_sends=False,
        )
        wait_for_posted(ours.state.sends, 20)
        recv_messages(theirs, 0, layout.messages, FlatBuffer(received), pool=BufferPool(), timeout_s=5.0)
        sending.result(5.0)
        assert torch.equal(content, received)
        sink = FlatBuffer(torch.zeros_like(content))
        receiving = thread.submit(recv_messages, theirs, 0, layout.messages, sink, pool=BufferPool(), timeout_s=5.0)
        wait_for_posted(ours.state.recvs, 20)
        ours.wait_all(start_send(ours, 0, layout.messages, FlatBuffer(content), BufferPool()), 5.0)
        receiving.result(5.0)


@pytest.mark.slow
def test_send_messages_when_a_thread_apart_copies_them_together_then_few_wait_for_the_wire() -> None:
    leaves, layout = small_leaves()
    assert layout.nbytes >= MIN_APART_BYTES
    received = [torch.zeros_like(leaf) for leaf in leaves]
    ours, theirs = LoopbackChannel.make_pair()
    with ThreadPoolExecutor(1) as thread:
        arguments = layout.messages, LeafBuffers(leaves)
        sending = thread.submit(
            send_messages, ours, 0, *arguments, pool=BufferPool(), timeout_s=5.0, fills_last_after_sends=False
        )
        for messages in (layout.messages[:1], layout.messages[1:]):
            wait_for_posted(ours.state.sends, FILLED_UNDER_WAY)
            recv_messages(theirs, 0, messages, LeafBuffers(received), pool=BufferPool(), timeout_s=5.0)
        sending.result(5.0)
    assert all(map(torch.equal, leaves, received))


@pytest.mark.slow
def test_recv_messages_when_they_must_be_distributed_then_few_are_under_way_and_each_is_taken_as_it_comes() -> None:
    leaves, layout = small_leaves()
    assert len(layout.messages) == 10
    received = [torch.zeros_like(leaf) for leaf in leaves]
    ours, theirs = LoopbackChannel.make_pair()
    with ThreadPoolExecutor(1) as thread:
        arguments = layout.messages, LeafBuffers(received)
        receiving = thread.submit(recv_messages, theirs, 0, *arguments, pool=BufferPool(), timeout_s=5.0)
        wait_for_posted(ours.state.recvs, RECEIVES_UNDER_WAY)
        ours.wait_all(start_send(ours, 0, layout.messages[:1], LeafBuffers(leaves), BufferPool()), 5.0)
        wait_for_posted(ours.state.recvs, RECEIVES_UNDER_WAY)  # one more
        assert torch.equal(received[0], leaves[0])
        ours.wait_all(start_send(ours, 0, layout.messages[1:], LeafBuffers(leaves), BufferPool()), 5.0)
        receiving.result(5.0)
    assert all(map(torch.equal, leaves, received))


class Places:
    """A sink into which messages of an odd number are received in their place, and the others copied."""

    def find_memory(self, message: Message) -> torch.Tensor | None:
        return torch.empty(message.nbytes, dtype=torch.uint8) if message.offset % 2 else None

    def drain(self, message: Message, buffer: torch.Tensor) -> None:
        assert len(buffer) == message.nbytes


class CountedWaits(LoopbackChannel):
    """A channel that keeps how many messages were waited for together."""

    counts: list[int]

    def wait_all(self, works: Sequence[Work], timeout_s: float) -> None:
        self.counts.append(len(works))
        super().wait_all(works, timeout_s)


def test_recv_messages_when_they_must_be_distributed_then_waits_for_4_mib_at_a_time_or_one() -> None:
    def together(*sizes_mib: float, is_followed: bool = False) -> int:
        theirs, ours = CountedWaits.make_pair()
        assert isinstance(ours, CountedWaits)
        ours.counts = []
        messages = []
        for number, size_mib in enumerate(sizes_mib):
            nbytes = round(abs(size_mib) * 1024 * 1024)
            theirs.send(torch.empty(nbytes, dtype=torch.uint8), 1)
            messages.append(Message(2 * number + (size_mib < 0), nbytes, ()))
        on_arrived = (lambda count: None) if is_followed else None
        recv_messages(ours, 1, messages, Places(), pool=BufferPool(), timeout_s=5.0, on_arrived=on_arrived)
        assert sum(ours.counts) == len(messages)
        return ours.counts[0]

    assert together(2, 2, 2) == 2
    assert together(4, 4) == together(8, 1) == 1
    assert together(0.5, 0.5) == 2
    assert together(-4, -4, -4, 0.1) == 4
    assert together(-4, -4, 8) == 2
    assert together(*[-4] * 5, is_followed=True) == MESSAGES_AT_ONCE


def test_start_send_when_no_peer_receives_then_returns_and_all_is_posted() -> None:
    ours, theirs = LoopbackChannel.make_pair()
    layout = layout_of(5, num_small=3)
    content = random_bytes(layout.nbytes)
    works = start_send(ours, 0, layout.messages, FlatBuffer(content), BufferPool())
    assert len(works) == len(layout.messages) == 6
    received = torch.zeros_like(content)
    recv_messages(theirs, 0, layout.messages, FlatBuffer(received), pool=BufferPool(), timeout_s=1.0)
    ours.wait_all(works, 0.0)
    for slot in layout.slots:
        assert torch.equal(received[slot.offset :][: slot.nbytes], content[slot.offset :][: slot.nbytes])


@pytest.mark.parametrize("num_messages", [2, 20])
def test_send_messages_when_time_is_over_then_deadline_names_the_whole_time_and_the_channel_is_closed(
    num_messages: int,
) -> None:
    ours, theirs = LoopbackChannel.make_pair()
    layout = layout_of(num_messages)
    source = FlatBuffer(random_bytes(layout.nbytes))
    with pytest.raises(DeadlineExceededError, match=r"a transfer did not happen within 0\.01 s"):
        send_messages(ours, 0, layout.messages, source, pool=BufferPool(), timeout_s=0.01)
    with pytest.raises(PeerLostError):
        theirs.recv(torch.zeros(1, dtype=torch.uint8), 0)


def test_recv_messages_when_time_is_over_before_the_first_wait_then_the_channel_is_closed() -> None:
    # Otherwise receives that are already posted would take messages for the next one.
    ours, theirs = LoopbackChannel.make_pair()
    layout = layout_of(2)
    sink = FlatBuffer(random_bytes(layout.nbytes))
    with pytest.raises(DeadlineExceededError):
        recv_messages(theirs, 0, layout.messages, sink, pool=BufferPool(), timeout_s=0.0)
    with pytest.raises(PeerLostError):
        ours.send(torch.zeros(1, dtype=torch.uint8), 0)


def test_recv_messages_when_all_is_there_then_needs_no_time() -> None:
    ours, theirs = LoopbackChannel.make_pair()
    layout = layout_of(7)
    works = start_send(ours, 0, layout.messages, FlatBuffer(random_bytes(layout.nbytes)), BufferPool())
    received = torch.zeros(layout.nbytes, dtype=torch.uint8)
    recv_messages(theirs, 0, layout.messages, FlatBuffer(received), pool=BufferPool(), timeout_s=0.0)
    ours.wait_all(works, 0.0)


def test_unpack_when_packed_then_equal() -> None:
    layout = layout_of(1, num_small=2)
    leaves = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([-1.0, 0.0, 1.0]), random_bytes(LARGE_LEAF_BYTES)]
    packed = pack(layout.messages, LeafBuffers(leaves))
    assert len(packed) == sum(layout.message_nbytes)
    received = [torch.zeros_like(leaf) for leaf in leaves]
    unpack(packed, layout.messages, LeafBuffers(received))
    assert all(map(torch.equal, leaves, received))


def test_pack_when_there_is_nothing_then_empty() -> None:
    assert pack((), LeafBuffers([])) == b""
    unpack(b"", (), LeafBuffers([]))


SLOW_S = 0.1


@pytest.mark.slow
@pytest.mark.parametrize("is_direct", [True, False])
def test_send_messages_when_slow_but_moving_then_not_given_up(is_direct: bool) -> None:
    ours, theirs = LoopbackChannel.make_pair()
    layout = layout_of(10, trailing=(STATE,) if is_direct else ())
    buffer = random_bytes(layout.nbytes)

    def receive() -> None:
        for message in layout.messages:
            Event().wait(SLOW_S)
            theirs.recv(torch.zeros(message.nbytes, dtype=torch.uint8), 0).wait(5.0)

    with ThreadPoolExecutor(1) as thread:
        receiving = thread.submit(receive)
        send_messages(ours, 0, layout.messages, FlatBuffer(buffer), pool=BufferPool(), timeout_s=PerMessage(6 * SLOW_S))
        receiving.result(5.0)


def test_recv_messages_when_slow_but_moving_then_not_given_up() -> None:
    ours, theirs = LoopbackChannel.make_pair()
    layout = layout_of(10)
    buffer = random_bytes(layout.nbytes)
    timeout_s = PerMessage(6 * SLOW_S)

    def send() -> None:
        for message in layout.messages:
            Event().wait(SLOW_S)
            ours.send(buffer[message.offset : message.offset + message.nbytes], 0).wait(5.0)

    with ThreadPoolExecutor(1) as thread:
        sending = thread.submit(send)
        sink = FlatBuffer(buffer.clone())
        recv_messages(theirs, 0, layout.messages, sink, pool=BufferPool(), timeout_s=timeout_s)
        sending.result(5.0)
