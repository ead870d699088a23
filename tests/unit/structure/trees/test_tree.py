from __future__ import annotations

import gc
import pickle
import subprocess
import sys
import weakref
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from tensordict import TensorDict

from tdserve.base.errors import InvalidSpecError, KeyNotFoundError, SpecMismatchError
from tdserve.structure.captures.capture import capture
from tdserve.structure.trees.nodes import PACKED, Form, Ragged
from tdserve.structure.trees.tree import Node, Spec, TensorLeaf, ValueLeaf, check_matches
from tests.tensordict_strategies import tensordicts

INNER = Node((3, 2), ("t", None), None, None, (("y", TensorLeaf("int64", (3, 2))), ("v", ValueLeaf((3, 2), True))))
ENTRIES = (("z", TensorLeaf("float32", (3, 4))), ("n", INNER), ("a", ValueLeaf((3,), False)))
SPEC = Spec(Node((3,), ("t",), "cpu", None, ENTRIES))


def changed(**changes: Any) -> Spec:
    return Spec(SPEC.root._replace(**changes))


def with_entry(key: str, entry: Any) -> Spec:
    return changed(entries=tuple((name, entry if name == key else old) for name, old in ENTRIES))


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(tensordicts())
def test_keys_when_listed_then_equal_those_of_tensordict(td: Any) -> None:
    spec = capture(td).spec
    for include_nested, leaves_only, sort in product([False, True], repeat=3):
        expected = list(td.keys(include_nested, leaves_only, sort=sort))
        assert spec.keys(include_nested, leaves_only, sort=sort) == expected


def test_leaves_when_listed_then_are_sorted_by_path() -> None:
    assert SPEC.tensors == ((("n", "y"), TensorLeaf("int64", (3, 2))), (("z",), TensorLeaf("float32", (3, 4))))
    assert SPEC.values == ((("a",), ValueLeaf((3,), False)), (("n", "v"), ValueLeaf((3, 2), True)))
    assert SPEC.nbytes == 48 + 48


def test_find_when_path_exists_then_returns_its_entry() -> None:
    assert SPEC.find(("n", "y")) == TensorLeaf("int64", (3, 2))
    assert SPEC.find(("n",)) is INNER
    assert SPEC.find(()) is SPEC.root


@pytest.mark.parametrize(("path", "shown"), [(("q",), "q"), (("n", "q"), "('n', 'q')"), (("z", "y"), "('z', 'y')")])
def test_find_when_path_names_nothing_then_names_store_and_key(path: tuple[str, ...], shown: str) -> None:
    with pytest.raises(KeyNotFoundError) as caught:
        SPEC.find(path, store="frames")
    assert (caught.value.store, caught.value.key) == ("frames", shown)


def test_select_when_given_leaves_and_nodes_then_keeps_them_and_what_is_above() -> None:
    assert SPEC.select([("n", "v"), ("z",)]).keys(True) == ["z", ("n", "v"), "n"]
    assert SPEC.select([("n",), ("n", "v")]).find(("n",)) == INNER
    assert SPEC.select([()]) == SPEC
    assert SPEC.select([]).keys() == []


def test_select_when_a_path_names_nothing_then_raises() -> None:
    with pytest.raises(KeyNotFoundError):
        SPEC.select([("z",), ("n", "q")])


def test_with_batch_when_replaced_then_changes_nodes_leaves_and_values() -> None:
    spec = SPEC.with_batch(1, (7, 8), ("p", None))
    assert spec.find(("n", "y")) == TensorLeaf("int64", (7, 8, 2))
    assert spec.find(("n", "v")) == ValueLeaf((7, 8, 2), True)
    inner = spec.find(("n",))
    assert isinstance(inner, Node)
    assert (inner.batch_size, inner.names) == ((7, 8, 2), ("p", None, None))


@pytest.mark.parametrize(
    ("num_dims", "batch_size", "names", "expected"),
    [
        (1, (5,), None, ("t",)),
        (1, (5,), (None,), None),
        (0, (5,), None, (None, "t")),
        (0, (5,), ("new",), ("new", "t")),
        (1, (), None, None),
        (1, (5, 6), None, None),
    ],
)
def test_with_batch_when_named_then_names_follow(num_dims: int, batch_size: Any, names: Any, expected: Any) -> None:
    assert SPEC.with_batch(num_dims, batch_size, names).root.names == expected


@pytest.mark.parametrize(("num_dims", "names"), [(2, None), (-1, None), (1, ("a", "b"))])
def test_with_batch_when_it_cannot_be_then_raises(num_dims: int, names: Any) -> None:
    with pytest.raises(InvalidSpecError):
        SPEC.with_batch(num_dims, (5,), names)


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(tensordicts())
def test_prepend_when_compared_with_expand_then_is_the_spec_of_the_result(td: Any) -> None:
    expanded = capture(td.expand(2, *td.batch_size)).spec
    check_matches(capture(td).spec.prepend((2,)), expanded, store="")


def test_with_rows_when_repeated_then_is_the_same_object() -> None:
    assert SPEC.with_rows(9) is SPEC.with_rows(9)
    assert SPEC.with_rows(9) == SPEC.with_batch(1, (9,))
    assert SPEC.with_rows(3) is SPEC


def test_with_rows_when_many_numbers_are_asked_then_keeps_a_bounded_number() -> None:
    spec = Spec(SPEC.root)
    made = [weakref.ref(spec.with_rows(num_rows)) for num_rows in range(2000)]
    gc.collect()
    assert 0 < sum(each() is not None for each in made) <= 257, "with itself"


def test_with_rows_when_there_is_no_batch_dimension_then_raises() -> None:
    with pytest.raises(InvalidSpecError):
        Spec(Node((), None, None, None, ())).with_rows(3)


def test_with_device_when_given_then_moves_every_node() -> None:
    moved = SPEC.with_device("cuda:0")
    assert [node.device for node in (moved.root, moved.find(("n",))) if isinstance(node, Node)] == ["cuda:0"] * 2
    assert moved is SPEC.with_device("cuda:0")
    assert SPEC.with_device(None).root.device is None


def test_with_locked_when_asked_then_every_node_and_back() -> None:
    found = SPEC.with_locked(True)
    assert found.root.is_locked
    assert found.has_state
    assert found.without_state == SPEC
    assert found.find(("n",)) == INNER._replace(is_locked=True)
    assert SPEC.with_locked(True) is found
    assert found.with_locked(False) == SPEC
    assert SPEC.with_locked(False) is SPEC
    check_matches(SPEC, found, store="s")
    check_matches(found, SPEC, store="s")


def test_select_when_locked_then_whole_nodes_are_and_what_is_above_not() -> None:
    locked = SPEC.with_locked(True)
    whole = locked.select([("n",)])
    assert whole.find(("n",)) == INNER._replace(is_locked=True)
    assert not whole.root.is_locked
    assert not locked.select([("n", "y")]).has_state


def test_with_values_per_row_when_asked_then_changes_values_that_have_rows() -> None:
    spec = Spec(Node((), None, None, None, (("n", INNER), ("v", ValueLeaf((), False)), ("w", ValueLeaf((2,), False)))))
    per_row = spec.with_values_per_row()
    assert [leaf.per_row for _, leaf in per_row.values] == [True, False, True]
    assert per_row is spec.with_values_per_row()


def test_spec_when_hashed_pickled_and_compared_then_is_a_value() -> None:
    same = Spec(Node(*SPEC.root))
    assert (same, hash(same)) == (SPEC, hash(SPEC))
    copy = pickle.loads(pickle.dumps(SPEC))
    assert copy == SPEC
    assert "tensors" not in vars(copy)
    assert len(SPEC.fingerprint) == 32


@pytest.mark.parametrize(
    ("actual", "key", "expected_text", "actual_text"),
    [
        (changed(entries=ENTRIES[1:]), "z", "float32[3, 4]", "no such key"),
        (changed(entries=(*ENTRIES, ("more", INNER))), "more", "no such key", "TensorDict[3, 2]"),
        (
            with_entry("z", TensorLeaf("float64", (3, 4))),
            "z",
            "float32[3, 4]",
            (
                "float64[3, 4], of which float32 does not hold all values: convert it first, as by .to(torch.float32), "
                "or .astype('float32') of an array"
            ),
        ),
        (with_entry("z", TensorLeaf("float16", (3, 4))), "z", "float32[3, 4]", "float16[3, 4]"),
        (with_entry("z", TensorLeaf("float32", (3, 5))), "z", "float32[3, 4]", "float32[3, 5]"),
        (with_entry("z", ValueLeaf((3,), False)), "z", "float32[3, 4]", "non-tensor[3]"),
        (with_entry("n", TensorLeaf("bool", (3,))), "n", "TensorDict[3, 2]", "bool[3]"),
        (with_entry("n", INNER._replace(tensorclass="m.C")), "n", "TensorDict", "m.C"),
        (with_entry("n", INNER._replace(entries=INNER.entries[:1])), "('n', 'v')", "non-tensor[3, 2]", "no such key"),
        (with_entry("a", ValueLeaf((3, 1), False)), "a", "non-tensor[3]", "non-tensor[3, 1]"),
        (SPEC.with_rows(4), "", "batch size [3]", "[4]"),
    ],
)
def test_check_matches_when_something_differs_then_names_it(
    actual: Spec, key: str, expected_text: str, actual_text: str
) -> None:
    with pytest.raises(SpecMismatchError) as caught:
        check_matches(SPEC, actual, store="frames")
    fields = caught.value.fields
    assert fields == {"store": "frames", "key": key, "expected": expected_text, "actual": actual_text}


@pytest.mark.parametrize(
    "actual",
    [
        SPEC,
        Spec(SPEC.root),
        SPEC.with_device("cuda:1"),
        changed(names=None),
        changed(entries=tuple(reversed(ENTRIES))),
        with_entry("a", ValueLeaf((3,), True)),
        with_entry("n", INNER._replace(names=("t", "u"), device="cpu")),
    ],
)
def test_check_matches_when_only_order_names_device_or_rows_of_values_differ_then_accepts(actual: Spec) -> None:
    check_matches(SPEC, actual, store="")


def test_room_when_imported_without_tensors_then_needs_no_torch() -> None:
    program = (
        "import sys; from tdserve.structure.trees import codec, tree; "
        "assert not {'torch', 'tensordict'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[4], timeout=60)


def test_capture_when_row_of_values_is_taken_then_still_matches_the_store() -> None:
    td = TensorDict({"x": torch.zeros(2), "w": ["a", "b"]}, [2])
    check_matches(capture(td).spec.with_batch(1, ()), capture(td[0]).spec, store="")


PACKED_NODE = Node((3,), None, None, "m.Turns", (("role", ValueLeaf((3,), True)),), inner=(-1,))
TOKENS = ValueLeaf((3,), True, Ragged(Form.JAGGED, "int64", (-1, 2)))
RAGGED = with_entry("n", PACKED_NODE)


def test_values_when_a_node_is_packed_then_it_is_one_of_them() -> None:
    assert RAGGED.values == ((("a",), ValueLeaf((3,), False)), (("n",), ValueLeaf((3,), True, PACKED)))
    assert RAGGED.packed == {("n",)}
    assert RAGGED.has_ragged
    assert not SPEC.has_ragged
    assert RAGGED.find(("n", "role")) == ValueLeaf((3,), True)
    assert ("n", "role") in RAGGED.keys(include_nested=True)


def test_select_when_a_key_lies_in_a_packed_node_then_the_whole_node() -> None:
    assert RAGGED.select([("n", "role")]).root.entries == (("n", PACKED_NODE),)


def test_keys_when_a_tensor_is_ragged_then_it_is_a_leaf() -> None:
    assert with_entry("a", TOKENS).keys(leaves_only=True) == ["z", "a"]


def test_with_rows_when_something_is_ragged_then_its_elements_stay() -> None:
    spec = changed(entries=(("t", TOKENS), ("n", PACKED_NODE)), stack_dim=0).with_rows(5)
    node = PACKED_NODE._replace(batch_size=(5,), entries=(("role", ValueLeaf((5,), True)),))
    assert spec.root.entries == (("t", TOKENS._replace(batch_size=(5,))), ("n", node))
    assert spec.root.stack_dim == 0
    assert spec.with_per_row({("t",): False}) is spec


def test_with_per_row_when_asked_again_then_the_same_spec() -> None:
    spec = with_entry("a", ValueLeaf((3,), True))
    changed_spec = spec.with_per_row({("a",): False})
    assert changed_spec.find(("a",)) == ValueLeaf((3,), False)
    assert spec.with_per_row({("a",): False}) is changed_spec
    assert spec.with_per_row({("a",): True}) is spec


@pytest.mark.parametrize(
    ("expected", "actual"),
    [
        (TOKENS, TOKENS._replace(ragged=Ragged(Form.STACK, "int64", (4, 2)))),
        (PACKED_NODE, PACKED_NODE._replace(entries=())),
        (PACKED_NODE, PACKED_NODE._replace(entries=(("mood", ValueLeaf((3,), True)),), inner=(4,))),
        (
            PACKED_NODE,
            PACKED_NODE._replace(entries=(("role", TOKENS._replace(ragged=Ragged(Form.STACK, "int8", (0,)))),)),
        ),
    ],
)
def test_check_matches_when_sizes_are_free_then_accepts(expected: Any, actual: Any) -> None:
    check_matches(with_entry("a", expected), with_entry("a", actual), store="s")


@pytest.mark.parametrize(
    ("expected", "actual", "text"),
    [
        (TOKENS, ValueLeaf((3,), True), r"expected ragged int64\[3, -1, 2\], got non-tensor\[3\]"),
        (TOKENS, TOKENS._replace(ragged=Ragged(Form.JAGGED, "int64", (-1, 5))), r"got ragged int64\[3, -1, 5\]"),
        (TOKENS, TOKENS._replace(ragged=Ragged(Form.STACK, "int64", (-1, -1))), r"got ragged int64\[3, -1, -1\]"),
        (TOKENS, TOKENS._replace(ragged=Ragged(Form.JAGGED, "int32", (-1, 2))), "got ragged int32"),
        (TOKENS, ValueLeaf((3,), True, PACKED), r"got entries of any kind\[3\]"),
        (PACKED_NODE, PACKED_NODE._replace(inner=(-1, 2)), r"batch size \[3, -1\], got \[3, -1, 2\]"),
        (PACKED_NODE, PACKED_NODE._replace(inner=None), r"ragged batch size \[3, -1\]"),
        (PACKED_NODE, PACKED_NODE._replace(tensorclass=None), r"m\.Turns, got TensorDict"),
        (
            PACKED_NODE._replace(tensorclass=None),
            PACKED_NODE._replace(tensorclass=None, entries=(("mood", ValueLeaf((3,), True)),)),
            "no such key",
        ),
    ],
)
def test_check_matches_when_what_is_ragged_differs_then_names_both(expected: Any, actual: Any, text: str) -> None:
    with pytest.raises(SpecMismatchError, match=text):
        check_matches(with_entry("a", expected), with_entry("a", actual), store="s")
