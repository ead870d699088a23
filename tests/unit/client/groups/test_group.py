from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.base.errors import (
    ClosedError,
    DeadlineExceededError,
    InvalidRequestError,
    NotSupportedError,
    PeerLostError,
    SpecMismatchError,
    TransferAbortedError,
)
from tdserve.client.groups.group import Group
from tdserve.client.session.requests.pending import Pending
from tdserve.client.session.session import Session
from tests.group_members import LARGE, SMALL, Team, content, number_in

SIZE = 3


@pytest.fixture(scope="module")
def team(server: tdserve.Server) -> Iterator[Team]:
    """Three members; every test leaves them in one epoch."""
    with Team(server, SIZE) as made:
        yield made
        assert [group.epoch for group in made.groups] == [1] * SIZE


def test_group_when_formed_then_all_see_the_same_members_and_no_registry_changes(team: Team) -> None:
    before = dict(os.environ)
    assert [group.rank for group in team.groups] == list(range(SIZE))
    assert {group.members for group in team.groups} == {team.groups[0].members}
    assert [member.pid for member in team.groups[0].members] == [os.getpid()] * SIZE
    assert {(group.world_size, group.name, group.backend) for group in team.groups} == {(SIZE, team.name, "gloo")}
    assert repr(team.groups[1]) == f"<Group {team.name!r}, epoch 1: rank 1 of 3>"
    team.each(lambda group: group.barrier())
    assert not torch.distributed.is_initialized()
    assert os.environ == before


def test_close_when_another_thread_waits_for_the_next_epoch_then_that_ends_and_the_place_is_left(
    server: tdserve.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_sent, send = Event(), Session.send

    def note_sent(session: Session, request: int, **body: Any) -> Pending:
        pending = send(session, request, **body)
        if "join_group" in body:
            is_sent.set()
        return pending

    with Team(server, 2) as team, ThreadPoolExecutor(1) as thread:
        one, other = team.groups
        monkeypatch.setattr(Session, "send", note_sent)
        waiting = thread.submit(one.next_epoch, timeout_s=20.0)
        assert is_sent.wait(20.0)
        one.close()
        try:
            other.next_epoch(timeout_s=20.0)
            other.barrier(timeout_s=20.0)
        except (PeerLostError, TransferAbortedError):
            pass
        else:
            assert other.world_size == 1, "it had left before it joined"
        with pytest.raises(ClosedError):
            waiting.result(20.0)


@pytest.mark.parametrize("num_floats", [SMALL, LARGE])
@pytest.mark.parametrize("src", range(SIZE))
def test_broadcast_when_from_any_rank_then_built_or_filled_in_place(team: Team, src: int, num_floats: int) -> None:
    def play(group: Group) -> int:
        # The ranks behind the source build, those before fill.
        into = content(group.rank, num_floats) if group.rank <= src else None
        pointer = 0 if into is None else into["n", "b"].data_ptr()
        found = group.broadcast(into, src)
        assert into is None or found is into
        assert into is None or found["n", "b"].data_ptr() == pointer
        return number_in(found, num_floats)

    assert team.each(play) == [src] * SIZE


def test_broadcast_when_leaves_lie_otherwise_then_filled_as_they_lie(team: Team) -> None:
    def play(group: Group) -> list[float]:
        wide = torch.full((4, 6), float(group.rank))
        group.broadcast(TensorDict({"x": wide[:, ::2]}), 1)
        return wide[0].tolist()

    assert team.each(play) == [[1.0, float(rank)] * 3 for rank in range(SIZE)]


def test_broadcast_when_of_rows_of_any_length_then_equal(team: Team) -> None:
    rows = [torch.arange(3.0), torch.arange(5.0)]
    td = TensorDict({"r": torch.nested.nested_tensor(rows, layout=torch.jagged), "n": torch.ones(2)}, [2])
    for found in team.each(lambda group: group.broadcast(td if group.rank == 0 else None, 0)):
        assert [row.tolist() for row in found["r"].unbind()] == [row.tolist() for row in rows]


def test_broadcast_when_structures_differ_then_all_raise_nothing_is_written_and_the_group_goes_on(team: Team) -> None:
    inputs = [content(0), content(1), content(2)]
    inputs[2]["n", "b"] = torch.zeros(2, 4)

    errors = team.each(lambda group: group.broadcast(inputs[group.rank], 1))
    assert [type(error) for error in errors] == [SpecMismatchError] * SIZE
    assert {error.key for error in errors} == {"('n', 'b')"}
    assert errors[2].actual == "float32[2, 4]"
    assert errors[0].actual == errors[1].actual == "float32[2, 4] at rank 2"
    assert number_in(inputs[0]) == 0
    assert [number_in(found) for found in team.each(lambda group: group.broadcast(content(group.rank), 1))] == [1] * 3


def test_broadcast_when_only_names_and_order_differ_then_it_is_the_same_structure(team: Team) -> None:
    def play(group: Group) -> list[float]:
        names = [None, ["row"], None][group.rank]
        keys = ["x", "y"] if group.rank else ["y", "x"]
        td = TensorDict({key: torch.full((2,), float(group.rank)) for key in keys}, [2], names=names)
        return list(group.broadcast(td, 2)["x"])

    assert team.each(play) == [[2.0, 2.0]] * SIZE


def test_call_when_a_member_cannot_take_part_then_all_get_an_error_with_the_reason(team: Team) -> None:
    sparse = TensorDict({"x": torch.eye(3).to_sparse()})

    def play(group: Group) -> Any:
        return group.broadcast(sparse if group.rank == 2 else TensorDict({"x": torch.eye(3)}), 0)

    errors = team.each(play)
    assert [type(error) for error in errors] == [TransferAbortedError, TransferAbortedError, NotSupportedError]
    assert "rank 2 cannot take part" in str(errors[0])
    assert team.each(lambda group: group.barrier()) == [None] * SIZE


def test_call_when_members_make_different_ones_then_all_errors_name_the_differing_call(team: Team) -> None:
    def play(group: Group) -> Any:
        return group.barrier() if group.rank != 1 else group.broadcast(content(1), 1)

    errors = team.each(play)
    assert [type(error) for error in errors] == [InvalidRequestError] * SIZE
    assert "rank 1 calls broadcast(src=1)" in str(errors[0])
    assert "rank 0 barrier()" in str(errors[2])
    assert [type(error) for error in team.each(lambda group: group.broadcast(None, group.rank))] == [
        InvalidRequestError
    ] * SIZE
    assert team.each(lambda group: group.barrier()) == [None] * SIZE


@pytest.mark.parametrize("num_floats", [SMALL, LARGE])
def test_scatter_and_gather_when_of_any_rank_then_each_gets_its_own(team: Team, num_floats: int) -> None:
    for root in range(SIZE):

        def play(group: Group, root: int = root) -> list[int] | None:
            tds = [content(10 * number, num_floats) for number in range(SIZE)] if group.rank == root else None
            own = group.scatter(tds, root)
            assert number_in(own, num_floats) == 10 * group.rank
            found = group.gather(own, (root + 1) % SIZE)
            return None if found is None else [number_in(td, num_floats) for td in found]

        expected: list[list[int] | None] = [None] * SIZE
        expected[(root + 1) % SIZE] = [0, 10, 20]
        assert team.each(play) == expected


@pytest.mark.parametrize("num", [None, 2, 4])
def test_scatter_when_there_is_not_one_for_each_then_all_raise(team: Team, num: int | None) -> None:
    tds = None if num is None else [content(0)] * num
    errors = team.each(lambda group: group.scatter(tds if group.rank == 0 else None, 0))
    assert [type(error) for error in errors] == [InvalidRequestError, TransferAbortedError, TransferAbortedError]


def test_gather_when_structures_differ_then_all_raise(team: Team) -> None:
    errors = team.each(lambda group: group.gather(content(1, SMALL + group.rank), 0))
    assert [type(error) for error in errors] == [SpecMismatchError] * SIZE


@pytest.mark.slow
@pytest.mark.parametrize(("op", "expected"), [("sum", 6.0), ("mean", 2.0), ("max", 3.0), ("min", 1.0)])
def test_all_reduce_when_of_leaves_of_all_kinds_then_in_place_and_the_same_everywhere(
    team: Team, op: str, expected: float
) -> None:
    def play(group: Group) -> Any:
        number = float(group.rank + 1)
        td = TensorDict(
            {
                "small": torch.full((3,), number),
                "scalar": torch.tensor(number, dtype=torch.bfloat16),
                "large": torch.full((LARGE,), number),
                "strided": torch.full((LARGE, 2), number)[:, 0],
                "empty": torch.zeros(0),
            }
        )
        td["text"] = f"of {group.rank}"
        assert group.all_reduce(td, op) is td
        assert td["text"] == f"of {group.rank}"
        return {float(value) for key in ("small", "scalar", "large", "strided") for value in td[key].unique()}

    assert team.each(play) == [{expected}] * SIZE


@pytest.mark.parametrize(
    ("op", "leaf", "error"),
    [
        ("median", torch.ones(2), InvalidRequestError),
        ("mean", torch.ones(2, dtype=torch.int64), NotSupportedError),
        ("sum", torch.ones(2, dtype=torch.bool), NotSupportedError),
        ("max", torch.ones(2, dtype=torch.complex64), NotSupportedError),
        ("sum", torch.ones(2).to(torch.float8_e5m2), NotSupportedError),
    ],
)
def test_all_reduce_when_there_is_no_such_operation_then_refused_everywhere(
    team: Team, op: str, leaf: torch.Tensor, error: type[Exception]
) -> None:
    found = team.each(lambda group: group.all_reduce(TensorDict({"x": leaf.clone()}), op))
    assert [type(each) for each in found] == [error] * SIZE


def test_send_and_recv_when_of_one_structure_then_filled_in_place_and_the_third_is_not_asked(team: Team) -> None:
    def play(group: Group) -> int | None:
        if group.rank == 0:
            for number in range(3):
                group.send(content(number), 2)
        if group.rank == 2:
            into = content(-1)
            assert [number_in(group.recv(into, 0)) for _ in range(3)] == [0, 1, 2]
            return number_in(into)
        return None

    assert team.each(play) == [None, None, 2]


def test_send_when_the_receiver_holds_another_structure_then_both_raise_and_go_on(team: Team) -> None:
    def play(group: Group) -> Any:
        return group.send(content(1), 1) if group.rank == 0 else group.recv(content(1, 4), 0)

    errors = team.each(play, [0, 1])
    assert [type(error) for error in errors] == [SpecMismatchError] * 2
    assert errors[0].actual == "float32[2, 4] at rank 1"

    def again(group: Group) -> Any:
        return group.init_remote(content(7), 1) if group.rank == 0 else number_in(group.from_remote_init(0))

    assert team.each(again, [0, 1]) == [None, 7]


def test_pair_when_one_cannot_or_calls_something_else_then_both_raise_and_go_on(team: Team) -> None:
    def play(group: Group) -> Any:
        return group.send(content(1), 1) if group.rank == 0 else group.from_remote_init(0)

    errors = team.each(play, [0, 1])
    assert [type(error) for error in errors] == [InvalidRequestError] * 2
    assert "rank 1 calls from_remote_init()" in str(errors[0])

    def refuse(group: Group) -> Any:
        return (
            group.send(TensorDict({"x": torch.eye(2).to_sparse()}), 1) if group.rank == 0 else group.recv(content(1), 0)
        )

    assert [type(error) for error in team.each(refuse, [0, 1])] == [NotSupportedError, TransferAbortedError]
    assert team.each(lambda group: group.barrier()) == [None] * SIZE


def test_groups_when_of_some_of_the_clients_then_beside_the_large_one_and_from_any_source(team: Team) -> None:
    def play(number: int) -> Any:
        with team.clients[number].group(f"{team.name}-some", 2, rank=0 if number == 2 else 1) as some:
            found = some.broadcast(content(number) if some.rank == 1 else None, 1)
            team.groups[number].send(content(5), 1)
            some.barrier()
            return number_in(found)

    def meet(group: Group) -> Any:
        if group.rank == 1:
            return [number_in(group.recv(content(0), src)) for src in (0, 2)]
        return play(group.rank)

    assert team.each(meet) == [0, [5, 5], 0]


@pytest.mark.parametrize("peer", [-1, 3, 1, True, "0"])
def test_pair_when_the_rank_is_no_other_member_then_invalid_request(team: Team, peer: Any) -> None:
    with pytest.raises(InvalidRequestError, match="not another member"):
        team.groups[1].send(content(0), peer)
    with pytest.raises(InvalidRequestError, match="not another member"):
        team.groups[1].from_remote_init(peer)


def test_recv_when_there_is_nothing_to_fill_then_invalid_request(team: Team) -> None:
    with pytest.raises(InvalidRequestError, match="from_remote_init"):
        team.groups[0].recv(None, 1)


def test_close_when_one_leaves_then_the_others_get_peer_lost_and_form_the_next_epoch_with_waiting_clients(
    server: tdserve.Server,
) -> None:
    with Team(server, 3) as team, server.client() as newcomer:
        team.groups[0].close()
        team.groups[0].close()
        with pytest.raises(ClosedError):
            team.groups[0].barrier()
        errors = team.each(lambda group: group.barrier(), [1, 2])
        assert [type(error) for error in errors] == [PeerLostError] * 2
        assert "rank 0 of group" in str(errors[0])
        again = team.each(lambda group: group.next_epoch(), [1, 2])
        assert [(group.rank, group.world_size, group.epoch) for group in again] == [(0, 2, 2), (1, 2, 2)]
        joining = team.submit(newcomer.group, team.name, 5)
        found = team.each(lambda group: group.next_epoch(3), [1, 2])
        assert [(group.rank, group.world_size, group.epoch) for group in found] == [(0, 3, 3), (1, 3, 3)]
        team.groups[0] = joining.result(20.0)
        assert team.groups[0].rank == 2
        assert [number_in(each) for each in team.each(lambda group: group.broadcast(content(group.rank), 2))] == [2] * 3


def test_call_when_a_member_does_not_come_then_deadline_and_the_next_epoch_is_without_it(
    server: tdserve.Server,
) -> None:
    with Team(server, 3) as team:
        errors = team.each(lambda group: group.barrier(timeout_s=0.3), [1, 2])
        found = {type(error) for error in errors}  # a member that is later than a message takes learns it from the
        # other one
        assert DeadlineExceededError in found <= {DeadlineExceededError, PeerLostError}
        assert [type(error) for error in team.each(lambda group: group.barrier())] == [PeerLostError] * 3
        with pytest.raises(DeadlineExceededError, match="rank 1, 2 of epoch 1 has not asked"):
            team.groups[0].next_epoch(timeout_s=0.0)
        assert [group.world_size for group in team.each(lambda group: group.next_epoch(2), [1, 2])] == [2, 2]
        assert team.each(lambda group: group.barrier(), [1, 2]) == [None, None]
