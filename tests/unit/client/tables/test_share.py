from __future__ import annotations

from typing import Any

import pytest

from tdserve.base.errors import InvalidRequestError
from tdserve.client.tables.share import Share, StepCounts, parse_share


def test_parse_when_no_rank_is_given_then_none() -> None:
    assert parse_share(None, None, None, None) is None


@pytest.mark.parametrize(
    ("arguments", "argument"),
    [
        ((0, None, None, None), "rank"),
        ((None, 2, None, None), "world_size"),
        ((None, None, 3, None), "step"),
        ((None, None, None, ("n",)), "balance"),
        ((2, 2, None, None), "rank"),
        ((-1, 2, None, None), "rank"),
        ((0, 0, None, None), "world_size"),
        ((0, 2, -1, None), "step"),
        ((True, 2, 0, None), "rank"),
    ],
)
def test_parse_when_invalid_then_refused_by_name(arguments: Any, argument: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        parse_share(*arguments)
    assert raised.value.argument == argument


def test_take_when_a_call_fails_then_the_next_gets_its_step() -> None:
    counts, share = StepCounts(), Share(1, 2, 0, ("n",))
    found = []
    for fails in (False, True, False, False):
        try:
            with counts.take(share) as taken:
                found.append(taken.step)
                if fails:
                    raise TimeoutError
        except TimeoutError:
            continue
    assert found == [0, 1, 1, 2]
    with counts.take(Share(0, 2, 0)) as taken:
        assert taken == Share(0, 2, 0)
    with counts.take(Share(1, 4, 0)) as taken:
        assert taken.step == 0


def test_take_when_calls_overlap_then_each_has_its_own_step() -> None:
    counts, share = StepCounts(), Share(0, 2, 0)
    with counts.take(share) as first, counts.take(share) as second:
        assert (first.step, second.step) == (0, 1)
