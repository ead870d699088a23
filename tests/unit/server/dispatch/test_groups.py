from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tdserve.base.errors import DeadlineExceededError, InvalidRequestError, NotSupportedError
from tdserve.server.dispatch.groups import Groups
from tdserve.server.sessions.client_session import ClientSession
from tdserve.v1 import control_pb2
from tests.errors import raises
from tests.unit.server.world import Loop, World, outbox


def ask(name: str = "g", size: int = 2, *, timeout_s: float = 20.0, **fields: object) -> control_pb2.JoinGroup:
    """A request of a member."""
    return control_pb2.JoinGroup(name=name, world_size=size, backend="gloo", timeout_s=timeout_s, **fields)  # type: ignore[arg-type]


async def form(groups: Groups, *sessions: ClientSession, size: int = 0) -> list[control_pb2.GroupFormed]:
    """The epoch that these sessions have asked for, as each session learns of it."""
    await asyncio.gather(*(groups.join(session, 5, ask(size=size or len(sessions))) for session in sessions))
    answers = []
    for session in sessions:
        await outbox(session).next()
        message = outbox(session).messages.pop(0)
        assert message.request == 5
        answers.append(message.group_formed)
    return answers


async def event_of(session: ClientSession) -> control_pb2.GroupEvent:
    """What a session is told next."""
    await outbox(session).next()
    message = outbox(session).messages.pop(0)
    assert message.request == 0
    return message.group_event


def test_join_when_all_have_asked_then_each_answer_has_its_rank_and_all_members(run: Loop, world: World) -> None:
    sessions = [
        world.session_of(control_pb2.Hello(client_id=bytes([n]) * 16, host=f"h{n}", pid=n), n) for n in (1, 2, 3)
    ]
    answers = run(form(Groups(), *sessions))
    assert [(answer.epoch, answer.rank) for answer in answers] == [(1, 0), (1, 1), (1, 2)]
    for answer in answers:
        assert [(member.host, member.pid) for member in answer.members] == [("h1", 1), ("h2", 2), ("h3", 3)]


def test_join_when_the_others_do_not_come_then_deadline_and_the_group_is_forgotten(run: Loop, world: World) -> None:
    groups = Groups()
    with pytest.raises(DeadlineExceededError, match=r"next epoch of group 'g' \(1 of 2 members have asked\)"):
        run(groups.join(world.session(), 5, ask(timeout_s=0.0)))
    assert len(groups) == 0


def test_join_when_refused_then_earlier_requests_still_wait(run: Loop, world: World) -> None:
    groups, first, second, third = Groups(), world.session(1), world.session(2), world.session(3)

    async def play() -> None:
        waiting = asyncio.ensure_future(groups.join(first, 5, ask(rank=1)))
        await asyncio.sleep(0)
        with pytest.raises(InvalidRequestError, match="rank 1 of group 'g' is taken"):
            await groups.join(second, 5, ask(rank=1))
        with raises(InvalidRequestError, argument="backend"):
            await groups.join(second, 5, control_pb2.JoinGroup(name="g", world_size=2, backend="mpi"))
        assert not waiting.done()
        await asyncio.gather(waiting, groups.join(third, 5, ask()))

    run(play())
    assert outbox(third).messages[0].group_formed.rank == 0


@pytest.mark.parametrize("field", ["epoch", "last_rank", "last_world_size"])
def test_join_when_a_member_claims_what_cannot_have_been_then_it_alone_is_refused(
    run: Loop, world: World, field: str
) -> None:
    groups, first, second, claiming = Groups(), world.session(1), world.session(2), ask()
    setattr(claiming, field, 2**64 - 1 if field == "epoch" else 2**32 - 1)

    async def play() -> None:
        waiting = asyncio.ensure_future(groups.join(first, 5, ask()))
        await asyncio.sleep(0)
        with raises(InvalidRequestError, argument=field):
            await groups.join(second, 5, claiming)
        assert not waiting.done()
        await asyncio.gather(waiting, groups.join(world.session(3), 5, ask()))

    run(play())
    assert (first.last_epoch, second.last_epoch) == (1, 0)


def test_join_when_a_group_of_the_name_is_over_then_its_numbers_do_not_come_again(run: Loop, world: World) -> None:
    groups, sessions = Groups(), [world.session(1), world.session(2)]

    async def play() -> list[int]:
        numbers = []
        for _ in range(3):
            numbers.append((await form(groups, *sessions))[0].epoch)
            leaving = control_pb2.GroupNotice(name="g", epoch=numbers[-1], leave=True)
            for session in sessions:
                groups.on_notice(session, leaving)
            assert (await event_of(sessions[1])).loss.has_left
        return numbers

    numbers = run(play())
    assert len(groups) == 0
    assert numbers == sorted(set(numbers))


def test_join_when_cancelled_then_it_asks_no_more(run: Loop, world: World) -> None:
    groups, first = Groups(), world.session(1)

    async def play() -> None:
        waiting = asyncio.ensure_future(groups.join(first, 5, ask()))
        await asyncio.sleep(0)
        assert len(groups) == 1
        waiting.cancel()
        await asyncio.wait([waiting])

    run(play())
    assert len(groups) == 0


def test_join_when_two_share_a_gpu_then_all_get_not_supported(run: Loop, world: World) -> None:
    groups, first, second = Groups(), world.session(1), world.session(2)
    asked = control_pb2.JoinGroup(name="g", world_size=2, backend="nccl", timeout_s=20.0, device="uuid")

    async def play() -> list[object]:
        joins = (groups.join(session, 5, asked) for session in (first, second))
        return list(await asyncio.gather(*joins, return_exceptions=True))

    found = run(play())
    assert [type(each) for each in found] == [NotSupportedError, NotSupportedError]
    assert len(groups) == 0


def test_notice_when_an_entry_then_all_other_members_of_the_epoch_get_it(run: Loop, world: World) -> None:
    groups, sessions = Groups(), [world.session(number) for number in (1, 2, 3)]
    stranger = world.session(4)

    async def play() -> None:
        await form(groups, *sessions)
        entry = control_pb2.Rendezvous(key="k", value=b"v")
        groups.on_notice(sessions[1], control_pb2.GroupNotice(name="g", epoch=1, entry=entry))
        for other in (sessions[0], sessions[2]):
            assert (await event_of(other)).entry == entry
        groups.on_notice(sessions[1], control_pb2.GroupNotice(name="g", epoch=2, entry=entry))
        groups.on_notice(stranger, control_pb2.GroupNotice(name="g", epoch=1, entry=entry))
        groups.on_notice(stranger, control_pb2.GroupNotice(name="other", epoch=1, entry=entry))
        await asyncio.sleep(0)

    run(play())
    assert [outbox(session).messages for session in (*sessions, stranger)] == [[], [], [], []]


def test_session_when_it_ends_then_the_others_get_its_rank_and_may_form_the_next_epoch(run: Loop, world: World) -> None:
    groups, sessions = Groups(), [world.session(number) for number in (1, 2, 3)]

    async def play() -> None:
        await form(groups, *sessions)
        waiting = [asyncio.ensure_future(groups.join(session, 5, ask(size=0))) for session in sessions[:2]]
        await asyncio.sleep(0)
        groups.on_session_ended(3)
        for session in sessions[:2]:
            event = await event_of(session)
            assert (event.epoch, event.loss.rank, event.loss.has_left, event.loss.has_given_up) == (1, 2, False, False)
        await asyncio.gather(*waiting)
        for rank, session in enumerate(sessions[:2]):
            await outbox(session).next()
            found = outbox(session).messages.pop(0).group_formed
            assert (found.epoch, found.rank, len(found.members)) == (2, rank, 2)
        groups.on_session_ended(1)
        groups.on_session_ended(2)

    run(play())
    assert len(groups) == 0


@pytest.mark.parametrize(
    ("kind", "said", "has_left"),
    [
        ("leave", {}, True),
        ("leave", {"num_finished": 0}, True),
        ("leave", {"is_busy": True}, False),
        ("given_up", {}, False),
        ("given_up", {"num_finished": 7}, True),
        ("given_up", {"is_busy": True}, False),
    ],
)
def test_notice_when_a_member_leaves_or_gives_up_then_the_others_get_its_rank_and_reason(
    run: Loop, world: World, kind: str, said: dict[str, Any], has_left: bool
) -> None:
    groups, sessions = Groups(), [world.session(number) for number in (1, 2)]
    body = {"leave": True} if kind == "leave" else {"given_up": "tired"}

    async def play() -> control_pb2.GroupLoss:
        await form(groups, *sessions)
        groups.on_notice(sessions[0], control_pb2.GroupNotice(name="g", epoch=1, **body, **said))
        loss = (await event_of(sessions[1])).loss
        groups.on_session_ended(2)
        return loss

    loss = run(play())
    assert (loss.rank, loss.has_left, loss.has_given_up) == (0, has_left, kind == "given_up")
    assert loss.HasField("num_finished") is ("num_finished" in said)
    assert loss.num_finished == said.get("num_finished", 0)
    assert len(groups) == (kind == "given_up")


def test_notice_when_some_have_gone_on_already_then_only_the_rest_gets_it(run: Loop, world: World) -> None:
    groups, sessions = Groups(), [world.session(number) for number in (1, 2, 3)]

    async def play() -> None:
        await form(groups, *sessions)
        asking = asyncio.ensure_future(groups.join(sessions[1], 6, ask(size=0)))
        await asyncio.sleep(0)
        groups.on_notice(sessions[0], control_pb2.GroupNotice(name="g", epoch=1, given_up="on", num_finished=1))
        assert (await event_of(sessions[2])).loss.num_finished == 1
        assert not outbox(sessions[1]).messages
        asking.cancel()
        await asyncio.wait([asking])

    run(play())
