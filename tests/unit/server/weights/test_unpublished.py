from __future__ import annotations

import asyncio

import pytest
import torch
from tensordict import TensorDict

from tdserve.base.deadline import Deadline
from tdserve.base.errors import DeadlineExceededError, WrongStateError
from tdserve.rules.weights import UnfinishedVersion
from tdserve.server.opened_store import OpenedStore
from tdserve.server.weights.unpublished import Unpublished
from tdserve.store.session_locks import SessionLock
from tdserve.structure.capture import capture
from tests.unit.server.world import Loop, World

SPEC = capture(TensorDict({"w": torch.zeros(3)}, [])).spec


@pytest.fixture
def unpublished(world: World) -> Unpublished:
    """The unpublished stores of the world."""
    return Unpublished(world.stores)


def deadline(timeout_s: float = 20.0) -> Deadline:
    """Returns the deadline of a publish."""
    return Deadline.after(timeout_s)


async def begin(unpublished: Unpublished) -> tuple[OpenedStore, UnfinishedVersion]:
    """What a publish does before its content comes."""
    store = await unpublished.store("w", SPEC, deadline())
    return store, store.get_versions().begin(fingerprint=SPEC.fingerprint)


def fail(unpublished: Unpublished, begun: tuple[OpenedStore, UnfinishedVersion], writer: str = "") -> None:
    """What it does when no content comes."""
    begun[0].get_versions().abort(begun[1])
    unpublished.give_up(begun[0], writer)


def commit(world: World, unpublished: Unpublished, begun: tuple[OpenedStore, UnfinishedVersion]) -> int:
    """What it does when its content is there."""
    store, publishing = begun
    store.get_versions().commit(publishing, 1.0, nbytes=12)
    with world.db.begin_transaction() as txn:
        world.stores.save_state(store, txn, store.get_versions().get_state())
        unpublished.show(store, txn)
    return publishing.version


def record(world: World, store: OpenedStore) -> None:
    """What it does before a local client writes."""
    with world.db.begin_transaction() as txn:
        world.stores.save_state(store, txn, store.get_versions().get_state())


def hold(world: World) -> SessionLock:
    """The lock of a local client."""
    lock = SessionLock.hold(world.root.sessions_folder, "client")
    assert lock is not None
    return lock


def check_nothing_left(world: World) -> None:
    """Checks that nothing is left of a publish."""
    assert not world.stores.catalog.is_taken("w")
    assert list((world.root.path / "stores").iterdir()) == []
    assert dict(world.db.scan("stores")) == dict(world.db.scan("states")) == {}


async def until_gone(world: World) -> None:
    """Returns once those who wait for the local client's end were told of it."""
    over = asyncio.Event()
    world.process_watch.watch("client", over.set)  # told after whoever asked before
    await over.wait()


def test_store_when_its_first_version_is_whole_then_seen_and_not_before(
    world: World, unpublished: Unpublished, run: Loop
) -> None:
    begun = run(begin(unpublished))
    assert world.stores.find("w") is None
    assert commit(world, unpublished, begun) == 1
    assert world.stores.find("w") is begun[0]
    world.reopen()
    assert world.stores.get("w").get_versions().newest is not None


def test_store_when_two_publish_at_once_then_they_share_it_and_one_that_fails_takes_nothing_away(
    world: World, unpublished: Unpublished, run: Loop
) -> None:
    first, second = run(begin(unpublished)), run(begin(unpublished))
    assert first[0] is second[0]
    fail(unpublished, first)
    assert commit(world, unpublished, second) == 2
    assert world.stores.find("w") is second[0]
    third = run(begin(unpublished))
    fail(unpublished, third)
    assert world.stores.find("w") is second[0]


def test_store_when_all_publishers_fail_then_nothing_is_left_and_the_next_begins_anew(
    world: World, unpublished: Unpublished, run: Loop
) -> None:
    for begun in [run(begin(unpublished)) for _ in range(3)]:
        fail(unpublished, begun)
    check_nothing_left(world)
    assert commit(world, unpublished, run(begin(unpublished))) == 1


def test_store_when_one_of_another_kind_is_being_made_then_waits_for_what_becomes_of_it(
    world: World, unpublished: Unpublished, run: Loop
) -> None:
    async def scenario() -> OpenedStore:
        other = await world.begin("w", TensorDict({"a": torch.zeros(2)}, []), session=3)
        with pytest.raises(DeadlineExceededError, match="the creation of store 'w'"):
            await unpublished.store("w", SPEC, deadline(0.01))
        waiting = asyncio.create_task(unpublished.store("w", SPEC, deadline()))
        await asyncio.sleep(0)
        await world.stores.delete(other)
        return await waiting

    run(scenario()).get_versions()
    run(world.create("td", TensorDict({"a": torch.zeros(2)}, [])))
    with pytest.raises(WrongStateError):
        run(unpublished.store("td", SPEC, deadline())).get_versions()


def test_give_up_when_a_local_client_may_still_write_then_numbers_go_on_until_it_is_gone(
    world: World, unpublished: Unpublished, run: Loop
) -> None:
    async def scenario() -> None:
        lock = hold(world)
        fail(unpublished, await begin(unpublished), "client")
        fail(unpublished, second := await begin(unpublished))
        assert second[1].version == 2
        assert world.stores.catalog.is_taken("w")
        assert world.stores.find("w") is None
        lock.release()
        await until_gone(world)
        check_nothing_left(world)

    run(scenario())


def test_give_up_when_another_is_whole_before_the_local_client_is_gone_then_the_store_stays(
    world: World, unpublished: Unpublished, run: Loop
) -> None:
    async def scenario() -> None:
        lock = hold(world)
        fail(unpublished, await begin(unpublished), "client")
        assert commit(world, unpublished, await begin(unpublished)) == 2
        lock.release()
        await until_gone(world)

    run(scenario())
    assert world.stores.get("w").get_versions().newest is not None


def test_restore_when_no_client_is_left_then_what_was_never_published_goes(
    world: World, unpublished: Unpublished, run: Loop
) -> None:
    run(begin(unpublished))
    world.reopen()  # nobody was let write
    check_nothing_left(world)
    begun = run(begin(Unpublished(world.stores)))
    record(world, begun[0])
    world.reopen()
    Unpublished(world.stores).restore()
    check_nothing_left(world)


def test_restore_when_a_client_of_before_may_still_write_then_numbers_go_on_until_it_is_gone(
    world: World, unpublished: Unpublished, run: Loop
) -> None:
    async def scenario() -> None:
        lock = hold(world)
        record(world, (await begin(unpublished))[0])
        world.reopen()
        after = Unpublished(world.stores)
        after.restore()
        fail(after, second := await begin(after))
        assert second[1].version == 2
        lock.release()
        await until_gone(world)
        check_nothing_left(world)

    run(scenario())


def test_restore_when_the_record_is_damaged_then_it_goes_all_the_same(
    world: World, unpublished: Unpublished, run: Loop
) -> None:
    store, _ = run(begin(unpublished))
    world.db.put("states", store.record.uid.encode(), b"{}")
    world.reopen()
    Unpublished(world.stores).restore()
    check_nothing_left(world)
