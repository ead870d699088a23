from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import nn

import tdserve
from tdserve.base.errors import RemoteProtocolError, SpecMismatchError
from tdserve.client.content.read_content import Destination
from tdserve.client.weights import pulls
from tdserve.client.weights.deltas import MAX_PLACES, HeldVersion, HeldVersions, PartialVersion
from tdserve.client.weights.module_destination import ModuleDestination
from tdserve.rules.weights import MIN_COMPARED_BYTES
from tdserve.store.weights.version_checksums import compute_leaf_checksum
from tdserve.structure.captures.capture import capture
from tdserve.structure.tensors.torch_types import view_bytes
from tdserve.structure.trees.tree import Spec
from tdserve.structure.trees.version_subset import encode_numbers
from tdserve.transport.pool import BufferPool
from tdserve.v1 import control_pb2
from tests.processes import wait_for

LARGE = MIN_COMPARED_BYTES // 4 + 1


def tree(number: float = 1.0) -> TensorDict:
    """A large leaf that stays, and one that says which version it is of."""
    return TensorDict({"base": torch.arange(LARGE, dtype=torch.float32), "head": torch.full((5,), float(number))}, [])


SPEC = capture(tree()).spec


def moved_nbytes(client: tdserve.Client) -> int:
    """What the server has sent over gloo, inline, or both."""
    counts = client.stats()["transports"]
    return sum(counts[name]["bytes_out"] for name in ("gloo", "inline") if name in counts)


# ------------------------------------------------------------ what is remembered


def test_find_when_a_tensordict_was_returned_then_it_is_known_for_as_long_as_the_user_has_it() -> None:
    held, td = HeldVersions(), tree()
    assert held.find_last("w", has_place=False) == 0
    held.keep("w", 3, SPEC, destination=None, td=td)
    found = held.find("w", None)
    assert found is not None
    assert found.version == held.find_last("w", has_place=False) == 3
    assert held.find_last("w", has_place=True) == 0
    del td, found
    gc.collect()
    assert held.find("w", None) is None
    assert held.find_last("w", has_place=False) == 0


@pytest.mark.parametrize("kind", ["out", "into"])
def test_find_when_a_place_was_filled_then_it_is_known_by_its_memory(kind: str) -> None:
    module = nn.Linear(1024, 300)
    td = TensorDict.from_module(module).data
    held, spec = HeldVersions(), capture(td).spec

    def place() -> Destination:
        return Destination(td, store="w") if kind == "out" else ModuleDestination(module, store="w")

    held.keep("w", 3, spec, destination=place(), td=None)
    found = held.find("w", place())
    assert found is not None
    assert found.version == held.find_last("w", has_place=True) == 3
    assert held.find_last("w", has_place=False) == 0
    assert held.find("w", Destination(td.clone(), store="w")) is None
    assert held.find("w", None) is None
    assert held.find("v", place()) is None


def test_find_when_the_user_has_changed_the_structure_then_nothing_is_held() -> None:
    held, td = HeldVersions(), tree()
    held.keep("w", 3, SPEC, destination=None, td=td)
    td["more"] = torch.ones(1)
    assert held.find("w", None) is None
    held.keep("w", 3, SPEC, destination=Destination(tree(), store="w"), td=None)
    assert held.find("w", Destination(td, store="w")) is None


def test_find_when_versions_of_several_structures_were_put_then_each_place_is_known() -> None:
    held, narrow, wide = HeldVersions(), tree(), tree()
    wide["more"] = torch.ones(1)
    for version, td in ((3, narrow), (4, wide)):
        held.keep("w", version, capture(td).spec, destination=Destination(td, store="w"), td=None)
    found = [held.find("w", Destination(td, store="w")) for td in (narrow, wide)]
    assert [each.version for each in found if each is not None] == [3, 4]


def test_keep_when_small_then_forgotten_and_of_many_places_only_the_last() -> None:
    held = HeldVersions()
    small = TensorDict({"a": torch.ones(3)}, [])
    held.keep("w", 1, capture(small).spec, destination=None, td=small)
    assert held.find_last("w", has_place=False) == 0
    places = [tree() for _ in range(MAX_PLACES + 1)]
    for version, place in enumerate(places):
        held.keep("w", version, SPEC, destination=Destination(place, store="w"), td=None)
    found = [held.find("w", Destination(place, store="w")) for place in places]
    assert [each and each.version for each in found] == [None, *range(1, MAX_PLACES + 1)]


# ------------------------------------------------------------ what is made of it


def accepted(*checksums: int, numbers: list[int] | None = None) -> control_pb2.Accepted:
    return control_pb2.Accepted(
        unchanged=encode_numbers([0] if numbers is None else numbers),
        checksums=np.array(checksums, np.uint64).tobytes(),
    )


def held_of(td: TensorDict) -> Any:
    held = HeldVersions()
    held.keep("w", 3, SPEC, destination=None, td=td)
    return held.find("w", None)


def test_rest_when_the_leaf_is_what_it_was_then_copied_and_the_users_own_stays_his() -> None:
    td = tree()
    rest = PartialVersion(SPEC, accepted(compute_leaf_checksum(view_bytes(td["base"]).numpy())), held_of(td), None)
    assert [slot.path for slot in rest.layout.slots[: rest.layout.num_leaves]] == [("head",)]
    assert rest.into is None
    leaves, stale = rest.merge({("head",): torch.zeros(5)}, BufferPool())
    assert stale == []
    assert torch.equal(leaves["base",], td["base"])
    leaves["base",].zero_()
    assert td["base"].any()
    assert not leaves["head",].any()


def test_rest_when_the_user_has_changed_the_leaf_then_it_is_stale() -> None:
    td = tree()
    checksum = compute_leaf_checksum(view_bytes(td["base"]).numpy())
    td["base"][LARGE // 2] += 1
    assert PartialVersion(SPEC, accepted(checksum), held_of(td), None).merge({}, BufferPool())[1] == [0]


@pytest.mark.parametrize("place", ["fits", "is strided", "none"])
def test_rest_when_nothing_is_held_after_all_then_every_leaf_is_to_be_fetched(place: str) -> None:
    out = tree()
    if place == "is strided":
        out["base"] = torch.zeros(2 * LARGE)[::2]
    destination = None if place == "none" else Destination(out, store="w")
    rest = PartialVersion(SPEC, accepted(compute_leaf_checksum(view_bytes(tree()["base"]).numpy())), None, destination)
    assert (rest.into is not None) == (place == "fits")
    leaves, stale = rest.merge({("head",): torch.zeros(5)}, BufferPool())
    assert stale == [0]
    assert (leaves["base",].data_ptr() == out["base"].data_ptr()) == (place == "fits")


@pytest.mark.parametrize("said", [accepted(), accepted(1, 2), accepted(1, numbers=[7])])
def test_rest_when_the_answer_contradicts_itself_then_remote_protocol_error(said: control_pb2.Accepted) -> None:
    with pytest.raises(RemoteProtocolError):
        PartialVersion(SPEC, said, None, None)


# ------------------------------------------------------------ together


class Puller:
    """Pulls one store in one way, again and again."""

    def __init__(self, client: tdserve.Client, name: str, way: str) -> None:
        self.client, self.name = client, name
        self.place: dict[str, Any] = {"out": {"out": tree(0)}, "returned": {}}[way]
        self.last: TensorDict = tree(0)

    def pull(self) -> int:
        """Bytes that were moved for it."""
        before = moved_nbytes(self.client)
        found = self.client.latest(self.name, **self.place)
        assert found is not None
        self.last = found.data
        # Counted when the client has it, or a moment later.
        return wait_for(lambda: moved_nbytes(self.client) - before or None, "the count of what was moved")


@pytest.mark.slow
@pytest.mark.parametrize("way", ["out", "returned"])
def test_latest_when_the_large_leaf_stays_then_it_stops_travelling_and_comes_again_when_it_was_changed(
    remote_client: tdserve.Client, name: str, way: str
) -> None:
    numbers = iter(range(1, 1000))
    puller = Puller(remote_client, name, way)

    def step() -> int:
        number = float(next(numbers))
        remote_client.publish(name, tree(number))
        nbytes = puller.pull()
        assert (puller.last == tree(number)).all()
        return nbytes

    assert step() >= MIN_COMPARED_BYTES
    wait_for(lambda: step() < MIN_COMPARED_BYTES / 100 or None, "a pull of what has changed")
    puller.last["base"][7] = -1.0
    wait_for(lambda: step() < MIN_COMPARED_BYTES / 100 or None, "a pull of what has changed")
    assert len(puller.last["head"]) == 5


@pytest.mark.slow
def test_latest_when_the_place_is_another_each_time_then_it_is_filled_all_the_same(
    remote_client: tdserve.Client, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    unknown = []

    def make_rest(
        spec: Spec, accepted: control_pb2.Accepted, held: HeldVersion | None, destination: Any
    ) -> PartialVersion:
        unknown.append(held is None)
        return PartialVersion(spec, accepted, held, destination)

    monkeypatch.setattr(pulls, "PartialVersion", make_rest)
    numbers = iter(range(1, 1000))
    outs: list[TensorDict] = []  # one that is gone would leave its addresses to the next

    def step() -> bool:
        number = float(next(numbers))
        remote_client.publish(name, tree(number))
        out = tree(0) if number % 2 else TensorDict({"base": torch.zeros(LARGE, 2)[:, 0], "head": torch.zeros(5)}, [])
        outs.append(out)
        remote_client.latest(name, out=out)
        assert (out == tree(number)).all()
        return len(unknown) > 2

    wait_for(lambda: step() or None, "a few pulls of what has changed")
    assert all(unknown)
    remote_client.publish(name, TensorDict({"base": torch.zeros(LARGE), "more": torch.zeros(5)}, []))
    with pytest.raises(SpecMismatchError):
        remote_client.latest(name, out=tree(0))


@pytest.mark.slow
def test_latest_when_a_leaf_is_stale_and_its_version_is_gone_then_all_of_the_newest(
    remote_client: tdserve.Client, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    puller = Puller(remote_client, name, "out")
    remote_client.publish(name, tree(1), keep=1)
    puller.pull()
    merge = PartialVersion.merge
    merged = []

    def too_late(rest: PartialVersion, *arguments: Any) -> Any:
        merged.append(rest)
        leaves, _ = merge(rest, *arguments)
        remote_client.publish(name, tree(1000 + len(merged)))
        return leaves, [0]

    monkeypatch.setattr(PartialVersion, "merge", too_late)

    def step() -> bool:
        remote_client.publish(name, tree(2))
        puller.pull()
        return bool(merged)

    wait_for(lambda: step() or None, "a pull of what has changed")
    assert len(merged) == 1
    assert (puller.last == tree(1001)).all()


@pytest.mark.slow
def test_latest_when_a_leaf_is_stale_and_another_store_has_the_name_by_then_then_all_of_that_one(
    remote_client: tdserve.Client, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    puller = Puller(remote_client, name, "out")
    remote_client.publish(name, tree(1), keep=1)
    puller.pull()
    other = tree(1000)
    other["base"] = torch.zeros(LARGE)
    merge = PartialVersion.merge
    merged = []

    def too_late(rest: PartialVersion, *arguments: Any) -> Any:
        merged.append(rest)
        leaves, _ = merge(rest, *arguments)
        last = remote_client.describe(name).version
        remote_client.delete(name)
        while remote_client.publish(name, other) < last:
            pass
        return leaves, [0]

    monkeypatch.setattr(PartialVersion, "merge", too_late)

    def step() -> bool:
        remote_client.publish(name, tree(2))
        puller.pull()
        return bool(merged)

    wait_for(lambda: step() or None, "a pull of what has changed")
    assert len(merged) == 1
    assert (puller.last == other).all()
