from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from threading import Event, current_thread

import pytest
import torch

from tdserve.base.errors import InvalidRequestError
from tdserve.messages.layout import LeafPart, Message
from tdserve.transport.copy_ahead import MESSAGES_AHEAD, MIN_APART_BYTES, fill_ahead, fill_each
from tdserve.transport.pool import BufferPool

NUM_MESSAGES = 8
NBYTES = MIN_APART_BYTES // NUM_MESSAGES
MESSAGES = [Message(number * NBYTES, NBYTES, (LeafPart(number, 0, NBYTES, 0),)) for number in range(NUM_MESSAGES)]
TIMEOUT_S = 5.0


class Leaves:
    """A source whose first messages need no copy; it records which thread has filled each of the others."""

    def __init__(self, *, num_direct: int = 0, fails_at: int = -1) -> None:
        self.num_direct = num_direct
        self.fails_at = fails_at
        self.threads: list[str] = []
        self.has_filled = [Event() for _ in MESSAGES]

    def find_memory(self, message: Message) -> torch.Tensor | None:
        number = message.parts[0].slot
        return torch.full((NBYTES,), number, dtype=torch.uint8) if number < self.num_direct else None

    def fill(self, message: Message, staging: torch.Tensor) -> None:
        number = message.parts[0].slot
        if number == self.fails_at:
            raise InvalidRequestError(argument="td", reason="it cannot be read")
        staging.fill_(number)
        self.threads.append(current_thread().name)
        self.has_filled[number].set()


def heads(made: Iterator[tuple[torch.Tensor, bool]]) -> list[tuple[int, bool]]:
    """Returns the first byte of each message."""
    return [(int(buffer[0]), is_copied) for buffer, is_copied in made]


@pytest.mark.parametrize("make", [fill_each, fill_ahead])
@pytest.mark.parametrize("num_direct", [0, 3, NUM_MESSAGES])
def test_fill_each_when_some_lie_in_place_then_all_come_in_order(make: object, num_direct: int) -> None:
    assert callable(make)
    found = heads(make(MESSAGES, Leaves(num_direct=num_direct), BufferPool()))
    assert found == [(number, number >= num_direct) for number in range(NUM_MESSAGES)]


def test_fill_ahead_when_the_first_is_sent_then_the_next_are_filled_by_another_thread_but_not_all() -> None:
    source = Leaves()
    with closing(fill_ahead(MESSAGES, source, BufferPool())) as made:
        next(made)
        assert source.threads == [current_thread().name]
        next(made)
        assert source.has_filled[MESSAGES_AHEAD].wait(TIMEOUT_S)
        assert not source.has_filled[MESSAGES_AHEAD + 2].is_set()
    num_filled = len(source.threads)
    assert set(source.threads[1:]) == {"tdserve-filler"}
    assert num_filled <= MESSAGES_AHEAD + 2
    assert not source.has_filled[-1].wait(0.01)  # nobody reads the source any more
    assert len(source.threads) == num_filled


def test_fill_ahead_when_there_is_little_then_no_thread() -> None:
    source = Leaves()
    assert len(heads(fill_ahead(MESSAGES[:-1], source, BufferPool()))) == NUM_MESSAGES - 1
    assert set(source.threads) == {current_thread().name}


def test_fill_ahead_when_one_cannot_be_read_then_those_before_it_come_and_then_the_error() -> None:
    with closing(fill_ahead(MESSAGES, Leaves(fails_at=4), BufferPool())) as made:
        assert [int(next(made)[0][0]) for _ in range(4)] == [0, 1, 2, 3]
        with pytest.raises(InvalidRequestError):
            next(made)
