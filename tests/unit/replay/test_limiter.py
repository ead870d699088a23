from __future__ import annotations

from typing import Any

import pytest

from tdserve.errors import InvalidRequestError
from tdserve.replay.limiter import Counts, MinSize


def _counts(num_rows: int) -> Counts:
    return Counts(num_rows=num_rows, inserts=num_rows, samples=0, capacity=100)


def test_can_sample_when_the_size_is_reached_then_true() -> None:
    limiter = MinSize(10)
    assert not limiter.can_sample(_counts(9), 1)
    assert limiter.can_sample(_counts(10), 1)
    assert limiter.can_sample(_counts(10), 256)


def test_can_insert_when_anything_then_true() -> None:
    assert MinSize(10).can_insert(_counts(100), 100)


def test_why_when_a_sample_waits_then_names_table_size_and_need() -> None:
    text = MinSize(10).why(_counts(3), "replay")
    assert "'replay'" in text
    assert "3 rows" in text
    assert "min_size 10" in text


@pytest.mark.parametrize("min_size", [0, -1, 1.5, True, "3"])
def test_min_size_when_it_cannot_be_then_refused(min_size: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        MinSize(min_size)
    assert caught.value.argument == "min_size"


def test_check_when_it_would_wait_for_ever_then_refused_with_the_reason() -> None:
    MinSize(5).check(5)
    with pytest.raises(InvalidRequestError, match="6 rows never fit into a capacity of 5"):
        MinSize(6).check(5)
