"""Publishes of local clients, which write the files of versions themselves."""

from __future__ import annotations

import asyncio
import os

import pytest
from safetensors.torch import load_file

from tdserve.base.errors import (
    CapacityError,
    CorruptDataError,
    PeerLostError,
    StoreNotFoundError,
    TDServeError,
)
from tdserve.control.status import decode_failure, encode_failure
from tdserve.messages.content import read_layout
from tdserve.server.dispatch.requests import Requests
from tdserve.store.weights.versions import VersionFile
from tdserve.structure.trees import codec
from tdserve.v1 import control_pb2
from tests.unit.server.local_peer import LocalPeer
from tests.unit.server.weights.publishes import SPEC, check_nothing_left, files, latest, make_request, publish
from tests.unit.server.world import Loop, World, columns_of


def here() -> control_pb2.PublishRequest:
    """Returns a request of a local client, which writes the content itself."""
    content = control_pb2.Content(fingerprint=SPEC.fingerprint)
    return control_pb2.PublishRequest(store="w", spec=codec.encode(SPEC), content=content)


@pytest.mark.parametrize("is_deleted", [False, True])
def test_publish_when_its_folder_is_damaged_then_corrupt_data_unless_the_store_was_deleted(
    world: World, run: Loop, requests: Requests, is_deleted: bool
) -> None:
    if is_deleted:
        publish(world, run, 1)

    async def scenario() -> TDServeError:
        async with LocalPeer(world) as peer:
            message = control_pb2.ClientMessage(request=1, publish=here())
            serving = asyncio.create_task(requests.serve(peer.session, message))
            await peer.accepted()
            if is_deleted:
                await world.stores.delete(world.stores.get("w"))
            damaged = CorruptDataError(path="1.safetensors", expected="a file", actual="none")
            peer.done(failure=encode_failure(damaged))
            await serving
            return decode_failure((await peer.receive()).failure)

    assert isinstance(run(scenario()), StoreNotFoundError if is_deleted else CorruptDataError)
    check_nothing_left(world)


def test_publish_when_the_first_client_leaves_in_the_middle_then_nothing_is_left_though_it_may_go_on(
    world: World, run: Loop
) -> None:
    async def scenario() -> None:
        async with LocalPeer(world) as peer:
            write = begin(world, peer)
            stopped = make(world, await peer.accepted(), 1)
            await peer.leave()
            with pytest.raises(PeerLostError):
                await write
            check_nothing_left(world)
            assert (await world.publishing.publish(world.session(2), 1, make_request(2))).version == 1
            with pytest.raises(CorruptDataError):
                stopped.seal()

    run(scenario())
    assert [load_file(path)["b"].item() for path in files(world)] == [2]


def test_publish_when_two_are_the_first_at_once_then_both_are_whole_and_none_shows_the_others(
    world: World, run: Loop
) -> None:
    async def scenario() -> None:
        async with LocalPeer(world) as peer, LocalPeer(world, 2) as other:
            writes = [begin(world, peer), begin(world, other)]
            made = [make(world, await each.accepted(), number) for number, each in enumerate((peer, other), 1)]
            assert world.stores.find("w") is None
            made[1].seal()
            other.done()
            assert (await writes[1]).version == 1
            assert [each.version for each in world.stores.get("w").get_versions().kept] == [1]
            made[0].seal()
            peer.done()
            assert (await writes[0]).version == 2

    run(scenario())
    assert latest(world, run).accepted.version == 2
    assert [load_file(path)["w"][0, 0].item() for path in files(world)] == [2, 1]


def begin(world: World, peer: LocalPeer, request: int = 1) -> asyncio.Task[control_pb2.Done]:
    """Begins a publish."""
    return asyncio.create_task(world.publishing.publish(peer.session, request, here()))


def make(world: World, accepted: control_pb2.Accepted, number: int) -> VersionFile:
    """Writes the version's file as a client does after its permit, without sealing it."""
    recycles = world.root.path / accepted.recycles if accepted.recycles else None
    file = VersionFile.create(world.root.path / accepted.path, SPEC, recycles=recycles)
    file.leaves["w",].fill_(number)
    return file


def test_publish_when_the_client_is_local_then_it_makes_the_file_and_the_next_reader_gets_its_path(
    world: World, run: Loop
) -> None:
    async def scenario() -> None:
        async with LocalPeer(world) as peer:
            for number in range(1, 5):
                write = begin(world, peer, number)
                accepted = await peer.accepted()
                assert not os.path.isabs(accepted.path)
                assert bool(accepted.recycles) == (number == 4)
                file = make(world, accepted, number)
                assert file.was_recycled == (number == 4)
                file.seal()
                peer.done(number)
                assert (await write).version == number
            asked = control_pb2.LatestRequest(store="w")
            done = await world.publishing.send_latest(peer.session, 9, asked)
            assert done is not None
            with VersionFile.open(world.root.path / done.accepted.path, SPEC) as found:
                assert found.leaves["w",].eq(4).all()
            assert (done.accepted.version, codec.decode(done.accepted.spec)) == (4, SPEC)

    run(scenario())
    assert columns_of(read_layout(SPEC, is_packed=True), latest(world, run).inline)["w"].eq(4).all()


@pytest.mark.parametrize("way", ["refuse", "leave"])
def test_publish_when_the_local_client_does_not_finish_then_the_version_before_stays_and_nothing_of_it(
    world: World, run: Loop, way: str
) -> None:
    publish(world, run, 1)

    async def scenario() -> None:
        async with LocalPeer(world) as peer:
            write = begin(world, peer)
            make(world, await peer.accepted(), 2)
            if way == "refuse":
                peer.done(failure=encode_failure(CapacityError(what="a disk", asked=2, free=1)))
            else:
                await peer.leave()
            with pytest.raises(CapacityError if way == "refuse" else PeerLostError):
                await write

    run(scenario())
    assert [path.name for path in world.stores.get("w").folder.glob("versions/*.safetensors*")] == ["1.safetensors"]
    assert latest(world, run).accepted.version == 1
    assert publish(world, run, 3) == 2


def test_publish_when_the_server_is_killed_while_a_local_client_writes_then_the_next_has_the_number_and_no_file_of_it(
    world: World, run: Loop
) -> None:
    for number in (1, 2, 3):
        publish(world, run, number)

    async def scenario() -> None:
        async with LocalPeer(world) as peer:
            write = begin(world, peer)
            stopped = make(world, await peer.accepted(), 4)
            assert stopped.was_recycled
            world.reopen()
            write.cancel()
            assert (await world.publishing.publish(world.session(2), 1, make_request(5))).version == 4
            stopped.leaves["w",].fill_(6)  # it goes on
            with pytest.raises(CorruptDataError):
                stopped.seal()

    run(scenario())
    assert [load_file(path)["b"].item() for path in files(world)] == [3, 5]


def test_publish_when_the_local_client_reports_a_file_that_is_not_there_then_error_and_the_version_before_stays(
    world: World, run: Loop
) -> None:
    publish(world, run, 1)

    async def scenario() -> None:
        async with LocalPeer(world) as peer:
            write = begin(world, peer)
            await peer.accepted()
            peer.done()
            with pytest.raises(CorruptDataError):
                await write

    run(scenario())
    assert [publish(world, run, 2), latest(world, run).accepted.version] == [2, 2]
