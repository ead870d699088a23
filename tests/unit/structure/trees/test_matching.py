"""The parts of a structure that count when it is matched; for ``check_matches`` of whole specs see ``test_tree``."""

from __future__ import annotations

import pytest

from tdserve.base.errors import SpecMismatchError
from tdserve.structure.trees.matching import check_node, describe, is_compatible, quote, show
from tdserve.structure.trees.nodes import PACKED, Form, Node, Ragged, TensorLeaf, ValueLeaf

LEAF = TensorLeaf("float32", (2, 3))
RAGGED = ValueLeaf((2,), True, Ragged(Form.STACK, "int64", (-1,)))
INNER = Node((2,), None, None, None, ())
NODE = Node((2,), None, None, None, (("a", LEAF), ("n", INNER)))


def test_check_node_when_only_locks_differ_then_accepts() -> None:
    locked = NODE._replace(is_locked=True, entries=(("a", LEAF), ("n", INNER._replace(is_locked=True))))
    check_node(NODE, locked, (), "s")
    check_node(locked, NODE, (), "s")


def test_check_node_when_a_nested_leaf_differs_then_names_it_from_where_the_node_is() -> None:
    other = NODE._replace(entries=(("a", TensorLeaf("int64", (2, 3))), ("n", INNER)))
    with pytest.raises(SpecMismatchError) as caught:
        check_node(NODE, other, ("x",), "s")
    assert (caught.value.key, caught.value.expected, caught.value.actual) == (
        "('x', 'a')",
        "float32[2, 3]",
        (
            "int64[2, 3], of which float32 does not hold all values: convert it first, as by .to(torch.float32), "
            "or .astype('float32') of an array"
        ),
    )


def test_fits_when_sizes_are_free_then_any() -> None:
    assert is_compatible(RAGGED, RAGGED._replace(ragged=Ragged(Form.STACK, "int64", (7,))))
    assert not is_compatible(RAGGED._replace(ragged=Ragged(Form.STACK, "int64", (7,))), RAGGED)
    assert not is_compatible(RAGGED, RAGGED._replace(ragged=PACKED))
    assert not is_compatible(RAGGED, LEAF)


def test_describe_when_asked_then_has_kind_dtype_and_shape_of_a_key() -> None:
    assert describe(LEAF) == "float32[2, 3]"
    assert describe(RAGGED) == "ragged int64[2, -1]"
    assert describe(ValueLeaf((2,), False)) == "non-tensor[2]"
    assert describe(ValueLeaf((2,), True, PACKED)) == "entries of any kind[2]"
    assert describe(NODE) == "TensorDict[2]"
    assert describe(NODE._replace(tensorclass="m.C")) == "m.C[2]"


def test_show_and_quote_when_the_path_is_nested_then_its_tuple() -> None:
    assert (show(("a",)), quote(("a",))) == ("a", "'a'")
    assert show(("a", "b")) == quote(("a", "b")) == "('a', 'b')"
