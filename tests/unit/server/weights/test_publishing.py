from __future__ import annotations

import asyncio
from typing import Any

import pytest
from safetensors.torch import load_file

from tdserve.base.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    InvalidSpecError,
    PeerLostError,
    RemoteProtocolError,
    StoreNotFoundError,
    WrongStateError,
)
from tdserve.messages.content import read_layout
from tdserve.rules.weights import MAX_METADATA_BYTES
from tdserve.server.dispatch.requests import Requests
from tdserve.server.durability.syncing import Syncing
from tdserve.server.sessions.client_session import ClientSession
from tdserve.store.disk.files import FRESH_SUFFIX
from tdserve.store.weights.version_marks import FILE_NAME, find_whole_versions
from tdserve.structure.trees import codec
from tdserve.structure.trees.dtypes import WIRE
from tdserve.structure.trees.version_subset import convert_floats, encode_numbers, select_leaves
from tdserve.v1 import control_pb2, worker_pb2
from tests.errors import raises
from tests.unit.server.weights.publishes import SPEC, check_nothing_left, files, latest, make_request, publish
from tests.unit.server.world import Loop, World, columns_of, outbox


@pytest.mark.parametrize("is_over", [False, True])
def test_publish_when_an_attempt_before_is_overtaken_by_its_retry_then_one_version(
    world: World, run: Loop, requests: Requests, monkeypatch: pytest.MonkeyPatch, is_over: bool
) -> None:
    first = world.session()
    again = world.session_of(first.hello, 2)  # the first was lost, except its worker, which has not reported yet
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
    assert not latest(world, run, fingerprint=SPEC.fingerprint, order=codec.compute_order(SPEC)).accepted.HasField(
        "spec"
    )


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
    assert publish(world, run, 3) == 2


def test_publish_when_its_metadata_are_too_long_then_refused_and_the_version_before_stays(
    world: World, run: Loop
) -> None:
    publish(world, run, 1, metadata=bytes(MAX_METADATA_BYTES))
    with raises(InvalidRequestError, argument="metadata"):
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
    known: dict[str, Any] = {"version": 1, "fingerprint": SPEC.fingerprint}
    done = latest(world, run, leaves=encode_numbers([names.index(("b",))]), **known)
    assert set(columns_of(read_layout(some, is_packed=True), done.inline)) == {"b", "status"}
    with raises(InvalidRequestError, argument="dtype"):
        latest(world, run, dtype=WIRE["int8"])
    with pytest.raises(RemoteProtocolError, match="2 leaves"):
        latest(world, run, leaves=encode_numbers([2]), **known)
    done = latest(world, run, version=1, fingerprint=b"other", leaves=encode_numbers([2]))
    assert set(columns_of(read_layout(SPEC.select([]), is_packed=True), done.inline)) == {"status"}
    assert not done.accepted.values


def test_publish_when_the_first_fails_then_nothing_is_left_and_the_next_is_the_first(world: World, run: Loop) -> None:
    short = make_request(1)
    short.content.inline = short.content.inline[:-1]
    with pytest.raises(RemoteProtocolError):
        run(world.publishing.publish(world.session(), 1, short))
    check_nothing_left(world)
    assert publish(world, run, 2) == 1


def test_publish_when_it_fails_after_its_store_then_the_next_store_of_the_name_keeps_its_versions(
    world: World, run: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(world, run, 1, keep=1)
    store, began, reported = world.stores.get("w"), asyncio.Event(), asyncio.Event()

    async def lose(_: worker_pb2.Order) -> worker_pb2.Worked:
        began.set()
        await reported.wait()
        raise PeerLostError(peer="publisher", reason="lost")

    async def scenario() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(world.worker, "submit", lambda filling: asyncio.ensure_future(lose(filling)))
            failing = asyncio.ensure_future(world.publishing.publish(world.session(), 2, make_request(2)))
            await began.wait()
        await world.stores.delete(store)
        for number in (1, 2):
            await world.publishing.publish(world.session(), number, make_request(number, keep=1))
        reported.set()
        with pytest.raises(PeerLostError):
            await failing

    run(scenario())
    assert [path.stem for path in files(world)] == ["3"]


async def _sync(world: World) -> None:
    """Makes a pass over all stores."""
    syncing = Syncing(world.stores, interval_s=0.0, before=lambda: None)
    await syncing.start()
    await syncing.stop(20.0)


def _list_whole(world: World) -> list[int]:
    """Returns the versions that a loss of power leads back to."""
    store = world.stores.get("w")
    return list(find_whole_versions(store.folder / "versions", uid=store.record.uid))


def test_publish_when_the_server_restarts_before_the_next_sync_then_a_synced_version_keeps_its_file(
    world: World, run: Loop
) -> None:
    publish(world, run, 1, keep=1)
    run(_sync(world))
    for number in (2, 3):
        publish(world, run, number)
        world.reopen()
    publish(world, run, 4)
    assert _list_whole(world) == [1]
    assert [path.stem for path in files(world)] == ["1", "4"]
    run(_sync(world))
    assert _list_whole(world) == [4]
    assert [path.stem for path in files(world)] == ["4"]


def test_publish_when_a_sync_of_it_fails_then_the_version_of_the_last_one_keeps_its_file(
    world: World, run: Loop
) -> None:
    publish(world, run, 1, keep=1)
    run(_sync(world))
    publish(world, run, 2)
    obstacle = world.stores.get("w").folder / "versions" / f"{FILE_NAME}{FRESH_SUFFIX}"
    obstacle.mkdir()
    run(_sync(world))
    publish(world, run, 3)
    assert _list_whole(world) == [1]
    obstacle.rmdir()
    run(_sync(world))
    assert _list_whole(world) == [3]
    assert [path.stem for path in files(world)] == ["3"]
