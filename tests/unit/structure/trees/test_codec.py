from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings, strategies as st

from tdserve.base.errors import InvalidSpecError
from tdserve.structure.captures.capture import capture
from tdserve.structure.trees.codec import decode, encode, from_content, to_content
from tdserve.structure.trees.nodes import MAX_DEPTH, PACKED, Form, Params, Ragged, TensorKind
from tdserve.structure.trees.tree import Node, Spec, TensorLeaf, ValueLeaf
from tdserve.v1 import spec_pb2
from tests.ragged import CASES

OTHER_BATCH_SIZE = "does not start with batch size"

INNER = Node((2, 0), None, None, None, (), is_locked=True)
SPEC = Spec(
    Node(
        (2,),
        ("t",),
        "cuda:0",
        "module.Outer.Class",
        (
            ("z", TensorLeaf("complex32", (2, 3), TensorKind.PARAMETER, True)),
            ("", INNER),
            ("n", INNER._replace(params=Params("skip", True, True, True, True))),
            ("v", ValueLeaf((2, 1), True)),
        ),
    )
)


def test_spec_when_sent_then_comes_back_equal_with_its_order() -> None:
    message = spec_pb2.Spec.FromString(encode(SPEC).SerializeToString())
    assert decode(message) == SPEC
    assert decode(message).fingerprint == SPEC.fingerprint


def test_spec_when_empty_then_comes_back_equal() -> None:
    spec = Spec(Node((), None, None, None, (("n", Node((), None, None, None, ())), ("v", ValueLeaf((), False)))))
    assert decode(spec_pb2.Spec.FromString(encode(spec).SerializeToString())) == spec


def test_encode_when_key_is_no_unicode_then_raises() -> None:
    with pytest.raises(InvalidSpecError, match="ud800"):
        encode(Spec(Node((), None, None, None, (("\ud800", TensorLeaf("bool", ())),))))


Change = Callable[[spec_pb2.Node], object]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda root: root.batch_size.append(-1), "negative"),
        (lambda root: root.entries[0].tensor.shape.append(-3), "negative"),
        (lambda root: root.entries[0].tensor.shape.__setitem__(0, 5), OTHER_BATCH_SIZE),
        (lambda root: root.entries[0].tensor.ClearField("shape"), OTHER_BATCH_SIZE),
        (lambda root: root.entries[1].node.batch_size.__setitem__(0, 5), OTHER_BATCH_SIZE),
        (lambda root: root.entries[3].value.ClearField("batch_size"), OTHER_BATCH_SIZE),
        (lambda root: root.entries.add(key="z").tensor.shape.append(2), "'z'.* appears twice"),
        (lambda root: root.entries.add(key="new"), "has content that this version"),
        (lambda root: setattr(root.entries[0].tensor, "dtype", 0), "unknown dtype number 0"),
        (lambda root: setattr(root.entries[0].tensor, "dtype", 999), "unknown dtype number 999"),
        (lambda root: root.names.add(name="u"), "2 names for 1"),
        (lambda root: setattr(root, "has_names", False), "marked as having none"),
        (lambda root: setattr(root, "device", "cuda:0; rm"), "device"),
        (lambda root: setattr(root, "device", ""), "device"),
        (lambda root: setattr(root.entries[0].tensor, "kind", 9), "unknown kind number 9"),
        (lambda root: setattr(root.params, "convert", 7), "unknown way number 7"),
        (lambda root: setattr(root, "tensorclass", "nothing"), "not a class name"),
        (lambda root: setattr(root, "tensorclass", "m." + "C" * 2000), "not a class name"),
        (lambda root: root.entries[0].tensor.shape.append(2**62), "bytes"),
        (lambda root: root.entries[0].tensor.shape.extend([0, 2**62]), "bytes"),
        (lambda root: root.entries[1].node.batch_size.extend([2**40, 2**40]), "bytes"),
        (lambda root: root.entries[0].tensor.shape.extend([1] * 64), "dimensions"),
    ],
)
def test_decode_when_message_contradicts_itself_then_invalid_spec_has_the_reason(change: Change, reason: str) -> None:
    message = encode(SPEC)
    change(message.root)
    with pytest.raises(InvalidSpecError, match=reason):
        decode(message)


def test_decode_when_two_dimensions_have_one_name_then_raises() -> None:
    message = encode(Spec(Node((2, 3), ("a", "a"), None, None, ())))
    with pytest.raises(InvalidSpecError, match="same name"):
        decode(message)


def test_decode_when_leaves_together_are_absurd_then_raises() -> None:
    leaf = TensorLeaf("uint8", (2**61,))
    message = encode(Spec(Node((), None, None, None, tuple((key, leaf) for key in "abc"))))
    with pytest.raises(InvalidSpecError, match="all leaves together"):
        decode(message)


def test_decode_when_root_is_missing_then_raises() -> None:
    with pytest.raises(InvalidSpecError, match="root"):
        decode(spec_pb2.Spec())


@pytest.mark.parametrize(("depth", "is_accepted"), [(MAX_DEPTH, True), (MAX_DEPTH + 1, False)])
def test_decode_when_deeply_nested_then_ends_at_the_limit(depth: int, is_accepted: bool) -> None:
    node = Node((), None, None, None, ())
    for _ in range(depth - 1):
        node = Node((), None, None, None, (("n", node),))
    message = spec_pb2.Spec.FromString(encode(Spec(node)).SerializeToString())
    if is_accepted:
        assert decode(message) == Spec(node)
    else:
        with pytest.raises(InvalidSpecError, match="nested deeper"):
            decode(message)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.data())
def test_decode_when_bytes_are_hostile_then_raises_only_its_own_error(data: st.DataObject) -> None:
    wire = bytearray(encode(SPEC).SerializeToString())
    for _ in range(data.draw(st.integers(1, 4))):
        wire[data.draw(st.integers(0, len(wire) - 1))] = data.draw(st.integers(0, 255))
    message = spec_pb2.Spec()
    try:
        message.ParseFromString(bytes(wire))
    except Exception:  # noqa: BLE001 - protobuf's own refusal is not ours to test
        return
    try:
        spec = decode(message)
    except InvalidSpecError:
        return
    assert decode(encode(spec)) == spec


RAGGED = Spec(
    Node(
        (2,),
        None,
        None,
        None,
        (
            ("t", ValueLeaf((2,), True, Ragged(Form.JAGGED, "int64", (-1, 3), True))),
            ("a", ValueLeaf((2,), True, Ragged(Form.STACK, "bool", ()))),
            ("h", Node((2,), None, None, "m.Turns", (("role", ValueLeaf((2,), True)),), inner=(-1,))),
            ("p", ValueLeaf((2,), True, PACKED)),
            ("q", Node((2,), None, None, None, (), stack_dim=1, inner=(-1,))),
        ),
        0,
    )
)


@pytest.mark.parametrize("spec", [RAGGED, *(capture(td).spec for td in CASES.values())])
def test_spec_when_rows_differ_then_comes_back_equal(spec: Spec) -> None:
    message = spec_pb2.Spec.FromString(encode(spec).SerializeToString())
    assert decode(message) == spec
    assert decode(message).fingerprint == spec.fingerprint


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda root: setattr(root, "stack_dim", 1), "stacked along dimension 1, of 1"),
        (lambda root: setattr(root, "stack_dim", -2), "stacked along dimension -2"),
        (lambda root: setattr(root.entries[2].node, "stack_dim", 2), "stacked along dimension 2, of 2"),
        (lambda root: setattr(root.entries[4].node, "stack_dim", -2), "stacked along dimension -2"),
        (lambda root: root.inner.append(-1), "not marked as packed"),
        (lambda root: root.entries[2].node.inner.append(-2), "negative size"),
        (lambda root: root.entries[0].value.ragged.shape.append(-1), "jagged and has elements"),
        (lambda root: root.entries[0].value.ragged.shape.append(2**62), "bytes"),
        (lambda root: setattr(root.entries[0].value.ragged, "form", 99), "ragged form 99"),
        (lambda root: setattr(root.entries[0].value.ragged, "dtype", 0), "dtype number 0"),
        (lambda root: setattr(root.entries[3].value.ragged, "dtype", 3), "ragged form 4"),
        (lambda root: root.entries[3].value.ragged.shape.append(1), "packed and has elements"),
    ],
)
def test_decode_when_what_is_ragged_contradicts_itself_then_raises(change: Change, reason: str) -> None:
    message = encode(RAGGED)
    change(message.root)
    with pytest.raises(InvalidSpecError, match=reason):
        decode(message)


MEMBERS = (
    Node((2,), None, None, None, (("x", TensorLeaf("float32", (2,), TensorKind.PARAMETER, True)),), is_locked=True),
    Node((2,), None, None, None, (("y", ValueLeaf((2,), True)),)),
)

STACKED = Node((2,), None, None, None, (), stack_dim=1, inner=(-1,), members=MEMBERS)


def test_spec_when_a_stack_has_members_then_comes_back_equal() -> None:
    nested = STACKED._replace(inner=(-1, 2), members=(STACKED._replace(stack_dim=1, inner=(2,)),))
    for node in (STACKED, nested, STACKED._replace(stack_dim=-1, members=(STACKED,))):
        spec = Spec(Node((2,), None, None, None, (("s", node),)))
        assert decode(spec_pb2.Spec.FromString(encode(spec).SerializeToString())) == spec
        assert spec.fingerprint != Spec(Node((2,), None, None, None, (("s", node._replace(members=())),))).fingerprint


@pytest.mark.parametrize(
    ("node", "reason"),
    [
        (STACKED._replace(stack_dim=None), "not marked as a packed stack"),
        (STACKED._replace(inner=None, stack_dim=0), "not marked as a packed stack"),
        (STACKED._replace(stack_dim=-1), "2 members, not 1"),
        (STACKED._replace(batch_size=(2, 3), stack_dim=1), "2 members, not 3"),
        (STACKED._replace(inner=(-1, 2)), "other than 2 batch dimensions"),
        (STACKED._replace(batch_size=(3,)), OTHER_BATCH_SIZE),
    ],
)
def test_decode_when_members_are_not_those_of_the_stack_then_raises(node: Node, reason: str) -> None:
    with pytest.raises(InvalidSpecError, match=reason):
        decode(encode(Spec(Node(node.batch_size[:1], None, None, None, (("s", node),)))))


def test_decode_when_members_lie_deep_in_one_another_then_ends_at_the_limit() -> None:
    node = Node((), None, None, None, ())
    for _ in range(MAX_DEPTH):
        node = Node((1,), None, None, None, (), stack_dim=-1, inner=(), members=(node._replace(batch_size=(1,)),))
    with pytest.raises(InvalidSpecError, match="nested deeper"):
        decode(encode(Spec(Node((1,), None, None, None, (("s", node),)))))


def test_decode_when_integers_are_to_require_grad_then_raises() -> None:
    message = encode(Spec(Node((), None, None, None, (("a", TensorLeaf("int64", ())),))))
    message.root.entries[0].tensor.requires_grad = True
    with pytest.raises(InvalidSpecError, match="cannot require grad"):
        decode(message)


@pytest.mark.parametrize("stack_dim", [-1, 0])
def test_decode_when_a_single_element_is_to_be_stacked_then_raises(stack_dim: int) -> None:
    single = Spec(Node((), None, None, None, (), stack_dim=stack_dim, inner=(-1,)))
    with pytest.raises(InvalidSpecError, match=f"stacked along dimension {stack_dim}, of 1"):
        decode(encode(single))


def test_content_when_read_then_the_same_spec_for_equal_bytes() -> None:
    spec = Spec(Node((2,), None, None, None, (("x", TensorLeaf("float32", (2, 3))),)))
    assert to_content(spec) is to_content(spec)
    assert from_content(to_content(spec)) == spec
    assert from_content(bytes(bytearray(to_content(spec)))) is from_content(to_content(spec))
    for content in (b"", b"\xff"):
        with pytest.raises(InvalidSpecError):
            from_content(content)
