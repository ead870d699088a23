from __future__ import annotations

import asyncio
from functools import partial

import pytest

from tdserve.base.addresses import find_local_address
from tdserve.base.config import MAIL_BYTES, MAIL_INLINE_BYTES
from tdserve.base.deadline import Deadline
from tdserve.base.errors import (
    ConnectError,
    LocalProtocolError,
    PeerLostError,
    StoreNotFoundError,
    TransferAbortedError,
)
from tdserve.base.worker_arguments import WorkerArguments
from tdserve.rules.tags import make_tag
from tdserve.server.execution.reported_faults import to_error
from tdserve.server.execution.waiting import Waiters
from tdserve.server.movers.choosing import make_channel_movers
from tdserve.server.processes.worker_processes import WorkerProcesses
from tdserve.server.processes.workers import DataWorker
from tdserve.server.sessions.client_session import ClientSession
from tdserve.v1 import control_pb2, worker_pb2
from tests.unit.server.world import INLINE_BYTES, Loop, World, outbox, outside


def test_order_when_made_then_names_session_and_tag_and_whether_it_is_accepted(world: World) -> None:
    session = world.session(3)
    order = session.make_order(2**31 + 4)
    assert (order.session, order.tag, order.is_accepted) == (3, make_tag(5), False)
    assert session.make_order(7, is_accepted=True).is_accepted
    assert session.accepted_requests == {7}


@pytest.mark.parametrize(("transport", "num_for_content"), [("gloo", 1), ("nccl", 7)])
def test_descriptors_when_channels_open_then_those_of_the_others_are_still_promised(
    world: World, run: Loop, transport: str, num_for_content: int
) -> None:
    session = world.session()
    session.channel_transport = transport
    session.worker = DataWorker(
        WorkerArguments(1), WorkerProcesses(), on_session=lambda report: None, on_lost=lambda worker: None
    )

    async def promised_after_each() -> list[int]:
        promised = [session.num_promised_descriptors]
        for is_mail in (False, True):
            session.send_rendezvous(control_pb2.Rendezvous(is_mail=is_mail))
            promised.append(session.num_promised_descriptors)
        return promised

    assert run(promised_after_each()) == [num_for_content + 1, 1, 0]
    assert session.lose_channel(0, "it broke") == (transport == "gloo")
    assert session.num_promised_descriptors == (1 if transport == "gloo" else 0)  # the other session has ended


def test_order_when_the_session_has_ended_then_refused(world: World) -> None:
    session = world.session(3)
    session.ended.set()
    with pytest.raises(PeerLostError, match="session 3"):
        session.make_order(1)


def test_answers_when_sent_then_carry_the_request(world: World, run: Loop) -> None:
    session = world.session()
    run(session.send_done(4, control_pb2.Done(version=2)))
    run(session.send_accepted(5, control_pb2.Accepted(num_rows=3)))
    run(session.fail(6, StoreNotFoundError(name="x")))
    assert [message.request for message in outbox(session).messages] == [4, 5, 6]
    assert [message.WhichOneof("body") for message in outbox(session).messages] == ["done", "accepted", "failure"]


def test_answers_when_the_request_came_by_mail_then_go_the_same_way_but_failures(world: World, run: Loop) -> None:
    session = world.session()
    session.mailed_requests = {4, 5, 6}
    run(session.send_done(4, control_pb2.Done(version=2)))
    run(session.send_accepted(5, control_pb2.Accepted(num_rows=3)))
    assert outbox(session).messages == []
    run(session.fail(6, StoreNotFoundError(name="x")))
    assert isinstance(outbox(session).error(), StoreNotFoundError)


def test_answers_when_too_long_for_mail_then_over_the_stream(world: World, run: Loop) -> None:
    session = world.session()
    session.mailed_requests = {4}
    overhead = control_pb2.ServerMessage(request=4, done=control_pb2.Done(indices=bytes(4000))).ByteSize() - 4000
    fitting, longer = (control_pb2.Done(indices=bytes(MAIL_BYTES - overhead + extra)) for extra in (0, 1))
    run(session.send_done(4, fitting))
    assert outbox(session).messages == []
    run(session.send_done(4, longer))
    assert outbox(session).done() == longer


def test_mail_when_the_session_has_ended_then_nothing_is_sent(world: World) -> None:
    session = world.session()
    session.mailed_requests = {4}
    session.ended.set()  # its worker would begin it anew
    assert session.send_by_mail(control_pb2.ServerMessage(request=4))
    assert not session.send_by_mail(control_pb2.ServerMessage(request=5))


def test_inline_limit_when_the_answer_is_mail_then_leaves_room_for_the_rest(world: World) -> None:
    session = world.session()
    session.mailed_requests = {4}
    assert (session.compute_inline_limit(4), session.compute_inline_limit(5)) == (MAIL_INLINE_BYTES, INLINE_BYTES)
    small = ClientSession(
        2,
        session.hello,
        session.connection,
        make_movers=partial(make_channel_movers, world.mover_context),
        worker=world.worker,
        interface="127.0.0.1",
        inline_bytes=100,
    )
    small.mailed_requests = {4}
    assert (small.compute_inline_limit(4), small.compute_inline_limit(5)) == (100, 100)


def test_wait_until_when_the_condition_holds_later_then_it_is_asked_after_each_change(world: World, run: Loop) -> None:
    async def scenario() -> int:
        session, waiters, answers = world.session(), Waiters(), [True, False, False]
        waiting = asyncio.ensure_future(session.wait_until(waiters, answers.pop, Deadline.never, lambda: "a change"))
        while answers:
            assert not waiting.done()
            waiters.wake()
            await asyncio.sleep(0)
        await waiting
        return len(answers)

    assert run(scenario()) == 0


@pytest.mark.parametrize("way", ["cancel", "finish"])
def test_wait_when_cut_short_then_cancelled_but_what_moves_goes_on(world: World, run: Loop, way: str) -> None:
    async def scenario() -> tuple[list[str], bool]:
        session, ends = world.session(), list[str]()
        moved = asyncio.Event()

        async def wait() -> None:
            try:
                await session.wait(Waiters(), lambda: None, Deadline.never, lambda: "")
            except asyncio.CancelledError:
                ends.append("cancelled")
                moved.set()

        async def move() -> None:
            await moved.wait()
            ends.append("moved")

        session.run(wait(), 1)
        session.run(move(), 2)
        await asyncio.sleep(0)
        if way == "cancel":
            session.cancel(2)
            session.cancel(1)
        return ends, await session.finish(20.0)

    assert run(scenario()) == (["cancelled", "moved"], True)


def test_run_at_once_when_nothing_is_waited_for_then_over_before_it_returns(world: World, run: Loop) -> None:
    async def scenario() -> None:
        session = world.session()
        await outside(lambda: session.run_at_once(session.send_done(4, control_pb2.Done(version=2)), 4))
        assert outbox(session).done().version == 2
        assert await session.finish(0.0)

    run(scenario())


def test_run_at_once_when_it_waits_then_known_as_its_request(world: World, run: Loop) -> None:
    async def scenario() -> None:
        session, ends = world.session(), list[str]()

        async def wait() -> None:
            try:
                await session.wait(Waiters(), lambda: None, Deadline.never, lambda: "")
            except asyncio.CancelledError:
                ends.append("cancelled")

        await outside(lambda: session.run_at_once(wait(), 1))
        await asyncio.sleep(0)
        session.cancel(2)
        await asyncio.sleep(0)
        assert ends == []
        session.cancel(1)
        assert await session.finish(20.0)
        assert ends == ["cancelled"]

    run(scenario())


def test_wait_when_the_state_is_there_then_goes_on_at_once(world: World, run: Loop) -> None:
    async def scenario() -> None:
        session, found = world.session(), list[str]()

        async def wait() -> None:
            found.append(await session.wait(Waiters(), lambda: "there", Deadline.after(0), lambda: ""))

        def begin() -> None:
            session.run_at_once(wait(), 1)
            assert found == ["there"]

        await outside(begin)

    run(scenario())


def test_wait_when_the_store_is_deleted_then_error_whatever_the_state(world: World, run: Loop) -> None:
    waiters = Waiters()
    waiters.delete("x")
    with pytest.raises(StoreNotFoundError):
        run(world.session().wait(waiters, lambda: "there", Deadline.never, lambda: ""))


def test_finish_when_something_does_not_end_then_false(world: World, run: Loop) -> None:
    async def scenario() -> bool:
        session = world.session()
        hanging = asyncio.Event()

        async def hang() -> None:
            await hanging.wait()

        session.run(hang(), 1)
        is_finished = await session.finish(0.01)
        hanging.set()
        assert await session.finish(20.0)
        return is_finished

    assert not run(scenario())


def test_as_error_when_it_is_no_error_of_ours_then_a_local_one() -> None:
    ours = StoreNotFoundError(name="x")
    assert to_error(ours, "1-2") is ours
    fault = to_error(ZeroDivisionError("by zero"), "1-2")
    assert isinstance(fault, LocalProtocolError)
    assert fault.reason == "ZeroDivisionError: by zero"


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:127.0.0.1:1234", "127.0.0.1"),
        ("ipv6:[::1]:1234", "::1"),
        ("ipv6:%5B::1%5D:1234", "::1"),
        ("ipv6:[::ffff:127.0.0.1]:1234", "127.0.0.1"),
        ("unix:/tmp/socket", "127.0.0.1"),
        ("ipv4:no address:1", "127.0.0.1"),
    ],
)
def test_local_address_when_a_peer_is_named_then_of_the_interface_towards_it(peer: str, address: str) -> None:
    assert find_local_address(peer) == address


def test_finish_when_something_begins_meanwhile_then_waits_for_that_too(world: World, run: Loop) -> None:
    async def scenario() -> bool:
        session, moved = world.session(), asyncio.Event()

        async def tell() -> None:  # a rendezvous entry of the worker: session.run(session.connection.send(message), 0)
            for _ in range(5):
                await asyncio.sleep(0)

        async def move() -> None:
            await moved.wait()
            session.run(tell(), 0)

        session.run(move(), 1)
        finishing = asyncio.create_task(session.finish(20.0))
        await asyncio.sleep(0)
        moved.set()
        return await finishing

    assert run(scenario())


def test_channel_when_lost_then_what_is_bound_to_it_is_cut_short_and_the_rest_waits_on(world: World, run: Loop) -> None:
    async def scenario() -> list[int]:
        session, cut, waiters = world.session(95), list[int](), Waiters()

        async def wait(request: int) -> None:
            try:
                await session.wait(waiters, lambda: None, Deadline.never, lambda: "")
            except asyncio.CancelledError:
                cut.append(request)

        session.bind(1, 0)
        for request in (1, 2):
            session.run(wait(request), request)
        await asyncio.sleep(0)
        assert session.lose_channel(0, "a test")
        assert not session.lose_channel(0, "a test")  # what is found late is no news
        session.bind(3, 0)  # it comes late
        session.run(wait(3), 3)
        for _ in range(5):
            await asyncio.sleep(0)
        found = list(cut)
        for request in (1, 3):
            with pytest.raises(TransferAbortedError, match="channel 0"):
                session.make_order(request)
        assert (session.make_order(2).channel, session.make_order().channel) == (1, 1)
        assert await session.finish(20.0)
        return found

    assert run(scenario()) == [1, 3]


def test_request_when_it_names_a_later_channel_then_those_before_are_lost(world: World, run: Loop) -> None:
    async def scenario() -> None:
        session = world.session(96)
        session.make_order(7)
        session.bind(8, 2)  # mail has overtaken the stream
        assert session.channel_number == 2
        assert session.make_order(8).channel == 2
        with pytest.raises(TransferAbortedError):
            session.make_order(7)
        session.discard(7, control_pb2.Content(message_nbytes=[8]))  # there is nothing to take
        session.send_void(7, [64])
        assert not session.ended.is_set()

    run(scenario())


def test_refused_content_when_on_a_later_channel_then_taken_there(
    world: World, run: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    ordered: list[worker_pb2.Order] = []
    submit = world.worker.submit

    def note(asked: worker_pb2.Order) -> asyncio.Future[worker_pb2.Worked]:
        ordered.append(asked)
        return submit(asked)

    async def scenario() -> None:
        session = world.session(98)
        monkeypatch.setattr(session.worker, "submit", note)
        session.discard(7, control_pb2.Content(message_nbytes=[8]), channel_number=2)  # mail has overtaken the stream
        assert session.channel_number == 2

    run(scenario())
    (asked,) = ordered
    assert (asked.channel, asked.tag, list(asked.discard.message_nbytes)) == (2, make_tag(7), [8])


def test_channel_when_the_worker_cannot_form_it_then_logged_with_the_reason(
    world: World, run: Loop, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(order: worker_pb2.Order) -> asyncio.Future[worker_pb2.Worked]:
        failed: asyncio.Future[worker_pb2.Worked] = asyncio.get_running_loop().create_future()
        failed.set_exception(ConnectError(address="10.0.0.1", reason="no proof"))
        return failed

    async def scenario() -> None:
        session = world.session(99)
        monkeypatch.setattr(session.worker, "submit", refuse)
        for is_mail in (False, True):
            session.send_rendezvous(control_pb2.Rendezvous(key="k", value=b"v", is_mail=is_mail))
        await asyncio.sleep(0)

    run(scenario())
    assert [message.partition(" to ")[0] for message in caplog.messages] == [
        "session 99: channel 0 for content was not formed: no connection",
        "session 99: the channel for mail was not formed: no connection",
    ]


def test_accepted_when_sent_then_names_the_channel_of_the_content(world: World, run: Loop) -> None:
    session = world.session(97)  # of its own: the worker closes its channel
    session.lose_channel(0, "a test")
    session.make_order(5)
    run(session.send_accepted(5, control_pb2.Accepted()))
    assert outbox(session).messages[0].accepted.channel == 1


def test_channel_when_content_goes_from_gpu_to_gpu_then_the_session_ends_with_it(world: World) -> None:
    hello = world.session().hello
    session = ClientSession(
        2,
        hello,
        world.session().connection,
        make_movers=partial(make_channel_movers, world.mover_context),
        worker=world.worker,
        interface="",
        inline_bytes=1,
        channel_transport="nccl",
    )
    assert not session.lose_channel(0, "a test")
    assert session.ended.is_set()
