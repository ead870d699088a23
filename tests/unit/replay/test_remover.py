from __future__ import annotations

from tdserve.replay.remover import Fifo


def test_fifo_when_compared_then_equal_as_settings_must_be() -> None:
    assert Fifo() == Fifo()
    assert Fifo().kind == "fifo"
