from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from tdserve.base.errors import KeyNotFoundError, WrongStateError
from tdserve.rules.replay.samplers.slices import Slices
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.server.open_store.worker_spec_cache import WorkerSpecCache
from tdserve.structure.trees import codec
from tests.unit.server.replaying import create
from tests.unit.server.world import Loop, World

TD = TensorDict({"a": torch.zeros(4, 2)}, [4])


@pytest.fixture
def store(world: World, run: Loop) -> OpenedStore:
    """A tensordict store."""
    return run(world.create("x", TD))


@pytest.mark.slow
def test_ref_when_a_worker_meets_the_spec_first_then_it_goes_along_once(store: OpenedStore) -> None:
    known = WorkerSpecCache(lambda: None)
    first, second = store.make_ref(known), store.make_ref(known)
    assert codec.decode(first.spec) == store.spec
    assert not second.HasField("spec")
    assert first.uid == second.uid == store.record.uid
    assert first.folder == str(store.folder)


def test_rules_when_of_another_kind_then_error_names_store_and_kind(store: OpenedStore) -> None:
    with pytest.raises(WrongStateError, match="store 'x' is a tensordict store"):
        store.get_table()
    with pytest.raises(WrongStateError, match="weights"):
        store.get_versions()


def test_content_version_when_writes_are_applied_then_counts_them(store: OpenedStore) -> None:
    assert store.content_version == 0
    assert store.generations is not None
    store.generations.values[-1] = 6
    assert store.content_version == 3


def test_numbers_when_of_a_key_then_of_all_leaves_at_or_below_it(world: World, run: Loop) -> None:
    store = create(world, run)
    every = store.find_numbers(())
    assert sorted(every) == [0, 1, 2]
    assert store.find_numbers(("n",)) == store.find_numbers(("n", "w"))
    assert sorted([*store.find_numbers(("a",)), *store.find_numbers(("g",)), *store.find_numbers(("n",))]) == [0, 1, 2]
    for missing in (("no",), ("n", "no"), ("a", "b")):
        with pytest.raises(KeyNotFoundError):
            store.find_numbers(missing)


def test_rule_keys_when_the_sampler_or_groups_look_at_leaves_then_each_once(
    world: World, run: Loop, store: OpenedStore
) -> None:
    replay = create(world, run, sampler=Slices(slice_len=2, trajectory_key="g"))
    replay.group_keys.extend([("a",), ("g",)])
    assert replay.rule_keys == (("g",), ("a",))
    assert store.rule_keys == ()
