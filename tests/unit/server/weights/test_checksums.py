from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tdserve.base.deadline import Deadline
from tdserve.rules.weights import MIN_COMPARED_BYTES, PATIENCE
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.server.weights.checksums import QUIET_S, Checksums, Unchanged
from tdserve.store.weights.version_checksums import compute_leaf_checksum
from tdserve.structure.captures.capture import capture
from tdserve.structure.tensors.torch_types import view_bytes
from tdserve.structure.trees import codec
from tdserve.structure.trees.version_subset import decode_numbers
from tdserve.v1 import control_pb2, worker_pb2
from tests.unit.server.world import Loop, World, content_of

NEVER = Deadline.after(None)


def tree(base: float, head: float) -> TensorDict:
    """A large leaf and a small one."""
    base_leaf = torch.full((MIN_COMPARED_BYTES // 4,), base)
    return TensorDict({"base": base_leaf, "head": torch.full((5,), head)}, [])


SPEC = capture(tree(0, 0)).spec


class Weights:
    """A store, and its checksums."""

    def __init__(self, world: World, run: Loop) -> None:
        self.world, self.run = world, run
        self.checksums = Checksums(world.stores)
        self.orders: set[asyncio.Future[worker_pb2.Worked]] = set()
        self.gives_up = False

    @property
    def store(self) -> OpenedStore:
        return self.world.stores.get("w")

    def publish(self, base: float, head: float) -> int:
        """A version."""
        content = content_of(tree(base, head), is_packed=True)
        request = control_pb2.PublishRequest(store="w", spec=codec.encode(SPEC), content=content)
        return self.run(self.world.publishing.publish(self.world.session(), id(content), request)).version

    def make(self, *versions: int) -> None:
        """Starts the checksums of a version, and waits for them."""

        async def make() -> None:
            for version in versions:
                self.begin(version)
                await self.settle()

        self.run(make())

    async def settle(self) -> None:
        """Waits until no checksums are being made or left to make."""
        loop = asyncio.get_running_loop()
        is_quiet: asyncio.Future[None] = loop.create_future()
        loop.call_later(QUIET_S, is_quiet.set_result, None)  # behind those that were set before
        await is_quiet
        while self.orders:
            await asyncio.wait(self.orders)
            await asyncio.sleep(0)

    def begin(self, version: int) -> None:
        """Starts the checksums of a version."""
        path = self.store.folder / "versions" / f"{version}.safetensors"
        ref = worker_pb2.VersionRef(path=str(path), fingerprint=SPEC.fingerprint, spec=codec.encode(SPEC))
        self.checksums.make(self.store, self.store.get_versions().get(version), lambda: ref, self)  # type: ignore[arg-type]

    def submit(self, order: worker_pb2.Order) -> asyncio.Future[worker_pb2.Worked]:
        """Stands for the worker: passes an order on to it, or gives it up for a next one."""
        if self.gives_up:
            future = asyncio.get_running_loop().create_future()
            future.set_result(worker_pb2.Worked())
        else:
            future = self.world.worker.submit(order)
        self.orders.add(future)
        future.add_done_callback(self.orders.discard)
        return future

    def unchanged(self, held: int, version: int) -> Unchanged | None:
        """What a reader need not be sent."""
        record = self.store.get_versions().get(version)
        return self.run(self.checksums.find_unchanged(self.store, held, record, SPEC, NEVER))


@pytest.fixture
def weights(world: World, run: Loop) -> Weights:
    return Weights(world, run)


@pytest.mark.slow
def test_unchanged_when_both_are_known_then_equal_leaves_with_their_checksums_and_the_rest(weights: Weights) -> None:
    for head in (1, 2):
        weights.make(weights.publish(7, head))
    found = weights.unchanged(1, 2)
    assert found is not None
    assert (decode_numbers(found.numbers, SPEC), found.rest) == ([0], [1])
    expected = compute_leaf_checksum(view_bytes(tree(7, 1)["base"]).numpy())
    assert np.frombuffer(found.checksums, "<u8").tolist() == [expected]


def test_unchanged_when_one_is_not_known_then_everything_is_sent(weights: Weights) -> None:
    weights.make(weights.publish(7, 1))
    weights.publish(7, 2)
    assert weights.unchanged(1, 2) is None
    weights.make(2)
    assert weights.unchanged(9, 2) is None
    assert weights.unchanged(1, 2) is not None


def test_unchanged_when_little_is_then_everything_is_sent(weights: Weights) -> None:
    for base in (1, 2):
        weights.make(weights.publish(base, 7))
    assert weights.unchanged(1, 2) is None
    assert not weights.store.get_versions().is_mostly_unchanged


def test_unchanged_when_the_server_restarts_then_it_is_still_known(weights: Weights) -> None:
    for head in (1, 2):
        weights.make(weights.publish(7, head))
    weights.world.reopen()
    weights.checksums = Checksums(weights.world.stores)
    assert weights.unchanged(1, 2) is not None


def test_unchanged_when_most_was_so_far_then_it_is_waited_for_and_else_not(
    weights: Weights, run: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tdserve.server.weights.checksums.WAIT_S", 60.0)
    for head in (1, 2):
        weights.make(weights.publish(7, head))
    versions = weights.store.get_versions()
    assert versions.is_mostly_unchanged
    third = weights.publish(7, 3)

    async def at_once(is_mostly_unchanged: bool) -> Unchanged | None:
        versions.is_mostly_unchanged = is_mostly_unchanged
        weights.begin(third)
        return await weights.checksums.find_unchanged(weights.store, 2, versions.get(third), SPEC, NEVER)

    assert run(at_once(False)) is None
    assert run(at_once(True)) is not None


def test_made_when_the_worker_gives_them_up_for_the_next_version_time_after_time_then_made_more_rarely(
    weights: Weights, run: Loop
) -> None:
    weights.gives_up = True
    for number in range(2 * PATIENCE):
        version = weights.publish(number, 7)
        weights.make(version)
    assert not weights.store.get_versions().is_worth_checksums(version + 1)


def test_make_when_the_store_is_deleted_meanwhile_then_nothing_happens(weights: Weights, run: Loop) -> None:
    version = weights.publish(7, 1)
    store = weights.store

    async def scenario() -> None:
        weights.begin(version)
        await weights.world.stores.delete(store)
        await weights.settle()

    run(scenario())
    assert store.get_versions().get_checksums(version) is None
    assert weights.world.db.get("states", store.record.uid.encode()) is None


def test_make_when_the_store_is_sealed_meanwhile_then_made_all_the_same(weights: Weights, run: Loop) -> None:
    version = weights.publish(7, 1)

    async def scenario() -> None:
        weights.begin(version)
        weights.store.waiters.begin_seal("w")
        await weights.settle()
        weights.store.waiters.end_seal()

    run(scenario())
    assert weights.store.get_versions().get_checksums(version) is not None


def test_make_when_the_next_version_comes_at_once_then_only_that_one_gets_them(weights: Weights, run: Loop) -> None:
    first, second = weights.publish(1, 7), weights.publish(2, 7)

    async def scenario() -> None:
        weights.begin(first)
        assert not weights.orders
        weights.begin(second)
        await weights.settle()

    run(scenario())
    versions = weights.store.get_versions()
    assert versions.get_checksums(first) is None
    assert versions.get_checksums(second) is not None
