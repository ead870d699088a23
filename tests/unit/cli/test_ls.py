from __future__ import annotations

from tdserve.cli.ls import KINDS
from tdserve.messages.store_kinds import KIND_NUMBERS, QUEUE


def test_kinds_when_listed_then_those_of_all_stores_but_the_records_of_shared_ones() -> None:
    assert {*KINDS} == {*KIND_NUMBERS, QUEUE} - {"placement"}
