from __future__ import annotations

import asyncio
import gc
import weakref
from pathlib import Path

import pytest

from tdserve.base.errors import CapacityError, CorruptDataError, PeerLostError
from tdserve.control.status import encode_failure
from tdserve.server.sessions.local_client import Invitation
from tdserve.store.exchange.spools import make_spool_path
from tdserve.store.roots.root import Root
from tdserve.v1 import control_pb2, worker_pb2
from tests.unit.server.local_peer import LocalPeer
from tests.unit.server.world import Loop, World, outside

ACCEPTED = control_pb2.Accepted(uid="u")


def test_invitation_when_made_then_like_no_other() -> None:
    first, second = Invitation.make(), Invitation.make()
    assert first.key != second.key
    assert first.lock_name != second.lock_name
    assert "/" not in first.lock_name


def test_message_when_the_nonce_was_removed_then_its_file_is_named(tmp_path: Path) -> None:
    root = Root.acquire(tmp_path)
    root.nonce_path.unlink()
    with pytest.raises(CorruptDataError, match="nonce"):
        Invitation.make().make_message(root, is_lending=True)
    root.release()


def test_written_when_the_client_reports_it_then_over_with_its_report(world: World, run: Loop) -> None:
    async def scenario() -> None:
        async with LocalPeer(world) as peer:
            writing = peer.local.let_write(4, ACCEPTED)
            message = await peer.receive()
            assert (message.request, message.accepted.uid) == (4, "u")
            assert not writing.done()
            peer.done(5)  # nobody asked
            assert not writing.done()
            peer.done(4, columns=[b"c"])
            assert list((await writing).columns) == [b"c"]
            peer.done(4)  # once more

    run(scenario())


def test_written_when_the_client_will_not_then_its_reason(world: World, run: Loop) -> None:
    async def scenario() -> None:
        async with LocalPeer(world) as peer:
            writing = peer.local.let_write(4, ACCEPTED)
            peer.done(4, failure=encode_failure(CapacityError(what="a disk", asked=2, free=1)))
            with pytest.raises(CapacityError, match="a disk"):
                await writing

    run(scenario())


def test_written_when_the_session_ends_then_peer_lost_also_for_later_calls(world: World, run: Loop) -> None:
    async def scenario() -> None:
        async with LocalPeer(world, 7) as peer:
            writing = peer.local.let_write(4, ACCEPTED)
            await peer.receive()
            await peer.leave()
            peer.local.lose()
            for future in (writing, peer.local.let_write(5, ACCEPTED)):
                with pytest.raises(PeerLostError, match="session 7"):
                    await future
            peer.done(4)  # too late
            assert await peer.is_let_go()

    run(scenario())


def test_written_when_its_waiter_was_cancelled_then_an_answer_does_no_harm(world: World, run: Loop) -> None:
    async def scenario() -> None:
        async with LocalPeer(world) as peer:
            writing = peer.local.let_write(4, ACCEPTED)
            writing.cancel()
            assert peer.local.may_still_write(4)
            peer.done(4)
            assert not peer.local.may_still_write(4)

    run(scenario())


def test_may_still_write_when_asked_then_until_it_said_so_or_is_proved_gone(world: World, run: Loop) -> None:
    async def scenario() -> None:
        async with LocalPeer(world) as peer:
            assert not peer.local.may_still_write(4)
            futures = [peer.local.let_write(request, ACCEPTED) for request in (4, 5)]
            assert peer.local.may_still_write(4)
            peer.done(4)
            assert not peer.local.may_still_write(4)
            await peer.leave()
            assert peer.local.may_still_write(5)
            peer.let_go()
            assert not peer.local.may_still_write(5)
            late = peer.local.let_write(6, ACCEPTED)  # it was never told
            assert not peer.local.may_still_write(6)
            await asyncio.gather(*futures, late, return_exceptions=True)

    run(scenario())


def test_may_still_write_when_the_client_only_reads_then_never(world: World, run: Loop) -> None:
    async def scenario() -> None:
        async with LocalPeer(world, is_read_only=True) as peer:
            copying = peer.local.let_write(4, ACCEPTED)
            assert not peer.local.may_still_write(4)
            peer.done(4)
            await copying

    run(scenario())


def test_filled_when_the_client_reports_it_then_its_waiter_goes_on_before_the_next_message(
    world: World, run: Loop
) -> None:
    async def scenario() -> None:
        async with LocalPeer(world) as peer:
            columns: list[bytes] = []

            async def fill() -> None:
                columns.extend((await peer.local.let_fill(4, ACCEPTED)).columns)

            def begin_and_end() -> None:
                peer.session.run_at_once(fill(), 4)
                assert peer.local.is_writing(4)
                peer.done(4, columns=[b"c"])
                assert columns == [b"c"]
                assert not peer.local.is_writing(4)

            await outside(begin_and_end)
            assert (await peer.receive()).accepted.uid == "u"

    run(scenario())


def test_filled_when_the_session_ends_then_its_waiter_gets_the_error_before_the_session_is_over(
    world: World, run: Loop
) -> None:
    async def scenario() -> None:
        async with LocalPeer(world, 7) as peer:
            errors: list[PeerLostError] = []

            async def fill(request: int) -> None:
                try:
                    await peer.local.let_fill(request, ACCEPTED)
                except PeerLostError as error:
                    errors.append(error)

            await outside(lambda: peer.session.run_at_once(fill(4), 4))
            assert not await peer.session.finish(0.01)  # it is under way
            await peer.leave()
            assert len(errors) == 1
            await fill(5)  # it was never told
            assert len(errors) == 2
            peer.done(4)  # too late

    run(scenario())


@pytest.mark.parametrize(("is_read_only", "nbytes"), [(False, 70_000), (False, 0), (True, 70_000)])
def test_spooled_when_values_are_in_a_file_then_the_order_has_file_and_offset(
    world: World, run: Loop, is_read_only: bool, nbytes: int
) -> None:
    async def scenario() -> None:
        async with LocalPeer(world, is_read_only=is_read_only) as peer:
            order = worker_pb2.PutValues()
            peer.local.add_spool(control_pb2.Content(spool_offset=512, spool_nbytes=nbytes), order)
            if is_read_only or not nbytes:
                assert order == worker_pb2.PutValues()
            else:
                path = make_spool_path(world.root.sessions_folder, peer.lock_name)
                assert (order.spool, order.spool_offset, order.spool_nbytes) == (str(path), 512, nbytes)

    run(scenario())


def test_written_when_the_session_has_ended_then_the_error_of_its_waiters_keeps_none_of_their_calls(
    world: World, run: Loop
) -> None:
    class Kept:
        """What a call holds."""

    async def scenario() -> None:
        async with LocalPeer(world) as peer:

            async def write() -> None:
                kept = Kept()
                left.append(weakref.ref(kept))
                await peer.local.let_fill(4, ACCEPTED)

            left: list[weakref.ref[Kept]] = []
            writing = asyncio.create_task(write())
            await peer.receive()
            peer.local.lose()
            await asyncio.gather(writing, return_exceptions=True)
            del writing
            await asyncio.sleep(0)
            assert left[0]() is None
            assert peer.local.is_writing(4)

    gc.disable()
    try:
        run(scenario())
    finally:
        gc.enable()
