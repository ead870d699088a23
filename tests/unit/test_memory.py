"""How tests measure the memory that objects keep."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.memory import count_bytes


@dataclass
class Box:
    """An object that holds another one."""

    content: Any


def test_count_bytes_when_an_array_is_held_then_its_memory_counts_once_and_by_a_view_too() -> None:
    array = np.zeros(1000, np.int64)
    empty = count_bytes(Box(None))
    assert empty + 8_000 < count_bytes(Box([array, array])) < empty + 9_000
    assert count_bytes(Box(array[:1])) > empty + 8_000


def test_count_bytes_when_entries_are_added_then_grows_and_not_by_classes_and_functions() -> None:
    box = Box([])
    before = count_bytes(box)
    box.content += [Box, count_bytes, sys, len]
    assert count_bytes(box) < before + 1_000
    box.content += [bytes(10_000)]
    assert count_bytes(box) > before + 10_000
