from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from tdserve.server.descriptions import describe, list_keys, list_stores
from tdserve.structure import codec
from tdserve.v1 import control_pb2
from tests.unit.server.world import Loop, World

TD = TensorDict({"b": torch.zeros(4, 2), "a": {"c": torch.zeros(4)}, "shape": torch.zeros(4)}, [4])


def test_describe_when_a_tensordict_then_its_figures(world: World, run: Loop) -> None:
    entry = run(world.create("x", TD))
    found = describe(world.stores, entry)
    assert codec.decode(found.spec) == entry.spec
    assert (found.name, found.num_rows, found.nbytes, found.version) == ("x", 4, 64, 0)
    assert list(found.extra) == ["shape"]
    assert (world.root.path / found.path / "rows").is_dir()
    assert not describe(world.stores, entry, with_spec=False).HasField("spec")


def test_describe_when_a_replay_then_of_one_row_and_its_counts(world: World, run: Loop) -> None:
    entry = run(world.create_replay("r", TD[0].exclude("shape"), 10, min_size=3))
    table = entry.get_table()
    first, second = table.reserve(4), table.reserve(2)
    assert first is not None
    assert second is not None
    table.commit(first)
    found = describe(world.stores, entry)
    assert codec.decode(found.spec).batch_size == ()
    assert (found.capacity, found.num_rows, found.inserts, found.samples) == (10, 4, 4, 0)
    assert (found.reserved_rows, found.min_size) == (2, 3)


@pytest.mark.parametrize("include_nested", [False, True])
@pytest.mark.parametrize("leaves_only", [False, True])
@pytest.mark.parametrize("sort", [False, True])
def test_list_keys_when_asked_then_as_tensordict_lists_them(
    world: World, run: Loop, include_nested: bool, leaves_only: bool, sort: bool
) -> None:
    run(world.create("x", TD))
    asked = control_pb2.ListKeysRequest(name="x", include_nested=include_nested, leaves_only=leaves_only, sort=sort)
    answer = run(list_keys(world.stores, asked))
    found = [tuple(path.parts) for path in answer.paths] or [(key,) for key in answer.keys]
    expected = list(TD.keys(include_nested, leaves_only, sort=sort))
    assert found == [(key,) if isinstance(key, str) else key for key in expected]


def test_list_stores_when_paged_then_every_name_once(world: World, run: Loop) -> None:
    for name in ("b", "a1", "a2", "c"):
        run(world.create(name, TD[:1]))
    first = list_stores(world.stores, control_pb2.ListStoresRequest(page_size=3))
    assert list(first.names) == ["a1", "a2", "b"]
    rest = list_stores(world.stores, control_pb2.ListStoresRequest(page_size=3, page_token=first.next_page_token))
    assert (list(rest.names), rest.next_page_token) == (["c"], "")
    assert list(list_stores(world.stores, control_pb2.ListStoresRequest(prefix="a")).names) == ["a1", "a2"]
