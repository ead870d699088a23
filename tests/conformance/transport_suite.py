"""The tests that every transport must pass: a class provides a fixture ``connect`` and inherits the tests.

What is sent is compared with what arrives byte by byte. A receive is posted before its send is waited for: a transport
may hold a send until then, or may not.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tdserve.base.errors import DeadlineExceededError, PeerLostError
from tdserve.messages.layout import LARGE_LEAF_BYTES, MAX_MESSAGE_BYTES, Layout, Trailing
from tdserve.structure.tensors.torch_types import to_torch, view_bytes
from tdserve.structure.trees.tree import Node, Spec, TensorLeaf
from tdserve.transport.pool import BufferPool
from tdserve.transport.sources_sinks import (
    FlatBuffer,
    IndexedSource,
    LeafBuffers,
    RowBuffers,
    Sink,
    Source,
    view_rows,
)
from tdserve.transport.stream import recv_messages, send_messages, start_send
from tests.channel_pairs import Ends
from tests.processes import wait_for

Connect = Callable[[], Ends]

TIMEOUT_S = 20.0
"""Timeout for what must happen; far more than it takes."""

SHORT_S = 0.05
"""Wait for what must not happen."""

HALF_S = 2.0
"""Wait for half of a message, which must arrive on a busy machine too."""

SIZES = [1, 63, 64, 4097, 1 << 20, 10_000_000]


def content(nbytes: int, seed: int = 0) -> torch.Tensor:
    """Returns bytes that differ for every seed."""
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


class TransportSuite:
    """The requirements of every channel. A subclass provides ``connect``, which returns two connected ends, any number
    of times."""

    @pytest.fixture
    def ends(self, connect: Connect) -> Iterator[Ends]:
        """One pair of ends, closed afterwards."""
        pair = connect()
        yield pair
        for end in pair:
            end.close()

    @pytest.mark.parametrize("nbytes", SIZES)
    def test_send_when_received_then_bytes_are_equal_both_ways(self, ends: Ends, nbytes: int) -> None:
        for sender, receiver in (ends, ends[::-1]):
            sent, received = content(nbytes), torch.zeros(nbytes, dtype=torch.uint8)
            works = [receiver.recv(received, 3), sender.send(sent, 3)]
            for work in works:
                work.wait(TIMEOUT_S)
            assert torch.equal(sent, received)

    def test_send_when_posted_before_the_receive_then_arrives(self, ends: Ends) -> None:
        sent, received = content(3_000_000), torch.zeros(3_000_000, dtype=torch.uint8)
        sending = ends[0].send(sent, 0)
        ends[1].recv(received, 0).wait(TIMEOUT_S)
        sending.wait(TIMEOUT_S)
        assert torch.equal(sent, received)

    def test_messages_when_of_one_tag_then_keep_their_order(self, ends: Ends) -> None:
        sent = [content(1 + 1000 * number, number) for number in range(30)]
        received = [torch.zeros_like(buffer) for buffer in sent]
        works = [ends[0].send(buffer, 5) for buffer in sent] + [ends[1].recv(buffer, 5) for buffer in received]
        for work in works:
            work.wait(TIMEOUT_S)
        assert all(map(torch.equal, sent, received))

    def test_messages_when_of_two_tags_then_neither_waits_for_the_other(self, ends: Ends) -> None:
        first, second = torch.zeros(10, dtype=torch.uint8), torch.zeros(20, dtype=torch.uint8)
        waiting = ends[1].recv(first, 1)
        passing = ends[1].recv(second, 2**31 - 1)
        sending = ends[0].send(content(20), 2**31 - 1)
        passing.wait(TIMEOUT_S)
        sending.wait(TIMEOUT_S)
        assert torch.equal(second, content(20))
        assert not first.any()
        sending = ends[0].send(content(10), 1)
        waiting.wait(TIMEOUT_S)
        sending.wait(TIMEOUT_S)
        assert torch.equal(first, content(10))

    def test_messages_when_many_are_under_way_then_all_arrive(self, ends: Ends) -> None:
        sent = [content(50_000, number) for number in range(200)]
        received = [torch.zeros_like(buffer) for buffer in sent]
        works = [ends[0].send(buffer, number % 7) for number, buffer in enumerate(sent)]
        works += [ends[1].recv(buffer, number % 7) for number, buffer in enumerate(received)]
        for work in reversed(works):
            work.wait(TIMEOUT_S)
        assert all(map(torch.equal, sent, received))

    def test_channel_when_used_by_many_threads_then_each_gets_its_own(self, ends: Ends) -> None:
        def echo(tag: int) -> None:
            for length in (1000 * (tag + 1), 300_000):
                buffer = torch.zeros(length, dtype=torch.uint8)
                ends[1].recv(buffer, tag).wait(TIMEOUT_S)
                ends[1].send(buffer, tag).wait(TIMEOUT_S)

        def ask(tag: int) -> bool:
            equal = True
            for length in (1000 * (tag + 1), 300_000):
                asked, answered = content(length, tag), torch.zeros(length, dtype=torch.uint8)
                works = [ends[0].recv(answered, tag), ends[0].send(asked, tag)]
                for work in works:
                    work.wait(TIMEOUT_S)
                equal = equal and torch.equal(asked, answered)
            return equal

        with ThreadPoolExecutor(16) as threads:
            echoes = [threads.submit(echo, tag) for tag in range(8)]
            assert all(threads.map(ask, range(8)))
            for each in echoes:
                each.result(TIMEOUT_S)

    def test_close_when_the_other_end_waits_then_it_sees_a_lost_peer(self, ends: Ends) -> None:
        waiting = ends[1].recv(torch.zeros(8, dtype=torch.uint8), 0)
        ends[0].close()
        with pytest.raises(PeerLostError):
            waiting.wait(TIMEOUT_S)
        with pytest.raises(PeerLostError):
            ends[1].recv(torch.zeros(8, dtype=torch.uint8), 0)

    def test_close_when_repeated_then_harmless_and_the_end_is_lost(self, ends: Ends) -> None:
        ends[0].close()
        ends[0].close()
        for post in (ends[0].send, ends[0].recv):
            with pytest.raises(PeerLostError):
                post(torch.zeros(8, dtype=torch.uint8), 0)

    def test_wait_when_nothing_comes_then_deadline_and_both_ends_are_closed(self, ends: Ends) -> None:
        buffer = torch.zeros(8, dtype=torch.uint8)
        waiting = ends[1].recv(buffer, 0)
        other = ends[0].recv(torch.zeros(8, dtype=torch.uint8), 1)
        with pytest.raises(DeadlineExceededError) as raised:
            waiting.wait(SHORT_S)
        assert raised.value.timeout_s == SHORT_S
        with pytest.raises(PeerLostError):
            ends[1].send(buffer, 1)
        with pytest.raises(PeerLostError):
            other.wait(TIMEOUT_S)
        with pytest.raises(PeerLostError):  # late content must not reach a buffer that was given up
            ends[0].send(content(8), 0)
        assert not buffer.any()

    @pytest.mark.parametrize("nbytes", [100, 3_000_000])
    def test_wait_all_when_several_are_under_way_then_every_one_has_ended(self, ends: Ends, nbytes: int) -> None:
        sent = [content(nbytes, number) for number in range(5)]
        received = [torch.zeros_like(buffer) for buffer in sent]
        receiving = [ends[1].recv(buffer, number % 2) for number, buffer in enumerate(received)]
        sending = [ends[0].send(buffer, number % 2) for number, buffer in enumerate(sent)]
        ends[1].wait_all(receiving, TIMEOUT_S)
        ends[0].wait_all(sending, TIMEOUT_S)
        assert all(map(torch.equal, sent, received))

    def test_wait_all_when_there_is_nothing_then_returns(self, ends: Ends) -> None:
        ends[0].wait_all([], 0.0)
        ends[0].close()
        ends[0].wait_all([], 0.0)

    @pytest.mark.parametrize("nbytes", [100, 3_000_000])
    def test_wait_all_when_one_does_not_come_then_deadline_and_both_ends_are_closed(
        self, ends: Ends, nbytes: int
    ) -> None:
        received = [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(2)]
        late = [ends[1].recv(buffer, 0) for buffer in received]
        sending = ends[0].send(content(nbytes), 0)
        sending.wait(TIMEOUT_S)
        back = ends[0].recv(torch.zeros(nbytes, dtype=torch.uint8), 0)
        with pytest.raises(DeadlineExceededError):
            ends[1].wait_all(late, 10 * SHORT_S)
        assert torch.equal(received[0], content(nbytes))
        with pytest.raises(PeerLostError):
            back.wait(TIMEOUT_S)
        with pytest.raises(PeerLostError):
            ends[0].send(content(nbytes), 0)

    @pytest.mark.parametrize("nbytes", [100, 3_000_000])
    def test_wait_all_when_the_other_end_goes_then_it_sees_a_lost_peer(self, ends: Ends, nbytes: int) -> None:
        receiving = [ends[1].recv(torch.zeros(nbytes, dtype=torch.uint8), 0) for _ in range(2)]
        with ThreadPoolExecutor(1) as thread:
            waiting = thread.submit(ends[1].wait_all, receiving, TIMEOUT_S)
            ends[0].close()
            with pytest.raises(PeerLostError):
                waiting.result(TIMEOUT_S)

    def test_connect_when_repeated_then_leaves_nothing_behind(self, connect: Connect) -> None:
        def once(seed: int) -> None:
            first, second = connect()
            received = torch.zeros(100, dtype=torch.uint8)
            works = [second.recv(received, 0), first.send(content(100, seed), 0)]
            for work in works:
                work.wait(TIMEOUT_S)
            assert torch.equal(received, content(100, seed))
            first.close()
            second.close()

        once(0)
        before = len(os.listdir("/proc/self/fd")), threading.active_count()
        for seed in range(40):
            once(seed)
        # A pair's sockets may close a moment later, in the transport's own thread.
        wait_for(lambda: len(os.listdir("/proc/self/fd")) <= before[0] + 10, "the end of their sockets")
        wait_for(lambda: threading.active_count() <= before[1], "the end of their threads")

    @pytest.mark.parametrize(
        ("source", "sink", "is_posted"),
        [
            # The wire does not show which they are: each meets one of the other end, in a full run all of them.
            pytest.param(
                *(source, sink, is_posted),
                id=f"{source}-{sink}-{'posted' if is_posted else 'windowed'}",
                marks=[] if (source_place + sink_place + is_posted) % 4 == 0 else [pytest.mark.full],
            )
            for source_place, source in enumerate(["flat", "leaves", "indexed", "run", "scattered"])
            for sink_place, sink in enumerate(["flat", "leaves", "run", "scattered"])
            for is_posted in (False, True)
        ],
    )
    def test_layout_when_sent_then_every_leaf_arrives(
        self, ends: Ends, source: str, sink: str, is_posted: bool
    ) -> None:
        # Row sinks are for writes, which have no trailing columns; neither have callers that post everything at once.
        has_trailing = sink in ("flat", "leaves") and not is_posted
        layout = Layout.from_spec(SPEC, (MARK,) if has_trailing else ())
        pool = BufferPool()
        giver, taker = SOURCES[source](layout), SINKS[sink](layout)
        messages = layout.messages

        def send() -> None:
            if is_posted:
                ends[0].wait_all(start_send(ends[0], 9, messages, giver, pool), TIMEOUT_S)
            else:
                send_messages(ends[0], 9, messages, giver, pool=pool, timeout_s=TIMEOUT_S)

        with ThreadPoolExecutor(1) as thread:
            sending = thread.submit(send)
            recv_messages(ends[1], 9, messages, taker.sink, pool=pool, timeout_s=TIMEOUT_S)
            sending.result(TIMEOUT_S)
        for expected, found in zip(columns(layout), taker.read(), strict=True):
            assert torch.equal(view_bytes(expected), view_bytes(found.contiguous()))

    def test_layout_when_the_sender_stops_halfway_then_deadline_and_closed(self, ends: Ends) -> None:
        layout = Layout.from_spec(SPEC)
        sent = start_send(ends[0], 0, layout.messages[:2], SOURCES["leaves"](layout), BufferPool())
        sink = SINKS["flat"](layout).sink
        with pytest.raises(DeadlineExceededError):
            recv_messages(ends[1], 0, layout.messages, sink, pool=BufferPool(), timeout_s=HALF_S)
        ends[0].wait_all(sent, TIMEOUT_S)
        with pytest.raises(PeerLostError):
            ends[1].recv(torch.zeros(1, dtype=torch.uint8), 0)

    def test_layout_when_the_sender_goes_halfway_then_lost(self, ends: Ends) -> None:
        layout = Layout.from_spec(SPEC)
        taker, last = SINKS["flat"](layout), columns(layout)[-2]  # the last leaf of the first two messages
        with ThreadPoolExecutor(1) as thread:
            receiving = thread.submit(
                recv_messages, ends[1], 0, layout.messages, taker.sink, pool=BufferPool(), timeout_s=TIMEOUT_S
            )
            sent = start_send(ends[0], 0, layout.messages[:2], SOURCES["leaves"](layout), BufferPool())
            ends[0].wait_all(sent, TIMEOUT_S)
            # A closed connection takes along what is still on its way; gloo does not notice a message that is cut so.
            wait_for(lambda: torch.equal(taker.read()[-2], last), "the arrival of what was sent")
            ends[0].close()
            with pytest.raises(PeerLostError):
                receiving.result(TIMEOUT_S)


# ---------------------------------------------------------------- one structure, with all its sources and sinks

NUM_ROWS = 3
CAPACITY = 7
RUN = np.arange(2, 2 + NUM_ROWS)
SCATTERED = np.array([6, 0, 3])

MARK = Trailing("mark", "int64", (NUM_ROWS,))

SPEC = Spec(
    Node(
        (NUM_ROWS,),
        None,
        None,
        None,
        (
            ("a", TensorLeaf("bool", (NUM_ROWS,))),
            ("b", TensorLeaf("complex64", (NUM_ROWS, 3))),
            ("c", TensorLeaf("float32", (NUM_ROWS, 0))),
            ("d", TensorLeaf("uint8", (NUM_ROWS, LARGE_LEAF_BYTES))),
            ("e", TensorLeaf("int16", (NUM_ROWS, 5))),
            ("f", TensorLeaf("float64", (NUM_ROWS, MAX_MESSAGE_BYTES // 8 + 9))),  # a row is longer than a message
            ("g", TensorLeaf("bfloat16", (NUM_ROWS, 1))),
        ),
    )
)
"""Small leaves that share a message, leaves with messages of their own, and messages that end inside a row."""


class Taker(NamedTuple):
    """A sink, with a function that reads its content: one tensor per slot."""

    sink: Sink
    read: Callable[[], list[torch.Tensor]]


@cache
def columns(layout: Layout) -> list[torch.Tensor]:
    """Returns the content of every source: random bytes, one tensor per slot."""
    found = []
    for number, slot in enumerate(layout.slots):
        raw = content(slot.nbytes, number)
        raw = raw & 1 if slot.dtype == "bool" else raw
        found.append(raw.view(to_torch(slot.dtype)).view(slot.shape))
    return found


def _leaves(layout: Layout) -> list[torch.Tensor]:
    return columns(layout)[: layout.num_leaves]


def _trailing(layout: Layout) -> list[NDArray[Any]]:
    return [column.numpy() for column in columns(layout)[layout.num_leaves :]]


def _flat_source(layout: Layout) -> Source:
    buffer = torch.zeros(layout.nbytes, dtype=torch.uint8)
    for slot, column in zip(layout.slots, columns(layout), strict=True):
        buffer[slot.offset : slot.offset + slot.nbytes] = view_bytes(column)
    return FlatBuffer(buffer)


def _row_source(rows: NDArray[np.int64]) -> Callable[[Layout], Source]:
    def make(layout: Layout) -> Source:
        larger = [leaf.new_zeros(CAPACITY, *leaf.shape[1:]) for leaf in _leaves(layout)]
        for ring, leaf in zip(larger, _leaves(layout), strict=True):
            ring[rows] = leaf
        return RowBuffers(layout, list(map(view_rows, larger)), rows, lambda: _trailing(layout))

    return make


def _flat_sink(layout: Layout) -> Taker:
    buffer = torch.zeros(layout.nbytes, dtype=torch.uint8)

    def read() -> list[torch.Tensor]:
        return [
            buffer[slot.offset : slot.offset + slot.nbytes].view(to_torch(slot.dtype)).view(slot.shape)
            for slot in layout.slots
        ]

    return Taker(FlatBuffer(buffer), read)


def _leaf_sink(layout: Layout) -> Taker:
    leaves = [torch.zeros_like(column) for column in columns(layout)]
    return Taker(LeafBuffers(leaves), lambda: leaves)


def _row_sink(rows: NDArray[np.int64]) -> Callable[[Layout], Taker]:
    def make(layout: Layout) -> Taker:
        larger = [leaf.new_zeros(CAPACITY, *leaf.shape[1:]) for leaf in _leaves(layout)]

        def read() -> list[torch.Tensor]:
            others = [row for row in range(CAPACITY) if row not in rows.tolist()]
            assert not any(ring[others].any() for ring in larger)
            return [ring[rows] for ring in larger]

        return Taker(RowBuffers(layout, list(map(view_rows, larger)), rows), read)

    return make


SOURCES: dict[str, Callable[[Layout], Source]] = {
    "flat": _flat_source,
    "leaves": lambda layout: LeafBuffers(columns(layout)),
    "indexed": lambda layout: IndexedSource(layout, _leaves(layout).__getitem__, lambda: _trailing(layout)),
    "run": _row_source(RUN),
    "scattered": _row_source(SCATTERED),
}

SINKS: dict[str, Callable[[Layout], Taker]] = {
    "flat": _flat_sink,
    "leaves": _leaf_sink,
    "run": _row_sink(RUN),
    "scattered": _row_sink(SCATTERED),
}
