from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.base.deadline import Deadline
from tdserve.base.errors import (
    ConnectError,
    DeadlineExceededError,
    InvalidRequestError,
    NotSupportedError,
)
from tdserve.client.groups.epoch import GroupEpoch
from tdserve.client.groups.epoch_entry import GroupAsk
from tdserve.client.groups.group import Group
from tests.group_members import TIMEOUT_S, Team
from tests.processes import wait_for


def test_group_when_the_others_do_not_come_then_the_error_has_the_number_that_came(client: tdserve.Client) -> None:
    with pytest.raises(DeadlineExceededError, match=r"group 'alone' \(1 of 2 members have asked\)"):
        client.group("alone", 2, timeout_s=0.2)
    with pytest.raises(DeadlineExceededError):
        client.group("alone", 3, timeout_s=0)  # another size: the one before asks no more


def test_group_when_of_one_then_every_call_works(client: tdserve.Client) -> None:
    td = TensorDict({"x": torch.ones(2)})
    with client.group("one", 1) as group:
        assert (group.rank, group.world_size) == (0, 1)
        before = group.epoch
        assert group.broadcast(td, 0) is td
        assert group.scatter([td], 0) is td
        assert group.gather(td, 0) == [td]
        assert group.all_reduce(td, "mean")["x"].tolist() == [1.0, 1.0]
        group.barrier()
        assert group.next_epoch().epoch == before + 1
    with client.group("one", 1) as group:
        assert group.epoch == before + 2  # the group before is forgotten; late messages of it do not belong to this one


@pytest.mark.parametrize(
    ("arguments", "argument"),
    [
        ({"name": "a/b", "world_size": 2}, "store name"),
        ({"world_size": 0}, "world_size"),
        ({"world_size": 2.0}, "world_size"),
        ({"world_size": 2, "rank": 2}, "rank"),
        ({"world_size": 2, "rank": -1}, "rank"),
        ({"world_size": 2, "rank": True}, "rank"),
        ({"world_size": 2, "backend": "mpi"}, "backend"),
    ],
)
def test_group_when_an_argument_cannot_be_then_invalid_request(
    client: tdserve.Client, arguments: dict[str, Any], argument: str
) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        client.group(**{"name": "g", **arguments}, timeout_s=5.0)
    assert raised.value.argument == argument


@pytest.mark.parametrize(
    ("asked", "argument"),
    [({"world_size": 2, "rank": 1}, "rank"), ({"world_size": 3}, "world_size")],
)
def test_group_when_another_has_asked_for_something_else_then_refused_and_it_still_comes_together(
    server: tdserve.Server, asked: dict[str, Any], argument: str
) -> None:
    with server.client() as first, server.client() as second, ThreadPoolExecutor(1) as thread:
        name = f"contested-{argument}"

        def ask_first() -> Group:
            while True:  # the other one may be before it
                with suppress(InvalidRequestError):
                    return first.group(name, 2, 1, timeout_s=20.0)

        def ask_second() -> bool:
            try:
                second.group(name, **asked, timeout_s=0.0)
            except InvalidRequestError as error:
                return bool(error.argument == argument)
            except DeadlineExceededError:
                pass
            return False

        waiting = thread.submit(ask_first)
        wait_for(ask_second, "a refusal")
        with second.group(name, 2) as group, waiting.result(20.0) as other:
            assert (group.rank, other.rank) == (0, 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_group_when_of_nccl_and_there_is_no_gpu_then_not_supported(client: tdserve.Client) -> None:
    with pytest.raises(NotSupportedError, match="nccl"):
        client.group("gpus", 2, backend="nccl", timeout_s=5.0)


@pytest.mark.gpu
def test_group_when_two_members_share_a_gpu_then_both_errors_recommend_gloo(server: tdserve.Server) -> None:
    with server.client() as first, server.client() as second, ThreadPoolExecutor(2) as threads:
        asked = [
            threads.submit(client.group, "shared", 2, backend="nccl", device="cuda:0", timeout_s=30.0)
            for client in (first, second)
        ]
        for future in asked:
            with pytest.raises(NotSupportedError, match="use backend='gloo'"):
                future.result(60.0)


@pytest.mark.gpu
def test_group_when_each_member_has_a_gpu_of_its_own_then_tensors_go_from_one_to_the_other(
    server: tdserve.Server,
) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")

    def play(number: int) -> tuple[Any, Any]:
        device = torch.device("cuda", number)
        with server.client() as client, client.group("two", 2, number, backend="nccl", device=device) as group:
            td = TensorDict({"x": torch.full((3,), float(number)), "large": torch.ones(1 << 20)}, device=device)
            found = group.broadcast(td if number else None, 1)
            reduced = group.all_reduce(td.clone(), "sum")
            group.barrier()
            return found.cpu(), reduced.cpu()

    with ThreadPoolExecutor(2) as threads:
        for found, reduced in threads.map(play, range(2)):
            assert found["x"].tolist() == [1.0] * 3
            assert reduced["x"].tolist() == [1.0] * 3
            assert bool((reduced["large"] == 2).all())


def test_group_when_the_interface_is_not_ours_then_connect_error(server: tdserve.Server) -> None:
    with server.client() as first, server.client() as second, ThreadPoolExecutor(2) as threads:
        asked = [
            threads.submit(client.group, "far", 2, interface=interface, timeout_s=1.0)
            for client, interface in ((first, "192.0.2.1"), (second, None))
        ]
        with pytest.raises(ConnectError):
            asked[0].result(20.0)
        with pytest.raises((ConnectError, DeadlineExceededError)):
            asked[1].result(20.0)
        with server.client() as third, server.client() as fourth:  # neither of those two is a member any more
            again = [threads.submit(client.group, "far", 2, timeout_s=20.0) for client in (third, fourth)]
            assert sorted(each.result(30.0).rank for each in again) == [0, 1]


def test_join_when_one_cannot_connect_then_it_has_left_and_the_others_go_on(server: tdserve.Server) -> None:
    with Team(server, 2) as team:
        ask = GroupAsk(team.clients[0], team.name, backend="gloo", device=None, interface="192.0.2.1")
        failing = team.submit(
            ask.join, world_size=None, rank=None, last=team.epochs[0], deadline=Deadline.after(TIMEOUT_S)
        )
        going_on = team.submit(team.groups[1].next_epoch)
        with pytest.raises(ConnectError):
            failing.result(2 * TIMEOUT_S)
        assert going_on.result(2 * TIMEOUT_S).world_size == 1


@pytest.mark.parametrize(("interrupted", "error"), [("open", KeyboardInterrupt), ("__init__", NotSupportedError)])
def test_join_when_it_fails_after_the_epoch_was_formed_then_it_has_left_and_the_others_go_on(
    server: tdserve.Server, monkeypatch: pytest.MonkeyPatch, interrupted: str, error: type[BaseException]
) -> None:
    with Team(server, 2) as team:
        method, session = getattr(GroupEpoch, interrupted), team.epochs[0].session

        def interrupt(epoch: GroupEpoch, *arguments: Any, **options: Any) -> None:
            if session in (*arguments, getattr(epoch, "session", None)):
                raise error if error is KeyboardInterrupt else NotSupportedError(feature="it", reason="none")
            method(epoch, *arguments, **options)

        monkeypatch.setattr(GroupEpoch, interrupted, interrupt)
        failing, going_on = (team.submit(group.next_epoch) for group in team.groups)
        assert isinstance(failing.exception(TIMEOUT_S), error)
        assert going_on.result(2 * TIMEOUT_S).world_size == 1
