from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from tdserve.server.opened_store import OpenedStore
from tdserve.server.staging_names import StagingNames, make_values_path
from tests.unit.server.world import Loop, World


@pytest.fixture
def entry(world: World, run: Loop) -> OpenedStore:
    """A store."""
    return run(world.create("x", TensorDict({"a": torch.zeros(4)}, [4])))


def test_borrow_when_another_has_a_name_then_differs_and_it_is_used_again(entry: OpenedStore) -> None:
    names = StagingNames()
    with names.borrow(entry, is_needed=True) as first:
        with names.borrow(entry, is_needed=True) as second:
            assert first != second
        with names.borrow(entry, is_needed=True) as third:
            assert third == second
    assert first.startswith(str(entry.folder / "staging"))


def test_borrow_when_it_fails_inside_then_the_name_is_free(entry: OpenedStore) -> None:
    names = StagingNames()
    with pytest.raises(KeyError), names.borrow(entry, is_needed=True) as first:
        raise KeyError
    with names.borrow(entry, is_needed=True) as second:
        assert second == first


def test_borrow_when_of_another_kind_then_differs(entry: OpenedStore) -> None:
    names, others = StagingNames(), StagingNames("extend-")
    with names.borrow(entry, is_needed=True) as first, others.borrow(entry, is_needed=True) as second:
        assert make_values_path(first) != make_values_path(second)


def test_borrow_when_none_is_needed_then_none_and_no_values_file(entry: OpenedStore) -> None:
    with StagingNames().borrow(entry, is_needed=False) as name:
        assert (name, make_values_path(name)) == ("", "")
