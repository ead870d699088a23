from __future__ import annotations

import pytest

from tdserve.rules.tags import make_tag


@pytest.mark.parametrize("request_number", [0, 1, 2**31 - 3, 2**31 - 2, 2**31 - 1, 2**31, 2**40 + 3, 2**64 - 2])
def test_tag_when_of_any_request_then_a_positive_int32_that_its_neighbour_has_not(request_number: int) -> None:
    tag = make_tag(request_number)
    assert 1 <= tag <= 2**31 - 1  # 0 is the channel's own
    assert make_tag(request_number + 1) != tag


def test_tag_when_requests_are_few_then_each_has_its_own() -> None:
    assert [make_tag(request) for request in range(4)] == [1, 2, 3, 4]
