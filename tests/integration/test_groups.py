"""Groups of client processes: what they exchange, and what happens when members die, stop and come back."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import tdserve
from tests.group_members import Team, content, number_in
from tests.integration.forked_clients import ForkedClients
from tests.integration.group_roles import LOST_TIMEOUT_S
from tests.roots import make_quick_root

pytestmark = pytest.mark.integration

STILL_TIMEOUT_S = 2.0


@pytest.fixture(scope="module")
def server() -> Iterator[tdserve.Server]:
    with make_quick_root() as root, tdserve.Server(root, port=0) as started:
        yield started


@pytest.fixture(scope="module")
def members() -> Iterator[ForkedClients]:
    with ForkedClients("tests.integration.group_roles") as started:
        yield started


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [4, pytest.param(20, marks=pytest.mark.full)])
def test_broadcast_when_a_member_is_killed_in_it_then_the_others_raise_and_form_the_next_epoch(
    server: tdserve.Server, members: ForkedClients, rounds: int
) -> None:
    num_survivors = 4
    survivors = [
        members.start(
            "survive", server.address, f"g{rounds}", num_survivors, rounds, transport=("gloo", "shm")[number % 2]
        )
        for number in range(num_survivors)
    ]
    for survivor in survivors:
        assert survivor.line() == "together"
    for number in range(rounds):
        with members.start(
            "fall", server.address, f"g{rounds}", num_survivors + 1, number, at=1 + number % 7
        ) as victim:
            victim.wait_killed()
        for survivor in survivors:
            words = survivor.line().split()
            assert words[:3] == ["survived", str(number), str(3 + 2 * number)], words
            assert float(words[3]) < LOST_TIMEOUT_S
            assert words[5] == "True"
    for survivor in survivors:
        assert survivor.line() == "ended 0"


@pytest.mark.slow
def test_broadcast_when_its_source_is_killed_before_then_waiting_and_later_members_raise_at_once(
    server: tdserve.Server, members: ForkedClients
) -> None:
    size = 4
    children = [
        members.start("wait_in_vain", server.address, "vain", size, rank, transport=("gloo", "shm")[rank % 2])
        for rank in range(size)
    ]
    for child in children:
        assert child.line() == "together"
    *survivors, victim = children
    victim.kill()
    for child in survivors:
        word, waited_s, said = child.line().split(maxsplit=2)
        assert word == "lost"
        assert f"lost rank 3 of group 'vain' (process {victim.pid} on " in said
        assert "next_epoch() forms another" in said
        assert float(waited_s) < LOST_TIMEOUT_S / 2
    for child in survivors:
        assert child.line() == "ended 0"


@pytest.mark.slow
@pytest.mark.parametrize("num_bytes", [100_000, 500_000, 3_000_000])
def test_recv_when_the_sender_is_killed_in_the_middle_of_a_message_then_it_raises_at_once(
    server: tdserve.Server, members: ForkedClients, num_bytes: int
) -> None:
    name = f"half-{num_bytes}"
    taker = members.start("take_half", server.address, name, num_bytes=num_bytes)
    with members.start("give_half", server.address, name, num_bytes=num_bytes) as giver:
        giver.wait_killed()
        word, waited_s, said = taker.line().split(maxsplit=2)
    assert word == "lost"
    assert "lost rank 1 of group" in said
    assert float(waited_s) < LOST_TIMEOUT_S / 2
    assert taker.line() == "ended 0"


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [0, 2])
def test_broadcast_when_a_member_stands_still_then_the_others_go_on_without_it_and_it_comes_back(
    server: tdserve.Server, members: ForkedClients, stopped: int
) -> None:
    size = 3
    children = [
        members.start(
            "stand",
            server.address,
            f"still-{stopped}",
            size,
            rank,
            transport=("gloo", "shm")[(rank + stopped) % 2],
            at=9 if rank == stopped else 0,
            timeout_s=STILL_TIMEOUT_S,
        )
        for rank in range(size)
    ]
    others = [child for rank, child in enumerate(children) if rank != stopped]
    for number, child in enumerate(others):
        _, error, waited_s, *words = child.line().split()
        assert error == "DeadlineExceededError", words
        assert float(waited_s) < STILL_TIMEOUT_S + 1.0
        again = child.line().split()
        assert again[:4] == ["again", str(number), str(size - 1), "2"]
        assert float(again[4]) < 5.0
    children[stopped].signal(signal.SIGCONT)
    assert children[stopped].line().split()[0] == "over"
    for number, child in enumerate([*others, children[stopped]]):
        assert child.line() == f"all {number} {size} 3"
        assert child.line() == "ended 0"


@pytest.mark.slow
def test_group_when_the_server_is_restarted_then_calls_raise_and_all_come_together_again(tmp_path: Path) -> None:
    with tdserve.Server(tmp_path / "root", port=0) as first, Team(first, 3) as team:
        assert team.each(lambda group: group.barrier()) == [None] * 3
        port = int(first.address.rpartition(":")[2])
        first.shutdown()
        errors = team.each(lambda group: group.barrier(timeout_s=20.0))
        assert [type(error) for error in errors] == [tdserve.PeerLostError] * 3
        with tdserve.Server(tmp_path / "root", port=port):
            again = team.each(lambda group: group.next_epoch())
            assert [(group.rank, group.world_size, group.epoch) for group in again] == [(0, 3, 2), (1, 3, 2), (2, 3, 2)]
            found = team.each(lambda group: group.broadcast(content(group.rank), 1))
            assert [number_in(td) for td in found] == [1] * 3
