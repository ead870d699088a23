"""Watches of keys."""

from __future__ import annotations

from tdserve.rules.kv.keyed_state import KeyWatches


def test_notify_when_a_key_is_watched_then_only_its_watches_notice() -> None:
    watches = KeyWatches()
    with watches.watch([b"a", b"b", b"a"]) as first, watches.watch([b"b"]) as second:
        assert not watches.notify([b"c"])
        assert watches.notify([b"a", b"c"])
        assert (first.is_notified, second.is_notified) == (True, False)
        first.is_notified = False
        assert watches.notify([b"b"])
        assert (first.is_notified, second.is_notified) == (True, True)
    assert len(watches) == 0
    assert not watches.notify([b"a"])
