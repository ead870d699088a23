"""What a client knows of servers that do not answer."""

from __future__ import annotations

from tdserve.rules.lost_servers import PROBE_INTERVAL_S, LostServers


def test_lost_servers_when_one_is_noted_again_then_it_is_no_news() -> None:
    lost = LostServers()
    assert lost.note_lost(3, 10.0)
    assert not lost.note_lost(3, 10.1)
    assert lost.note_lost(1, 10.2)
    assert list(lost) == [1, 3]


def test_lost_servers_when_the_interval_is_over_then_one_caller_tries() -> None:
    lost = LostServers()
    lost.note_lost(3, 10.0)
    assert not lost.begin_probe(3, 10.0 + PROBE_INTERVAL_S / 2)
    assert lost.begin_probe(3, 10.0 + PROBE_INTERVAL_S)
    assert not lost.begin_probe(3, 10.0 + PROBE_INTERVAL_S)
    assert lost.begin_probe(3, 10.0 + 2 * PROBE_INTERVAL_S)
    lost.note_found(3)
    assert 3 not in lost
    assert not lost.begin_probe(3, 99.0)
