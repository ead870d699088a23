from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from tdserve.server.recovery.restructured import Restructured
from tdserve.structure.captures.capture import capture
from tdserve.structure.trees.altering import Alteration, Renaming
from tests.unit.server.world import World

UID = "0" * 32
TD = TensorDict({"a": torch.zeros(3), "s": "s", "n": {"t": "t"}, "u": "u"}, [3])
ADDED = capture(TensorDict({"v": "v"}, [3])).spec


@pytest.fixture
def restructured() -> Restructured:
    """A change of structure: one value is added, two move, one is removed, and one stays."""
    old = capture(TD).spec
    steps = (Renaming(("s",), ("n", "s")), Renaming(("n", "t"), ("s",)))
    altered = Alteration(removed=(("u",),), renamed=steps, added=ADDED).apply(old)
    return Restructured.from_change(UID, "altering-1", old, altered.spec, altered.origins, ADDED)


def test_of_when_values_move_then_they_wait_under_unused_keys(restructured: Restructured) -> None:
    wait = "altering-1"
    assert set(restructured.kept_values) == {(("s",), (wait, "n", "s")), (("n", "t"), (wait, "s"))}
    assert set(restructured.moved_values) == {
        ((wait, "n", "s"), ("n", "s")),
        ((wait, "s"), ("s",)),
        ((wait, "v"), ("v",)),
    }
    assert set(restructured.cleared_values) == {(wait, "n", "s"), (wait, "s"), (wait, "v"), ("n", "t"), ("u",)}


def test_load_when_on_record_then_what_is_left_to_do(world: World, restructured: Restructured) -> None:
    assert Restructured.load(world.db) == []
    world.db.put("pending", restructured.key, restructured.to_bytes())
    (found,) = Restructured.load(world.db)
    assert (found.uid, found.folder, found.files) == (UID, "altering-1", restructured.files)
    assert found.moved_values == restructured.moved_values
    assert found.cleared_values == restructured.cleared_values
