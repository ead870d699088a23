"""tdserve/messages/store_kinds.py: kinds as people see them, in messages."""

from __future__ import annotations

import pytest

from tdserve.messages.store_kinds import KIND_NUMBERS, QUEUE, count_kind, name_counted_kind
from tdserve.v1 import control_pb2


@pytest.mark.parametrize("kind", [*KIND_NUMBERS, QUEUE])
def test_count_when_read_then_of_the_same_kind(kind: str) -> None:
    count = count_kind(kind, 3)
    assert (name_counted_kind(count), count.num_stores) == (kind, 3)
    assert count.is_queue == (kind == QUEUE)


def test_count_when_the_kind_is_of_a_later_server_then_unknown() -> None:
    assert name_counted_kind(control_pb2.KindCount(num_stores=1)) == "unknown"
