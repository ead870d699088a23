from __future__ import annotations

import pytest

from tdserve.rules.fanout import AUTOMATIC_ABOVE, AUTOMATIC_FANOUT, MAX_TRIES, SERVER, Fanout, Placement


def placed(fanout: Fanout, puller: int, *, version: int = 1, **said: int) -> Placement:
    """Places a puller, which must be possible."""
    found = fanout.place(version, version, puller, **said)
    assert found is not None
    return found


def grown(fanout: Fanout, *pullers: int, version: int = 1) -> dict[int, Placement]:
    """Pullers that came one after the other, all of whom have the first part of the version."""
    found = {}
    for puller in pullers:
        found[puller] = placed(fanout, puller, version=version, num_waiting=len(pullers))
        fanout.note_holding(puller, found[puller].hop)
    return found


def test_place_when_pullers_are_few_then_the_server_sends_to_all_of_them() -> None:
    fanout = Fanout()
    assert [placed(fanout, puller) for puller in range(1, AUTOMATIC_ABOVE + 1)] == [Placement()] * AUTOMATIC_ABOVE
    assert fanout.limit == 0
    assert placed(fanout, AUTOMATIC_ABOVE + 1).keeps
    assert fanout.limit == AUTOMATIC_FANOUT


def test_place_when_pullers_were_many_in_the_version_before_then_a_tree_from_the_first_on() -> None:
    fanout = Fanout()
    for puller in range(1, AUTOMATIC_ABOVE + 2):
        fanout.place(1, 1, puller)
    assert placed(fanout, 1, version=2).keeps
    for version in (2, 3):
        fanout.place(version, version, 1)
    assert fanout.limit == 0


def test_place_when_roots_are_there_then_relays_serve_as_many_as_they_may_and_the_next_waits() -> None:
    fanout = Fanout(2)
    found = grown(fanout, 1, 2)
    assert [each.relay for each in found.values()] == [SERVER, SERVER]
    below = [placed(fanout, puller, num_waiting=9) for puller in (3, 4, 5, 6)]
    assert sorted((each.relay, each.kept) for each in below) == [
        (1, found[1].hop),
        (1, found[1].hop),
        (2, found[2].hop),
        (2, found[2].hop),
    ]
    assert fanout.place(1, 1, 7) is None
    fanout.note_holding(3, below[0].hop)
    assert placed(fanout, 7).relay == 3


def test_place_when_a_relay_has_nothing_yet_then_waits_and_goes_there_afterwards() -> None:
    fanout = Fanout(1)
    root = placed(fanout, 1)
    assert fanout.place(1, 1, 2) is None
    fanout.note_holding(1, root.hop)
    assert placed(fanout, 2).relay == 1


def test_place_when_pullers_come_one_after_the_other_then_the_server_sends_it_no_oftener_than_it_may() -> None:
    fanout = Fanout(4)
    sources = []
    for puller in range(1, 17):
        each = placed(fanout, puller)
        sources.append(each.relay)
        fanout.end(each.hop, is_whole=True)
    assert sources.count(SERVER) == 4


def test_place_when_a_relay_asks_once_more_then_it_neither_gets_it_from_itself_nor_keeps_it_twice() -> None:
    fanout = Fanout(1)
    for puller, each in grown(fanout, 1).items():
        fanout.end(each.hop, is_whole=True)
        again = placed(fanout, puller, num_waiting=9)
        assert (again.relay, again.keeps) == (SERVER, False)


def test_place_when_all_that_a_relay_gets_comes_from_the_puller_then_it_goes_to_the_server() -> None:
    fanout = Fanout(1)
    found = grown(fanout, 1, 2)
    assert (found[2].relay, found[2].keeps) == (1, True)
    assert fanout.place(1, 1, 1) is None  # from another thread; the server is busy
    fanout.end(found[1].hop, is_whole=True)
    assert placed(fanout, 1).relay == SERVER


def test_failed_when_nothing_came_then_the_relay_is_left_alone_and_another_serves() -> None:
    fanout = Fanout(2)
    grown(fanout, 1, 2)
    first = placed(fanout, 3)
    fanout.note_failure(3, first.hop, was_connected=True)
    others = [placed(fanout, puller, num_failed=1).relay for puller in (3, 4)]
    assert first.relay not in others


def test_failed_when_all_relays_have_then_the_server_sends_again() -> None:
    fanout = Fanout(1)
    grown(fanout, 1)
    fanout.note_failure(2, placed(fanout, 2).hop, was_connected=True)
    assert placed(fanout, 2, num_failed=1).relay == SERVER


def test_failed_when_a_pair_cannot_connect_then_it_is_not_tried_again_but_others_are() -> None:
    fanout = Fanout(1)
    for version in (1, 2):
        fanout.end(grown(fanout, 1, version=version)[1].hop, is_whole=True)
        if version == 1:
            fanout.note_failure(2, placed(fanout, 2).hop, was_connected=False)
        assert placed(fanout, 2, version=version, num_failed=1).relay == SERVER
        assert placed(fanout, 3, version=version).relay == 1


def test_failed_when_several_cannot_reach_a_relay_then_it_is_left_alone() -> None:
    fanout = Fanout(1)
    grown(fanout, 1)
    for puller in range(10, 10 + MAX_TRIES):
        below = placed(fanout, puller)
        assert below.relay == 1
        fanout.note_failure(puller, below.hop, was_connected=False)
    assert placed(fanout, 20).relay == SERVER


def test_failed_when_a_puller_reaches_no_relay_then_it_gets_all_versions_from_the_server_and_no_relay_is_blamed() -> (
    None
):
    fanout = Fanout(2)
    grown(fanout, 1, 2)
    for number in range(MAX_TRIES):
        fanout.note_failure(3, placed(fanout, 3, num_failed=number).hop, was_connected=False)
    assert placed(fanout, 3).relay == SERVER
    assert {placed(fanout, puller).relay for puller in (4, 5)} == {1, 2}


def test_failed_when_a_call_has_tried_often_enough_then_the_server_sends_whatever_it_does() -> None:
    fanout = Fanout(1)
    assert placed(fanout, 1).relay == SERVER
    assert placed(fanout, 2, num_failed=MAX_TRIES) == Placement(2)


def test_failed_when_it_is_no_hop_of_the_puller_then_nothing_happens() -> None:
    fanout = Fanout(1)
    grown(fanout, 1)
    below = placed(fanout, 2)
    fanout.note_failure(9, below.hop, was_connected=True)
    fanout.note_failure(2, 77, was_connected=True)
    assert fanout.find_puller(below.hop) == 2
    assert fanout.find_source(below.hop) == 1


def test_end_when_a_relays_own_pull_has_failed_then_no_puller_is_sent_to_it() -> None:
    fanout = Fanout(1)
    found = grown(fanout, 1)
    fanout.end(found[1].hop, is_whole=False)
    assert placed(fanout, 2).relay == SERVER


def test_passed_when_a_relay_is_through_then_it_serves_the_next() -> None:
    fanout = Fanout(1)
    grown(fanout, 1)
    below = placed(fanout, 2)
    assert fanout.place(1, 1, 3) is None
    fanout.note_sent(below.hop)
    assert placed(fanout, 3).relay == 1
    assert fanout.find_puller(below.hop) == 2


def test_lose_when_a_relay_ends_then_its_pullers_are_named_and_it_gets_no_more() -> None:
    fanout = Fanout(1)
    fanout.end(grown(fanout, 1)[1].hop, is_whole=True)
    below = placed(fanout, 2)
    assert fanout.remove_session(1) == [Placement(below.hop, 1)]
    assert fanout.remove_session(2) == []
    assert fanout.num_hops == 0
    assert placed(fanout, 3).relay == SERVER


def test_forget_when_hops_are_over_then_relays_of_older_versions_need_not_keep_them() -> None:
    fanout = Fanout(1)
    found = grown(fanout, 1)
    below = placed(fanout, 2)
    assert fanout.forget(2) == []
    for hop in (found[1].hop, below.hop):
        fanout.end(hop, is_whole=True)
    assert fanout.forget(1) == []
    assert fanout.forget(2) == [Placement(found[1].hop, 1)]
    assert fanout.find_content(below.hop) is None


def test_rest_when_nothing_moves_then_the_newest_need_not_be_kept_either() -> None:
    fanout = Fanout(1)
    found = grown(fanout, 1)
    assert fanout.drop_idle_trees() == []
    fanout.end(found[1].hop, is_whole=True)
    assert fanout.drop_idle_trees() == [Placement(found[1].hop, 1)]
    assert placed(fanout, 2).relay == SERVER


def test_versions_when_a_newer_one_is_placed_then_never_from_a_relay_with_an_older_one() -> None:
    fanout = Fanout(1)
    grown(fanout, 1)
    assert placed(fanout, 2, version=2).relay == SERVER
    assert fanout.place(2, (2, "bfloat16"), 3) == Placement(3, keeps=True)


@pytest.mark.slow
def test_thousand_when_they_come_at_once_then_the_server_sends_it_a_few_times() -> None:
    fanout = Fanout(4)
    waiting, sources, depth = list(range(1, 1001)), [], {SERVER: 0}
    while waiting:
        found = [(puller, fanout.place(1, 1, puller, num_waiting=len(waiting))) for puller in waiting]
        now = [(puller, each) for puller, each in found if each is not None]
        for puller, each in now:
            sources.append(each.relay)
            depth[puller] = depth[each.relay] + 1
            fanout.note_holding(puller, each.hop)
        waiting = [puller for puller, each in found if each is None]
        if not now:
            raise AssertionError("nobody is placed any more")
    assert sources.count(SERVER) == 4
    assert max(map(sources.count, set(sources))) == 4
    assert max(depth.values()) <= 7
