from __future__ import annotations

from tdserve.transport.tag_queues import TagQueues


def test_entries_when_put_then_taken_in_order_by_tag() -> None:
    queues: TagQueues[int] = TagQueues()
    for tag, entry in ((1, 10), (2, 20), (1, 11)):
        queues.put(tag, entry)
    assert [queues.find_last(tag) for tag in (1, 2, 3)] == [11, 20, None]
    assert [queues.take(tag) for tag in (1, 1, 1, 2, 3)] == [10, 11, None, 20, None]


def test_tags_when_their_entries_are_gone_then_take_no_memory() -> None:
    queues: TagQueues[int] = TagQueues()
    for tag in range(100):
        queues.put(tag, 0)
        queues.take(tag)
        queues.take(tag + 1)
        queues.find_last(tag + 2)
    assert len(queues) == 0
    queues.put(1, 1)
    queues.clear()
    assert len(queues) == 0
