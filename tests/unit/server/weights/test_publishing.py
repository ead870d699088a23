from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tensordict import TensorDict

from tdserve.base.errors import (
    CapacityError,
    CorruptDataError,
    DeadlineExceededError,
    InvalidRequestError,
    InvalidSpecError,
    NotSupportedError,
    PeerLostError,
    RemoteProtocolError,
    StoreNotFoundError,
    TDServeError,
    WrongStateError,
)
from tdserve.control.status import decode_failure, encode_failure
from tdserve.messages.content import read_layout
from tdserve.rules.weights import MAX_METADATA_BYTES, Versions
from tdserve.server.requests import Requests
from tdserve.server.sessions.client_session import ClientSession
from tdserve.store.versions import VersionFile
from tdserve.structure import codec
from tdserve.structure.capture import capture
from tdserve.structure.dtypes import WIRE
from tdserve.structure.version_subset import convert_floats, encode_numbers, select_leaves
from tdserve.v1 import control_pb2, worker_pb2
from tests.unit.server.local_peer import LocalPeer
from tests.unit.server.world import Loop, World, columns_of, content_of, outbox


def weights(number: int) -> TensorDict:
    """Returns weights that contain their version."""
    return TensorDict({"w": torch.full((3, 2), float(number)), "b": torch.tensor([number])}, [])


SPEC = capture(weights(0)).spec


def make_request(number: int, **fields: object) -> control_pb2.PublishRequest:
    """Returns a request for which the server needs no structure."""
    content = content_of(weights(number), is_packed=True)
    return control_pb2.PublishRequest(store="w", spec=codec.encode(SPEC), content=content, **fields)  # type: ignore[arg-type]


def publish(world: World, run: Loop, number: int, **fields: object) -> int:
    """Publishes weights; returns the version."""
    return run(world.publishing.publish(world.session(), number, make_request(number, **fields))).version


def latest(world: World, run: Loop, **fields: object) -> control_pb2.Done:
    """Returns the answer to a request for the newest version."""
    request = control_pb2.LatestRequest(store="w", **fields)  # type: ignore[arg-type]
    done = run(world.publishing.send_latest(world.session(), 1, request))
    assert done is not None
    return done


def files(world: World) -> list[Path]:
    """Lists the files of readable versions."""
    return sorted(world.stores.get("w").folder.glob("versions/*.safetensors"))


@pytest.mark.parametrize("is_over", [False, True])
def test_publish_when_an_attempt_before_is_overtaken_by_its_retry_then_one_version(
    world: World, run: Loop, requests: Requests, monkeypatch: pytest.MonkeyPatch, is_over: bool
) -> None:
    first = world.session()
    again = world.session_of(first.hello, 2)  # the first was lost, but for its worker, which has not reported yet
    message = control_pb2.ClientMessage(request=7, publish=make_request(1))
    submit, began, reported = world.worker.submit, asyncio.Event(), asyncio.Event()

    async def hold_back(filling: worker_pb2.Order) -> worker_pb2.Worked:
        began.set()
        worked = await submit(filling)
        await reported.wait()
        return worked

    async def retry() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(world.worker, "submit", lambda filling: asyncio.ensure_future(hold_back(filling)))
            overtaken = asyncio.ensure_future(requests.serve(first, message))
            await began.wait()
        await requests.serve(again, message)
        if is_over:
            world.answers.forget(first.client_id, control_pb2.Answered(below=8))
        reported.set()
        await overtaken

    run(retry())
    done = outbox(again).done()
    assert [kept.version for kept in world.stores.get("w").get_versions().kept] == [done.version]
    if is_over:
        assert isinstance(outbox(first).error(), WrongStateError)
    else:
        assert outbox(first).done() == done


def test_publish_when_repeated_then_versions_grow_and_the_newest_is_read(world: World, run: Loop) -> None:
    assert [publish(world, run, number, metadata=b"m%d" % number) for number in (1, 2, 3)] == [1, 2, 3]
    done = latest(world, run)
    assert (done.accepted.version, done.accepted.metadata) == (3, b"m3")
    assert columns_of(read_layout(SPEC, is_packed=True), done.inline)["w"].tolist() == [[3.0, 3.0]] * 3
    assert codec.decode(done.accepted.spec) == SPEC
    assert not latest(world, run, fingerprint=SPEC.fingerprint).accepted.HasField("spec")


def test_publish_when_more_than_kept_then_only_the_newest_files_stay(world: World, run: Loop) -> None:
    for number in range(1, 6):
        publish(world, run, number)
    assert [path.stem for path in files(world)] == ["4", "5"]
    assert load_file(files(world)[-1])["b"].tolist() == [5]
    publish(world, run, 6, keep=1)
    assert [path.stem for path in files(world)] == ["6"]


def test_publish_when_the_server_restarts_then_versions_go_on(world: World, run: Loop) -> None:
    publish(world, run, 1)
    world.reopen()
    assert latest(world, run).accepted.version == 1
    assert publish(world, run, 2) == 2


def test_publish_when_the_content_is_too_short_then_the_version_before_stays(world: World, run: Loop) -> None:
    publish(world, run, 1)
    short = make_request(2)
    short.content.inline = short.content.inline[:-1]
    with pytest.raises(RemoteProtocolError):
        run(world.publishing.publish(world.session(), 2, short))
    assert latest(world, run).accepted.version == 1
    assert publish(world, run, 3) > 1


def test_publish_when_its_metadata_are_too_long_then_refused_and_the_version_before_stays(
    world: World, run: Loop
) -> None:
    publish(world, run, 1, metadata=bytes(MAX_METADATA_BYTES))
    with pytest.raises(InvalidRequestError, match="metadata"):
        publish(world, run, 2, metadata=bytes(MAX_METADATA_BYTES + 1))
    assert latest(world, run).accepted.version == 1


def test_publish_when_the_structure_is_unknown_then_error(world: World, run: Loop) -> None:
    request = make_request(1)
    request.ClearField("spec")
    with pytest.raises(InvalidSpecError, match="send it along"):
        run(world.publishing.publish(world.session(), 1, request))


def test_latest_when_nothing_is_newer_then_by_the_way_of_asking(world: World, run: Loop) -> None:
    with pytest.raises(StoreNotFoundError):
        latest(world, run)
    assert latest(world, run, newer_than=0).nothing_newer
    publish(world, run, 1)
    assert latest(world, run, newer_than=1).nothing_newer
    with pytest.raises(DeadlineExceededError, match="newer than 1"):
        latest(world, run, newer_than=1, timeout_s=0.01)


def test_latest_when_a_version_comes_while_it_waits_then_that(world: World, run: Loop) -> None:
    async def scenario() -> control_pb2.Done | None:
        session: ClientSession = world.session()
        request = control_pb2.LatestRequest(store="w", timeout_s=20.0)
        waiting = asyncio.create_task(world.publishing.send_latest(session, 1, request))
        await asyncio.sleep(0)
        await world.publishing.publish(world.session(2), 1, make_request(1))
        return await waiting

    done = run(scenario())
    assert done is not None
    assert done.accepted.version == 1


def test_latest_when_asked_without_content_then_only_the_number_is_sent(world: World, run: Loop) -> None:
    publish(world, run, 1)
    assert latest(world, run, without_content=True) == control_pb2.Done(version=1)
    assert latest(world, run, without_content=True, newer_than=1).nothing_newer


def test_latest_when_a_version_is_named_then_that_or_an_error_that_names_those_that_are_kept(
    world: World, run: Loop
) -> None:
    for number in (1, 2, 3):
        publish(world, run, number)
    done = latest(world, run, version=2)
    assert done.accepted.version == 2
    assert columns_of(read_layout(SPEC, is_packed=True), done.inline)["w"].eq(2).all()
    for version in (0, 1, 4):
        with pytest.raises(InvalidRequestError, match="kept now: 2, 3"):
            latest(world, run, version=version)


def test_latest_when_a_dtype_or_some_leaves_are_wanted_then_only_that_is_sent(world: World, run: Loop) -> None:
    publish(world, run, 3)
    halved = convert_floats(SPEC, "bfloat16")
    done = latest(world, run, dtype=WIRE["bfloat16"])
    assert columns_of(read_layout(halved, is_packed=True), done.inline)["w"].tolist() == [[3.0, 3.0]] * 3
    assert codec.decode(done.accepted.spec) == SPEC
    names = [path for path, _ in SPEC.tensors]
    some = select_leaves(SPEC, [names.index(("b",))])
    done = latest(world, run, version=1, leaves=encode_numbers([names.index(("b",))]))
    assert set(columns_of(read_layout(some, is_packed=True), done.inline)) == {"b", "status"}
    with pytest.raises(InvalidRequestError, match="dtype"):
        latest(world, run, dtype=WIRE["int8"])
    with pytest.raises(RemoteProtocolError, match="2 leaves"):
        latest(world, run, version=1, leaves=encode_numbers([2]))


def here() -> control_pb2.PublishRequest:
    """Returns a request of a local client, which writes the content itself."""
    content = control_pb2.Content(fingerprint=SPEC.fingerprint)
    return control_pb2.PublishRequest(store="w", spec=codec.encode(SPEC), content=content)


def check_nothing_left(world: World) -> None:
    """Checks that no trace of a publish is left."""
    assert not world.stores.catalog.is_taken("w")
    assert list((world.root.path / "stores").iterdir()) == []


def test_publish_when_the_first_fails_then_nothing_is_left_and_the_next_is_the_first(world: World, run: Loop) -> None:
    short = make_request(1)
    short.content.inline = short.content.inline[:-1]
    with pytest.raises(RemoteProtocolError):
        run(world.publishing.publish(world.session(), 1, short))
    check_nothing_left(world)
    assert publish(world, run, 2) == 1


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


@pytest.mark.parametrize("is_killed", [True, False])
def test_publish_when_the_first_client_leaves_in_the_middle_then_nothing_is_left_once_it_is_gone(
    world: World, run: Loop, is_killed: bool
) -> None:
    async def scenario() -> None:
        async with LocalPeer(world) as peer:
            write = begin(world, peer)
            make(world, await peer.accepted(), 1)
            if is_killed:
                peer.let_go()
            await peer.leave()
            with pytest.raises(PeerLostError):
                await write
            assert world.stores.find("w") is None
            assert world.stores.catalog.is_taken("w") != is_killed  # one that only stands still may go on
        over = asyncio.Event()
        world.process_watch.watch(peer.lock_name, over.set)
        await over.wait()

    run(scenario())
    check_nothing_left(world)


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
            assert (await writes[1]).version == 2
            assert [each.version for each in world.stores.get("w").get_versions().kept] == [2]
            made[0].seal()
            peer.done()
            assert (await writes[0]).version == 1

    run(scenario())
    assert latest(world, run).accepted.version == 2
    assert [load_file(path)["w"][0, 0].item() for path in files(world)] == [1, 2]


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

    async def scenario() -> int:
        async with LocalPeer(world) as peer:
            write = begin(world, peer)
            accepted = await peer.accepted()
            make(world, accepted, 2)
            if way == "refuse":
                peer.done(failure=encode_failure(CapacityError(what="a disk", asked=2, free=1)))
            else:
                await peer.leave()
            with pytest.raises(CapacityError if way == "refuse" else PeerLostError):
                await write
            return int(accepted.version)

    unfinished = run(scenario())
    assert [path.name for path in world.stores.get("w").folder.glob("versions/*")] == ["1.safetensors"]
    assert latest(world, run).accepted.version == 1
    assert publish(world, run, 3) > unfinished  # one that was stopped may still make its file


def test_publish_when_the_server_is_killed_while_a_local_client_writes_then_its_number_is_never_used_again(
    world: World, run: Loop
) -> None:
    publish(world, run, 1)

    async def scenario() -> None:
        async with LocalPeer(world) as peer:
            write = begin(world, peer)
            accepted = await peer.accepted()
            on_record = world.db.get("states", world.stores.get("w").record.uid.encode())
            assert on_record is not None
            after = Versions.restore(json.loads(on_record))
            assert after.newest is not None
            assert after.newest.version == 1
            assert after.begin(fingerprint=SPEC.fingerprint).version > accepted.version
            make(world, accepted, 2).seal()
            peer.done()
            await write

    run(scenario())


def test_publish_when_the_local_client_only_reads_then_refused(world: World, run: Loop) -> None:
    async def scenario() -> None:
        async with LocalPeer(world, is_read_only=True) as peer:
            with pytest.raises(NotSupportedError, match="only reads"):
                await begin(world, peer)

    run(scenario())
    assert latest(world, run, newer_than=0).nothing_newer
    check_nothing_left(world)
