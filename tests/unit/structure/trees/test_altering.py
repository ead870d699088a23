from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from tdserve.base.errors import (
    InvalidRequestError,
    KeyExistsError,
    KeyNotFoundError,
    NotSupportedError,
    SpecMismatchError,
    StructureChangedError,
)
from tdserve.structure.captures.capture import capture
from tdserve.structure.trees.altering import Alteration, Renaming
from tdserve.structure.trees.tree import Path, Spec
from tests.errors import raises

TD = TensorDict({"a": torch.zeros(3), "n": {"b": torch.zeros(3, 2), "t": "text"}}, [3], names=["row"])


def spec_of(**entries: object) -> Spec:
    """Structure of three rows."""
    return capture(TensorDict(entries, [3])).spec


def keys_of(spec: Spec) -> list[str | Path]:
    """Returns all keys, nested ones too."""
    return spec.keys(include_nested=True)


def test_apply_when_keys_are_added_then_behind_those_that_are_there() -> None:
    added = spec_of(z=torch.zeros(3), n={"c": torch.zeros(3, dtype=torch.int64)}, m={"d": torch.zeros(3)})
    altered = Alteration(added=added).apply(capture(TD).spec)
    expected = TD.copy()
    for key in ("z", ("n", "c"), ("m", "d")):
        expected[key] = torch.zeros(3)
    assert keys_of(altered.spec) == [path[0] if len(path) == 1 else path for path in map(_path, expected.keys(True))]
    assert altered.spec.root.names == ("row",)
    assert altered.origins == {
        ("a",): ("a",),
        ("n", "b"): ("n", "b"),
        ("n", "t"): ("n", "t"),
        ("z",): None,
        ("n", "c"): None,
        ("m", "d"): None,
    }


def _path(key: str | Path) -> Path:
    return (key,) if isinstance(key, str) else key


def test_apply_when_a_key_is_there_already_then_refused_unless_it_is_replaced() -> None:
    added = spec_of(n={"b": torch.zeros(3, dtype=torch.int64)})
    with pytest.raises(StructureChangedError) as raised:
        Alteration(added=added).apply(capture(TD).spec, store="x")
    assert (raised.value.store, raised.value.key) == ("x", "('n', 'b')")
    altered = Alteration(added=added, replaces=frozenset([("n", "b")])).apply(capture(TD).spec)
    assert altered.spec.find(("n", "b")) == added.find(("n", "b"))
    assert keys_of(altered.spec) == keys_of(capture(TD).spec)
    assert altered.origins["n", "b"] is None
    assert altered.origins["n", "t"] == ("n", "t")


@pytest.mark.parametrize("path", [(), ("x",), ("n", "z")], ids=str)
def test_add_when_what_it_replaces_is_not_added_then_refused(path: tuple[str, ...]) -> None:
    with raises(InvalidRequestError, argument="replaces"):
        Alteration(added=spec_of(fresh=torch.zeros(3)), replaces=frozenset([path])).apply(capture(TD).spec)


def test_apply_when_a_node_is_replaced_by_a_leaf_then_nothing_below_is_left() -> None:
    altered = Alteration(added=spec_of(n=torch.zeros(3)), replaces=frozenset([("n",)])).apply(capture(TD).spec)
    assert keys_of(altered.spec) == ["a", "n"]
    assert altered.origins == {("a",): ("a",), ("n",): None}


def test_apply_when_a_nodes_last_key_is_removed_then_the_node_stays() -> None:
    altered = Alteration(removed=(("n", "b"), ("n", "t"))).apply(capture(TD).spec)
    assert keys_of(altered.spec) == ["a", "n"]
    assert altered.origins == {("a",): ("a",)}


@pytest.mark.parametrize("path", [("z",), ("n", "z"), ("a", "z"), ()])
def test_apply_when_there_is_nothing_to_remove_then_its_key_is_named(path: Path) -> None:
    with pytest.raises(KeyNotFoundError):
        Alteration(removed=(path,)).apply(capture(TD).spec, store="x")


def test_apply_when_keys_are_renamed_then_leaves_have_their_origins() -> None:
    renamed = (Renaming(("n",), ("m",)), Renaming(("a",), ("m", "k", "a")))
    altered = Alteration(renamed=renamed).apply(capture(TD).spec)
    assert keys_of(altered.spec) == [("m", "b"), ("m", "t"), ("m", "k", "a"), ("m", "k"), "m"]
    assert altered.origins == {("m", "b"): ("n", "b"), ("m", "t"): ("n", "t"), ("m", "k", "a"): ("a",)}


def test_apply_when_two_keys_change_places_then_each_is_from_the_other() -> None:
    spec = spec_of(a=torch.zeros(3), b=torch.zeros(3, 2))
    steps = (Renaming(("a",), ("c",)), Renaming(("b",), ("a",)), Renaming(("c",), ("b",)))
    altered = Alteration(renamed=steps).apply(spec)
    assert altered.origins == {("a",): ("b",), ("b",): ("a",)}
    assert altered.spec.find(("a",)) == spec.find(("b",))


def test_apply_when_the_new_key_exists_then_replaced_or_if_safe_refused() -> None:
    altered = Alteration(renamed=(Renaming(("a",), ("n",)),)).apply(capture(TD).spec)
    assert altered.origins == {("n",): ("a",)}
    with raises(KeyExistsError, key="n"):
        Alteration(renamed=(Renaming(("a",), ("n",), is_safe=True),)).apply(capture(TD).spec)
    same = Alteration(renamed=(Renaming(("a",), ("a",), is_safe=True),)).apply(capture(TD).spec)
    assert same.spec == capture(TD).spec


@pytest.mark.parametrize(("old", "new"), [(("n",), ("n", "b")), (("n", "b"), ("n",))])
def test_apply_when_a_key_would_lie_in_itself_then_refused(old: Path, new: Path) -> None:
    with pytest.raises(InvalidRequestError):
        Alteration(renamed=(Renaming(old, new),)).apply(capture(TD).spec)


def test_apply_when_the_batch_size_is_another_then_refused() -> None:
    with pytest.raises(SpecMismatchError, match="batch size"):
        Alteration(added=capture(TensorDict({"z": torch.zeros(4)}, [4])).spec).apply(capture(TD).spec)
    wide = TensorDict({"a": torch.zeros(3), "n": TensorDict({"b": torch.zeros(3, 2)}, [3, 2])}, [3])
    with pytest.raises(SpecMismatchError, match="in front"):
        Alteration(renamed=(Renaming(("a",), ("n", "a")),)).apply(capture(wide).spec)
    with pytest.raises(SpecMismatchError):
        Alteration(added=spec_of(n={"c": torch.zeros(3)})).apply(capture(wide).spec)


def test_apply_when_rows_differ_in_structure_then_not_supported() -> None:
    rows = [TensorDict({"a": torch.zeros(2)}), TensorDict({"b": torch.zeros(3)}), TensorDict({})]
    with pytest.raises(NotSupportedError, match="differ"):
        Alteration(added=spec_of(z=torch.zeros(3))).apply(capture(TensorDict.lazy_stack(rows)).spec)
