"""tdserve/client/session/catalog/structure_leaves.py: a spec as a list of its keys."""

from __future__ import annotations

from tdserve.client.session.catalog.structure_leaves import describe_leaves, describe_spec
from tdserve.structure.trees.nodes import Form, Node, Ragged, TensorLeaf, ValueLeaf
from tdserve.structure.trees.tree import Spec

OBS = TensorLeaf("float32", (10, 84))
NEXT = Node((10,), None, None, None, (("obs", OBS), ("text", ValueLeaf((10,), per_row=True))))
SPEC = Spec(Node((10,), None, None, None, (("next", NEXT), ("flag", ValueLeaf((10,), per_row=False)), ("done", OBS))))


def test_leaves_when_described_then_have_key_type_shape_and_bytes() -> None:
    assert set(describe_leaves(SPEC)) == {
        ("next", "tensordict", (10,), None),
        (("next", "obs"), "float32", (10, 84), 3360),
        (("next", "text"), "value per row", (10,), None),
        ("flag", "value", (10,), None),
        ("done", "float32", (10, 84), 3360),
    }


def test_leaves_when_leaves_only_then_the_keys_are_those_of_the_spec() -> None:
    described = describe_leaves(SPEC, leaves_only=True, sort=True)
    assert [leaf.key for leaf in described] == SPEC.keys(include_nested=True, leaves_only=True, sort=True)


def test_leaves_when_node_is_a_tensorclass_then_type_is_its_name() -> None:
    spec = Spec(Node((), None, None, None, (("agent", Node((), None, None, "game.Agent", ())),)))
    assert [leaf.type for leaf in describe_leaves(spec)] == ["game.Agent"]


def test_leaves_when_rows_differ_then_their_sizes_are_minus_one() -> None:
    tokens = ValueLeaf((10,), True, Ragged(Form.JAGGED, "int64", (-1, 2)))
    spec = Spec(Node((10,), None, None, None, (("t", tokens), ("h", Node((10,), None, None, None, (), inner=(-1,))))))
    assert set(describe_leaves(spec)) == {("t", "int64", (10, -1, 2), None), ("h", "tensordict", (10, -1), None)}


def test_spec_when_described_then_json_has_every_fact_and_nested_keys_are_lists() -> None:
    assert describe_spec(Spec(Node((), None, None, None, (("a", TensorLeaf("int64", ())),)))) == {
        "batch_size": [],
        "keys": [{"key": "a", "type": "int64", "shape": [], "nbytes": 8}],
    }
    assert ["next", "obs"] in [leaf["key"] for leaf in describe_spec(SPEC)["keys"]]
