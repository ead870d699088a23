from __future__ import annotations

from tdserve.rules.replay.allocation.row_pins import RowPins
from tests.unit.rules.replay.tables import numbers


def test_remove_when_a_row_has_two_pins_then_loose_at_the_second() -> None:
    pins = RowPins(8)
    pins.add(numbers(1, 2))
    pins.add(numbers(2, 3))
    assert (len(pins), pins.contains(slice(0, 5)).tolist()) == (3, [False, True, True, True, False])
    assert pins.remove(numbers(1, 2)).tolist() == [1]
    assert pins.remove(numbers(2, 3)).tolist() == [2, 3]
    assert len(pins) == 0


def test_drop_when_a_row_has_two_pins_then_none() -> None:
    pins = RowPins(8)
    pins.add(numbers(1, 2))
    pins.add(numbers(2))
    pins.drop(numbers(2, 5))
    assert (len(pins), pins.contains(numbers(1, 2)).tolist()) == (1, [True, False])
