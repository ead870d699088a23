from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from tdserve.server.catalog.catalog_requests import CatalogRequests
from tdserve.server.execution.admission_budget import AdmissionBudget
from tdserve.v1 import control_pb2
from tests.unit.server.world import Loop, World

TD = TensorDict({"b": torch.zeros(4, 2), "a": {"c": torch.zeros(4)}, "shape": torch.zeros(4)}, [4])


def make_requests(world: World) -> CatalogRequests:
    return CatalogRequests(world.stores, AdmissionBudget(1 << 20))


@pytest.mark.parametrize("include_nested", [False, True])
@pytest.mark.parametrize("leaves_only", [False, True])
@pytest.mark.parametrize("sort", [False, True])
def test_list_keys_when_asked_then_as_tensordict_lists_them(
    world: World, run: Loop, include_nested: bool, leaves_only: bool, sort: bool
) -> None:
    run(world.create("x", TD))
    asked = control_pb2.ListKeysRequest(name="x", include_nested=include_nested, leaves_only=leaves_only, sort=sort)
    answer = run(make_requests(world).list_keys(asked))
    found = [tuple(path.parts) for path in answer.paths] or [(key,) for key in answer.keys]
    expected = list(TD.keys(include_nested, leaves_only, sort=sort))
    assert found == [(key,) if isinstance(key, str) else key for key in expected]


def test_list_stores_when_paged_then_every_name_once(world: World, run: Loop) -> None:
    for name in ("b", "a1", "a2", "c"):
        run(world.create(name, TD[:1]))
    requests = make_requests(world)
    first = requests.list_stores(control_pb2.ListStoresRequest(page_size=3))
    assert list(first.names) == ["a1", "a2", "b"]
    rest = requests.list_stores(control_pb2.ListStoresRequest(page_size=3, page_token=first.next_page_token))
    assert (list(rest.names), rest.next_page_token) == (["c"], "")
    assert list(requests.list_stores(control_pb2.ListStoresRequest(prefix="a")).names) == ["a1", "a2"]
