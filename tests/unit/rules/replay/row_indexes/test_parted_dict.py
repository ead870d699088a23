from __future__ import annotations

import pytest

from tdserve.rules.replay.row_indexes.parted_dict import PartedDict


@pytest.mark.parametrize("step", [1, 8, 1 << 20, -(1 << 40)])
def test_part_of_when_numbers_are_regular_then_no_part_has_many(step: int) -> None:
    entries = PartedDict(20_000)
    for number in range(20_000):
        entries.find_part(step * number)[step * number] = number
    assert all(entries.find_part(step * number)[step * number] == number for number in range(20_000))
    assert max(len(entries.find_part(step * number)) for number in range(20_000)) < 600


def test_clear_when_there_are_entries_then_none_is_left() -> None:
    entries, keys = PartedDict(2_000), (-1, 0, 1 << 100)
    for key in keys:
        entries.find_part(key)[key] = 7
    assert [entries.find_part(key)[key] for key in keys] == [7, 7, 7]
    entries.clear()
    assert [entries.find_part(key) for key in keys] == [{}, {}, {}]


def test_part_of_when_there_can_be_few_entries_then_one_has_all() -> None:
    entries = PartedDict(100)
    assert entries.find_part(1) is entries.find_part(2)
