"""What is taken from relays: whose checksums count, and when."""

from __future__ import annotations

import asyncio

import pytest

from tdserve.base.errors import CorruptDataError, DeadlineExceededError, InvalidRequestError
from tdserve.rules.fanout import SERVER
from tdserve.rules.weights import MIN_COMPARED_BYTES, PATIENCE
from tdserve.server.weights import relays as relays_module
from tdserve.server.weights.relays import MAX_LINE_S
from tests.unit.server.weights.test_relays import RIGHT, SPEC, WRONG, Trees
from tests.unit.server.world import Loop, World


@pytest.fixture
def trees(world: World) -> Trees:
    """A store without versions."""
    return Trees(world)


def test_taken_when_the_checksums_are_right_then_counted_and_the_puller_has_it(trees: Trees, run: Loop) -> None:
    async def scenario() -> None:
        await trees.root()
        placed = await trees.place(2)
        await trees.taken(2, placed.hop)
        (gloo,) = trees.traffic.list_stats()
        assert (gloo.bytes_relayed, gloo.transfers_relayed, gloo.bytes_out) == (SPEC.nbytes, 1, 0)
        with pytest.raises(InvalidRequestError, match="not under way"):
            await trees.taken(2, placed.hop)

    run(scenario())


def test_taken_when_its_version_was_forgotten_while_its_puller_waited_then_counted(trees: Trees, run: Loop) -> None:
    async def scenario() -> None:
        trees.publish()
        first = await trees.place(1)
        waiting = [asyncio.create_task(trees.place(number)) for number in (2, 3)]
        for _ in range(3):
            await asyncio.sleep(0)
        trees.publish()
        with trees.relays.track_sending(trees.store, first):
            pass  # nobody gets the old version any more, and two still wait for it
        root = await asyncio.wait_for(waiting[0], MAX_LINE_S / 2)
        with trees.relays.track_sending(trees.store, root):
            trees.report(2, holds=root.hop)
            placed = await asyncio.wait_for(waiting[1], MAX_LINE_S / 2)
        assert (root.relay, placed.relay) == (SERVER, 2)
        await trees.taken(3, placed.hop)
        (gloo,) = trees.traffic.list_stats()
        assert (gloo.bytes_relayed, gloo.transfers_relayed) == (SPEC.nbytes, 1)

    run(scenario())


@pytest.mark.parametrize("hop", [0, 1, 2])
def test_taken_when_it_is_no_hop_of_this_client_then_refused(trees: Trees, run: Loop, hop: int) -> None:
    async def scenario() -> None:
        await trees.root()
        await trees.place(2)
        with pytest.raises(InvalidRequestError):
            await trees.taken(3, hop)

    run(scenario())


def test_taken_when_the_checksums_are_wrong_then_error_and_no_puller_gets_it_from_there(
    trees: Trees, run: Loop
) -> None:
    async def scenario() -> None:
        await trees.root()
        placed = await trees.place(2)
        with pytest.raises(CorruptDataError, match="passed on by another client"):
            await trees.taken(2, placed.hop, WRONG)
        assert trees.traffic.list_stats() == []
        assert (await trees.place(2, placed.hop)).relay == SERVER

    run(scenario())


def test_taken_when_the_server_has_the_checksums_then_those_count(trees: Trees, run: Loop) -> None:
    async def scenario() -> None:
        version = trees.publish()
        await trees.root()
        trees.store.get_versions().set_checksums(version.version, WRONG)
        placed = await trees.place(2)
        await trees.taken(2, placed.hop, WRONG)
        other = await trees.place(3, dtype=5)  # other bytes, of which it knows none
        assert other.relay == SERVER

    run(scenario())


def test_taken_when_the_server_makes_its_own_then_only_those_count_unless_it_takes_long(
    trees: Trees, run: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        version = trees.publish(nbytes=MIN_COMPARED_BYTES)
        root = await trees.root()
        hops = [(await trees.place(2)).hop]
        waiting = asyncio.create_task(trees.taken(2, hops[0], WRONG))
        await asyncio.sleep(0)
        trees.store.get_versions().set_checksums(version.version, WRONG)
        trees.store.waiters.wake()
        await waiting
        version = trees.publish(nbytes=MIN_COMPARED_BYTES)
        assert (await trees.root()).hop > root.hop
        monkeypatch.setattr(relays_module, "MAX_OWN_S", 0.01)
        await trees.taken(2, (await trees.place(2)).hop, RIGHT)

    run(scenario())


def test_taken_when_the_server_makes_none_of_this_version_then_they_are_ordered_at_once(
    trees: Trees, run: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        versions = trees.store.get_versions()
        for _ in range(2 * PATIENCE):
            versions.note_superseded(trees.publish(nbytes=MIN_COMPARED_BYTES).version)
        assert not versions.is_worth_checksums(trees.publish(nbytes=MIN_COMPARED_BYTES).version)
        await trees.root()
        monkeypatch.setattr(relays_module, "MAX_OWN_S", 600.0)
        await trees.taken(2, (await trees.place(2)).hop, RIGHT)

    run(scenario())


def test_taken_when_the_checksums_are_not_known_yet_then_waits_for_them(trees: Trees, run: Loop) -> None:
    async def scenario() -> None:
        trees.publish()
        root = await trees.place(1)
        trees.report(1, holds=root.hop)
        trees.may_make.clear()
        placed = await trees.place(2)
        with pytest.raises(DeadlineExceededError, match="checksums"):
            await trees.taken(2, placed.hop, timeout_s=0.01)
        waiting = asyncio.create_task(trees.taken(2, placed.hop))
        await asyncio.sleep(0)
        trees.may_make.set()
        await waiting

    run(scenario())


@pytest.mark.parametrize("dtype", [0, 5])
def test_taken_when_a_relay_has_forged_it_then_the_servers_own_checksums_show_it(
    trees: Trees, run: Loop, dtype: int
) -> None:
    async def scenario() -> None:
        trees.publish()
        root = await trees.place(1, dtype=dtype)
        with trees.relays.track_sending(trees.store, root):
            trees.report(1, holds=root.hop)
        placed = await trees.place(2, dtype=dtype)
        assert placed.relay == 1
        with pytest.raises(CorruptDataError):
            await trees.taken(2, placed.hop, WRONG)
        assert (await trees.place(2, placed.hop, dtype=dtype)).relay == SERVER

    run(scenario())


def test_taken_when_the_checksums_cannot_be_made_any_more_then_an_error_at_once(trees: Trees, run: Loop) -> None:
    async def scenario() -> None:
        await trees.root()
        trees.made = b""
        placed = await trees.place(2)
        await asyncio.sleep(0)
        with pytest.raises(DeadlineExceededError, match="checksums"):
            await asyncio.wait_for(trees.taken(2, placed.hop, timeout_s=600.0), 20.0)

    run(scenario())
