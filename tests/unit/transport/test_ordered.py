from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from tdserve.base.errors import LocalProtocolError, PeerLostError, TDServeError
from tdserve.transport.ordered import LARGE_BYTES, PIECE_BYTES
from tests.channel_pairs import Ends, ordered_pair
from tests.conformance.transport_suite import content

TIMEOUT_S = 20.0


@pytest.fixture
def ends() -> Iterator[Ends]:
    pair = ordered_pair()
    yield pair
    for end in pair:
        end.close()


def test_large_messages_when_posted_in_opposite_orders_then_all_arrive(ends: Ends) -> None:
    sizes = [LARGE_BYTES, 2 * PIECE_BYTES + 1, LARGE_BYTES + 7]
    sent = [content(nbytes, nbytes) for nbytes in sizes]
    received = [torch.zeros_like(buffer) for buffer in sent]
    works = [ends[1].send(buffer, tag) for tag, buffer in enumerate(sent)]
    works += [ends[0].recv(buffer, tag) for tag, buffer in reversed(list(enumerate(received)))]
    for work in works:
        work.wait(TIMEOUT_S)
    assert all(map(torch.equal, sent, received))


def test_large_messages_when_both_directions_cross_then_neither_waits_for_the_other(ends: Ends) -> None:
    # Both ends send first: on a wire with one order for both directions, each would wait for the other's receive.
    sent = [content(3 * PIECE_BYTES, seed) for seed in (1, 2)]
    received = [torch.zeros_like(buffer) for buffer in sent]
    works = [ends[0].send(sent[0], 5), ends[1].send(sent[1], 5)]
    works += [ends[0].recv(received[1], 5), ends[1].recv(received[0], 5)]
    for work in works:
        work.wait(TIMEOUT_S)
    assert all(map(torch.equal, sent, received))


def test_large_message_when_not_taken_then_others_pass_by(ends: Ends) -> None:
    waiting = ends[0].send(content(LARGE_BYTES), 1)
    sent = content(LARGE_BYTES, 2)
    received = torch.zeros_like(sent)
    for work in (ends[0].send(sent, 2), ends[1].recv(received, 2)):
        work.wait(TIMEOUT_S)
    assert torch.equal(sent, received)
    taken = torch.zeros(LARGE_BYTES, dtype=torch.uint8)
    for work in (ends[1].recv(taken, 1), waiting):
        work.wait(TIMEOUT_S)
    assert torch.equal(taken, content(LARGE_BYTES))


@pytest.mark.parametrize("sender", [0, 1])
@pytest.mark.parametrize("is_sent_first", [False, True])
def test_large_messages_when_over_then_no_queue_of_their_tags_stays(
    ends: Ends, sender: int, is_sent_first: bool
) -> None:
    def move(tags: range) -> int:
        sent, received = content(LARGE_BYTES), torch.zeros(LARGE_BYTES, dtype=torch.uint8)
        for tag in tags:
            posts = [partial(ends[sender].send, sent, tag), partial(ends[1 - sender].recv, received, tag)]
            for work in [post() for post in (posts if is_sent_first else reversed(posts))]:
                work.wait(TIMEOUT_S)
        return sum(type(each) is deque for each in gc.get_objects())

    before = move(range(5))
    assert move(range(100, 140)) < before + 20


@pytest.mark.parametrize("first", [0, 1])
def test_large_message_when_the_ends_disagree_on_its_length_then_both_hear_of_it(ends: Ends, first: int) -> None:
    sending = ends[first].send(content(LARGE_BYTES), 1)
    with pytest.raises((LocalProtocolError, PeerLostError)):
        ends[1 - first].recv(torch.zeros(LARGE_BYTES + 1, dtype=torch.uint8), 1).wait(TIMEOUT_S)
    with pytest.raises(PeerLostError):
        sending.wait(TIMEOUT_S)


def test_close_when_a_large_message_waits_then_its_error_has_the_reason(ends: Ends) -> None:
    waiting = ends[0].recv(torch.zeros(LARGE_BYTES, dtype=torch.uint8), 1)
    ends[0].close()
    with pytest.raises(PeerLostError, match="was closed"):
        waiting.wait(TIMEOUT_S)
    with pytest.raises(TDServeError):
        ends[0].send(content(1), 1)
