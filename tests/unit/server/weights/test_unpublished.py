from __future__ import annotations

import asyncio

import pytest
import torch
from tensordict import TensorDict

from tdserve.base.deadline import Deadline
from tdserve.base.errors import DeadlineExceededError, WrongStateError
from tdserve.rules.weights import UnfinishedVersion
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.server.weights.unpublished import Unpublished
from tdserve.structure.captures.capture import capture
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


def fail(unpublished: Unpublished, begun: tuple[OpenedStore, UnfinishedVersion]) -> None:
    """What it does when no content comes."""
    begun[0].get_versions().abort(begun[1])
    unpublished.give_up(begun[0])


def commit(world: World, unpublished: Unpublished, begun: tuple[OpenedStore, UnfinishedVersion]) -> int:
    """What it does when its content is there; returns the version."""
    store, publishing = begun
    number = store.get_versions().next_number
    store.get_versions().commit(publishing, 1.0, nbytes=12)
    with world.db.begin_transaction() as txn:
        world.stores.save_state(store, txn, store.get_versions().get_state())
        unpublished.show(store, txn)
    return number


def check_nothing_left(world: World) -> None:
    """Checks that nothing is left of a publish."""
    assert not world.stores.catalog.is_taken("w")
    assert list((world.root.path / "stores").iterdir()) == []
    assert dict(world.db.scan("stores")) == dict(world.db.scan("states")) == {}


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
    assert commit(world, unpublished, second) == 1
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


def test_restore_when_a_store_was_never_published_then_it_goes(
    world: World, unpublished: Unpublished, run: Loop
) -> None:
    store, _ = run(begin(unpublished))
    world.reopen()
    check_nothing_left(world)
    after = Unpublished(world.stores)
    again = run(begin(after))
    assert commit(world, after, again) == 1
    assert again[0].record.uid != store.record.uid
