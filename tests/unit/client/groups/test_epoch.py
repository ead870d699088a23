from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tdserve
from tdserve.base.deadline import Deadline
from tdserve.base.errors import ClosedError, DeadlineExceededError, ForkedClientError, PeerLostError
from tdserve.client.groups import epoch as group_epoch
from tdserve.client.groups.epoch import LOST_GRACE_S, GroupEpoch
from tdserve.client.groups.group import Group
from tdserve.transport.group_content import CALL_TAG, CallChannel
from tdserve.transport.pool import BufferPool
from tests.group_members import Team, content, number_in
from tests.processes import wait_for
from tests.threads import find_threads


def has_lost(epoch: GroupEpoch, rank: int) -> bool:
    """Whether a member has the news that another has gone."""
    try:
        epoch.check(rank)
    except PeerLostError:
        return True
    return False


@pytest.mark.slow
def test_call_when_its_block_fails_then_the_epoch_is_over_for_all(server: tdserve.Server) -> None:
    with Team(server, 2) as team:
        with pytest.raises(ZeroDivisionError), team.epochs[0].call(Deadline.after(5.0), "it"):
            _ = 1 / 0
        with pytest.raises(PeerLostError, match=r"it has failed|interrupted by ZeroDivisionError"):
            team.groups[0].barrier()
        with pytest.raises(PeerLostError, match=r"rank 0 of group .* interrupted by ZeroDivisionError"):
            team.groups[1].barrier()


def test_call_when_another_takes_all_the_time_then_deadline_and_the_epoch_goes_on(server: tdserve.Server) -> None:
    with Team(server, 2) as team:
        busy = team.epochs[0].call(Deadline.after(5.0), "it", 1)
        with busy, pytest.raises(DeadlineExceededError, match="another"):
            team.run(lambda group, _: group.barrier(timeout_s=0.05), team.groups[:1])
        assert team.each(lambda group: group.barrier()) == [None, None]


def test_call_when_the_session_of_a_member_ends_then_the_others_raise_long_before_the_deadline(
    server: tdserve.Server,
) -> None:
    with Team(server, 3) as team:
        waiting = [team.submit(team.groups[rank].broadcast, None, 2, timeout_s=25.0) for rank in (0, 1)]
        begin_s = time.monotonic()
        team.clients[2].close()
        for future in waiting:
            error = future.exception(20.0)
            assert isinstance(error, PeerLostError)
            assert "rank 2 of group" in str(error)
            assert f"process {os.getpid()}" in str(error)
        assert time.monotonic() - begin_s < 10.0
        with pytest.raises(ClosedError):
            team.groups[2].barrier()
        assert [group.world_size for group in team.each(lambda group: group.next_epoch(), [0, 1])] == [2, 2]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["group", "client", "session", "next epoch"])
def test_call_when_a_member_refuses_it_since_another_has_gone_then_waiting_members_get_peer_lost(
    server: tdserve.Server, how: str
) -> None:
    with Team(server, 4) as team:
        epochs = [team.epochs[rank] for rank in range(4)]
        waiting = [team.submit(team.groups[rank].broadcast, None, 3, timeout_s=25.0) for rank in (0, 2)]
        wait_for(lambda: epochs[0].num_calls == epochs[2].num_calls == 1, "two members in a call")
        begin_s = time.monotonic()
        again = go(team, 3, how)
        wait_for(lambda: epochs[1].is_lost, "the news of the loss")
        refused = team.each(lambda group: group.broadcast(None, 3), [1])
        for error in [*refused, *(future.exception(20.0) for future in waiting)]:
            assert isinstance(error, PeerLostError)
            assert "lost rank 3 of group" in str(error)
            assert str(error).endswith("epoch 1 is over, next_epoch() forms another")
        assert time.monotonic() - begin_s < 5.0
        found = [*team.each(lambda group: group.next_epoch(), [0, 1, 2]), *([again.result(20.0)] if again else [])]
        assert [group.world_size for group in found] == [len(found)] * len(found)


def go(team: Team, rank: int, how: str) -> Future[Any] | None:
    """A member leaves; returns the epoch with which it goes on, if it does."""
    if how == "next epoch":
        return team.submit(team.groups[rank].next_epoch)
    if how == "session":
        team.epochs[rank].session.close()  # without a word to anybody
    else:
        (team.groups if how == "group" else team.clients)[rank].close()
    return None


@pytest.mark.parametrize("how", ["group", "client"])
def test_call_when_a_member_leaves_that_has_finished_it_then_the_others_finish_it_too(
    server: tdserve.Server, how: str
) -> None:
    with Team(server, 3) as team:
        barrier = Barrier(3)

        def play(group: Group) -> list[int]:
            epoch, deadline = team.epochs[group.rank], Deadline.after(20.0)
            with epoch.call(deadline, "it") as whole:
                barrier.wait(20.0)
                if group.rank == 2:
                    return []
                wait_for(lambda: epoch.is_lost, "the news of the leave")
                assert not find_threads(f"tdserve-group-{team.name}-end")  # nothing is going to close the channel
                channel, into = CallChannel(whole, CALL_TAG, deadline, BufferPool()), torch.zeros(3, dtype=torch.uint8)
                channel.wait(
                    [channel.expect(into, 1 - group.rank), channel.post(torch.full_like(into, 7), 1 - group.rank)]
                )
            return into.tolist()

        def leave(group: Group) -> list[int]:
            found = play(group)
            if group.rank == 2:
                go(team, 2, how)
            return found

        assert team.each(leave) == [[7] * 3, [7] * 3, []]
        errors = team.each(lambda group: group.barrier(), [0, 1])
        assert ["lost rank 2" in str(error) for error in errors] == [True, True]


def test_leave_when_a_call_of_its_own_is_under_way_then_every_call_of_the_others_ends(server: tdserve.Server) -> None:
    with Team(server, 3) as team:
        begin_s = time.monotonic()
        busy = team.submit(team.groups[2].from_remote_init, 1, timeout_s=20.0)
        wait_for(lambda: team.epochs[2].is_in_call, "a call of the leaver")
        pair = team.submit(team.groups[0].from_remote_init, 1, timeout_s=20.0)
        team.groups[2].close()
        assert isinstance(busy.exception(20.0), ClosedError)
        assert isinstance(pair.exception(20.0), PeerLostError)
        assert time.monotonic() - begin_s < 5.0


def test_call_of_two_when_the_other_was_let_go_of_a_call_of_all_then_refused_with_the_reason(
    server: tdserve.Server,
) -> None:
    with Team(server, 4) as team:
        waiting = team.submit(team.groups[0].barrier, timeout_s=25.0)
        wait_for(lambda: team.epochs[0].num_calls == 1, "a member in a call")
        team.groups[3].close()
        assert isinstance(waiting.exception(20.0), PeerLostError)
        wait_for(lambda: has_lost(team.epochs[1], 0), "the news of the member that was let go")
        said = r"lost rank 0 .*: barrier\(\) has failed: lost rank 3 .* closed the group"
        with pytest.raises(PeerLostError, match=said):
            team.groups[1].send(content(1), 0)

        def play(group: Group) -> int:
            if group.rank == 2:
                return number_in(group.recv(content(0), 1))
            group.send(content(4), 2)
            return 4

        assert team.each(play, [1, 2]) == [4, 4]


def test_call_when_a_channel_breaks_silently_then_the_error_names_rank_and_remedy(server: tdserve.Server) -> None:
    with Team(server, 2) as team:
        team.epochs[1].check().close()
        said = (
            rf"^lost rank 1 of group '{team.name}' \(process {os.getpid()} on .+\): [^\[].*; "
            r"epoch 1 is over, next_epoch\(\) forms another$"
        )
        with pytest.raises(PeerLostError, match=said):
            team.groups[0].barrier()
        said = r"barrier\(\) has failed: lost rank 1 .* next_epoch\(\) forms another$"
        with pytest.raises(PeerLostError, match=said):
            team.groups[0].barrier()


def test_call_when_it_ends_late_then_the_error_names_the_awaited_ranks_and_the_remedy(server: tdserve.Server) -> None:
    with Team(server, 2) as team:
        said = r"it waited for a transfer with rank 1 of .* \(process .* next_epoch\(\) forms another\) did not happen"
        with pytest.raises(DeadlineExceededError, match=said):
            team.groups[0].barrier(timeout_s=0.3)


def test_call_when_this_members_session_ends_then_peer_lost_and_it_may_come_back(server: tdserve.Server) -> None:
    with Team(server, 2) as team:
        team.epochs[1].session.close()
        with pytest.raises(PeerLostError, match="session of this member has ended"):
            team.groups[1].barrier()
        wait_for(lambda: team.epochs[0].is_lost, "the news of the loss")
        assert team.each(lambda group: group.next_epoch(2).epoch) == [2, 2]
        found = team.each(lambda group: group.broadcast(content(group.rank), 1))
        assert [number_in(td) for td in found] == [1, 1]


@pytest.mark.slow
def test_leave_when_a_call_of_another_is_almost_through_then_it_ends_well(server: tdserve.Server) -> None:
    with Team(server, 2) as team:
        for number in range(3):

            def play(group: Group, number: int = number) -> int:
                if group.rank == 0:
                    group.broadcast(content(number, 3_000_000), 0)
                    group.close()
                    return number
                return number_in(group.broadcast(None, 0), 3_000_000)

            assert team.each(play) == [number] * 2
            name = f"{team.name}-{number}"
            team.groups = team.run(lambda client, rank, name=name: client.group(name, 2, rank), team.clients)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["group", "client"])
def test_call_of_two_when_a_third_has_left_then_it_goes_on_and_calls_of_all_do_not(
    server: tdserve.Server, how: str
) -> None:
    with Team(server, 3) as team:
        (team.groups if how == "group" else team.clients)[2].close()
        wait_for(lambda: team.epochs[0].is_lost and team.epochs[1].is_lost, "the news of the leave")

        def play(group: Group) -> int:
            if group.rank == 0:
                group.send(content(5), 1)
                return number_in(group.from_remote_init(1))
            td = content(0)
            group.recv(td, 0)
            group.init_remote(content(6), 0)
            return number_in(td)

        assert team.each(play, [0, 1]) == [6, 5]
        with pytest.raises(PeerLostError, match=r"lost rank 2 .* closed the group"):
            team.groups[0].barrier()
        with pytest.raises(PeerLostError, match=r"lost rank 2 .* closed the group"):
            team.groups[0].send(content(1), 2)
        assert team.each(play, [0, 1]) == [6, 5]
        assert [group.world_size for group in team.each(lambda group: group.next_epoch(), [0, 1])] == [2, 2]


def test_end_of_the_interpreter_when_in_groups_then_each_is_left(
    server: tdserve.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered = list[Callable[[], None]]()
    monkeypatch.setattr(group_epoch, "atexit", SimpleNamespace(register=registered.append, unregister=id))
    with Team(server, 2) as team:
        registered[-1]()
        assert [type(error) for error in team.each(lambda group: group.barrier())] == [ClosedError] * 2


@pytest.mark.slow
def test_open_when_a_member_leaves_at_once_then_the_others_are_connected(server: tdserve.Server) -> None:
    with Team(server, 4) as team:
        for number in range(5):
            name = f"{team.name}-{number}"

            def play(client: tdserve.Client, rank: int, name: str = name) -> int:
                with client.group(name, 4, rank) as group:
                    if rank == 0:
                        group.send(content(3), 1)
                    if rank == 1:
                        return number_in(group.recv(content(0), 0))
                return 3

            assert team.run(play, team.clients) == [3] * 4


def test_check_when_closed_or_forked_then_typed_error(server: tdserve.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with Team(server, 1) as team:
        epoch = team.epochs[0]
        with monkeypatch.context() as patched:
            patched.setattr(group_epoch, "os", SimpleNamespace(getpid=lambda: 1))
            with pytest.raises(ForkedClientError):
                epoch.check()
        assert epoch.check().rank == 0
        epoch.leave()
        with pytest.raises(ClosedError):
            epoch.check()
        with pytest.raises(ClosedError):
            team.groups[0].next_epoch()


def test_next_epoch_when_in_a_fork_then_typed_error_and_the_channel_goes_on(
    server: tdserve.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Team(server, 2) as team:
        with monkeypatch.context() as patched:
            patched.setattr(group_epoch, "os", SimpleNamespace(getpid=lambda: 1))
            with pytest.raises(ForkedClientError):
                team.groups[0].next_epoch()
        assert team.each(lambda group: group.barrier()) == [None, None]


@pytest.mark.slow
def test_epochs_when_they_follow_one_another_then_nothing_is_left_of_the_old_ones(server: tdserve.Server) -> None:
    with Team(server, 2) as team:
        for _ in range(3):
            team.each(lambda group: group.next_epoch())
        num_fds, num_threads = len(os.listdir("/proc/self/fd")), threading.active_count()
        for _ in range(20):
            team.each(lambda group: group.next_epoch())
            team.each(lambda group: group.broadcast(content(1), 0))
        assert team.each(lambda group: group.epoch) == [24, 24]
        wait_for(lambda: len(os.listdir("/proc/self/fd")) <= num_fds + 4, "the end of old connections")
        wait_for(lambda: threading.active_count() <= num_threads + 4, "the end of old threads")
    assert LOST_GRACE_S < 1.0
    assert not torch.distributed.is_initialized()
