from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.server.open_store.staging_names import StagingNames, make_values_path
from tests.unit.server.world import Loop, World


@pytest.fixture
def store(world: World, run: Loop) -> OpenedStore:
    """A store."""
    return run(world.create("x", TensorDict({"a": torch.zeros(4)}, [4])))


def test_borrow_when_another_has_a_name_then_differs_and_it_is_used_again(store: OpenedStore) -> None:
    names = StagingNames()
    with names.borrow(store, is_needed=True) as first:
        with names.borrow(store, is_needed=True) as second:
            assert first != second
        with names.borrow(store, is_needed=True) as third:
            assert third == second
    assert first.startswith(str(store.folder / "staging"))


def test_borrow_when_it_fails_inside_then_the_name_is_free(store: OpenedStore) -> None:
    names = StagingNames()
    with pytest.raises(KeyError), names.borrow(store, is_needed=True) as first:
        raise KeyError
    with names.borrow(store, is_needed=True) as second:
        assert second == first


def test_borrow_when_of_another_kind_then_differs(store: OpenedStore) -> None:
    names, others = StagingNames(), StagingNames("extend-")
    with names.borrow(store, is_needed=True) as first, others.borrow(store, is_needed=True) as second:
        assert make_values_path(first) != make_values_path(second)


def test_borrow_when_none_is_needed_then_none_and_no_values_file(store: OpenedStore) -> None:
    with StagingNames().borrow(store, is_needed=False) as name:
        assert (name, make_values_path(name)) == ("", "")
