from __future__ import annotations

import torch
from tensordict import TensorDict

from tdserve.server.catalog.descriptions import describe
from tdserve.structure.trees import codec
from tests.unit.server.world import Loop, World

TD = TensorDict({"b": torch.zeros(4, 2), "a": {"c": torch.zeros(4)}, "shape": torch.zeros(4)}, [4])


def test_describe_when_a_tensordict_then_its_figures(world: World, run: Loop) -> None:
    store = run(world.create("x", TD))
    found = describe(world.stores, store)
    assert codec.decode(found.spec) == store.spec
    assert (found.name, found.num_rows, found.nbytes, found.version) == ("x", 4, 64, 0)
    assert list(found.extra) == ["shape"]
    assert (world.root.path / found.path / "rows").is_dir()
    assert not describe(world.stores, store, with_spec=False).HasField("spec")


def test_describe_when_a_replay_then_of_one_row_and_its_counts(world: World, run: Loop) -> None:
    store = run(world.create_replay("r", TD[0].exclude("shape"), 10, min_size=3))
    table = store.get_table()
    first, second = table.arrivals.reserve(4), table.arrivals.reserve(2)
    assert first is not None
    assert second is not None
    table.arrivals.commit(first)
    found = describe(world.stores, store)
    assert codec.decode(found.spec).batch_size == ()
    assert (found.capacity, found.num_rows, found.inserts, found.samples) == (10, 4, 4, 0)
    assert (found.reserved_rows, found.min_size) == (2, 3)
