from __future__ import annotations

import pytest

from tdserve.errors import ServerBusyError
from tdserve.server.memory import UNCOUNTED_BYTES, HeldContent


def test_holding_when_there_is_room_then_counted_until_the_end_of_the_block() -> None:
    held = HeldContent(100_000)
    with held.holding("x", 60_000):
        assert held.nbytes == 60_000
    assert held.nbytes == 0


def test_holding_when_there_is_no_room_then_refused_with_the_figures_and_nothing_counted() -> None:
    held = HeldContent(100_000)
    with held.holding("x", 60_000):
        with pytest.raises(ServerBusyError) as caught, held.holding("a write", 40_001):
            pass
        assert caught.value.fields == {"what": "a write", "asked": 40_001, "free": 40_000, "limit": 100_000}
        assert held.nbytes == 60_000


def test_holding_when_the_block_raises_then_given_up() -> None:
    held = HeldContent(100_000)
    with pytest.raises(KeyError), held.holding("x", 60_000):
        raise KeyError
    assert held.nbytes == 0


def test_holding_when_small_then_always_let_in() -> None:
    held = HeldContent(UNCOUNTED_BYTES + 1)
    with held.holding("x", UNCOUNTED_BYTES + 1), held.holding("y", UNCOUNTED_BYTES):
        assert held.nbytes == UNCOUNTED_BYTES + 1
