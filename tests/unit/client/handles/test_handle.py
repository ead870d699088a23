from __future__ import annotations

import pytest
import torch

import tdserve
from tdserve.base.errors import KeyNotFoundError, SelectionError, SpecMismatchError
from tests.unit.client.three_rows import local


def test_handle_when_looked_at_then_as_the_tensordict(handle: tdserve.StoreHandle) -> None:
    td = local()
    assert (handle.batch_size, handle.ndim, len(handle)) == (td.batch_size, td.ndim, len(td))
    assert (handle.names, handle.device) == (td.names, td.device)
    assert handle.keys(True, True) == list(td.keys(True, True))
    assert "a" in handle
    assert ("n", "c") in handle
    assert "c" not in handle
    assert handle.name in repr(handle)


def test_get_when_the_key_is_unknown_then_default_or_error(handle: tdserve.StoreHandle) -> None:
    assert handle.get("z") is None
    assert handle.get("z", 5) == 5
    with pytest.raises(KeyNotFoundError) as raised:
        handle["z"]
    assert (raised.value.store, raised.value.key) == (handle.name, "z")
    assert handle["n", "t"] == "text"


def test_set_when_rows_of_a_leaf_then_only_those(handle: tdserve.StoreHandle) -> None:
    td = local()
    for each in (handle, td):
        each.set_at_("a", torch.full((2,), 9.0), 1)
        each["n", "c"] = torch.tensor([5, 6, 7])
    assert bool((handle.to_tensordict().exclude(("n", "t")) == td.exclude(("n", "t"))).all())
    assert handle[0:2].names == td[0:2].names


def test_update_when_of_some_leaves_then_the_others_stay(handle: tdserve.StoreHandle) -> None:
    handle.update_({"n": {"c": torch.tensor([7, 8, 9])}})
    handle.update_at_({"a": torch.zeros(2)}, -1)
    assert handle["n", "c"].tolist() == [7, 8, 9]
    assert handle["a"].tolist() == [[0.0, 1.0], [2.0, 3.0], [0.0, 0.0]]


def test_write_when_it_does_not_fit_then_refused_and_nothing_changes(handle: tdserve.StoreHandle) -> None:
    with pytest.raises(SpecMismatchError):
        handle["a"] = torch.zeros(4, 2)
    with pytest.raises(SelectionError):
        handle[3] = local()[0]
    assert torch.equal(handle["a"], local()["a"])
