"""Entries of every kind as plain values, and back; what is no entry is refused."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from tensordict import (
    LazyStackedTensorDict,
    MetaData,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    UnbatchedTensor,
    lazy_stack,
)
from tensordict.nn import TensorDictParams

from tdserve.base.errors import NotSupportedError, RemoteProtocolError
from tdserve.structure.building.packing import pack, unpack
from tdserve.structure.captures.capture import capture
from tdserve.structure.stacks.annotation import make_spec
from tdserve.structure.stacks.common_structure import CapturedPart
from tdserve.structure.stacks.elements import Element, Note, has_notes, unwrap
from tdserve.structure.trees.nodes import Node, TensorLeaf
from tdserve.v1 import spec_pb2
from tdserve.values.value_codec import decode_value, encode_value
from tests.ragged import CASES, check_same, turns
from tests.tensordict_versions import skip_old

unbatched_tensor: Any = UnbatchedTensor

PLAIN = pack(TensorDict({"x": torch.ones(2, 2)}, [2]))

STACK = pack(lazy_stack([TensorDict({"x": torch.ones(2)}), TensorDict({"y": torch.ones(2)})]))


NAMELESS = skip_old("has no names of a stack without rows")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=NAMELESS if case == "stack, no rows" else ()) for case in CASES]
)
def test_unpack_when_it_was_packed_and_sent_then_equal(case: str) -> None:
    check_same(CASES[case], unpack(decode_value(encode_value(pack(CASES[case])))))


def test_unpack_when_it_had_a_device_then_it_is_the_cpu() -> None:
    td = TensorDict({"a": torch.ones(2)}, [2], device="cpu", names=["rows"])
    found = unpack(pack(td))
    assert found.device == torch.device("cpu")
    assert found.names == ["rows"]


def test_pack_when_tensordict_is_a_wrapper_then_its_content() -> None:
    params = TensorDictParams(TensorDict({"a": torch.ones(2)}))
    assert torch.equal(unpack(pack(params))["a"], torch.ones(2))


@pytest.mark.parametrize("entry", [object(), torch.zeros(2).to_sparse(), torch.zeros(2, device="meta"), MetaData(1)])
def test_pack_when_it_cannot_be_sent_then_not_supported(entry: Any) -> None:
    with pytest.raises(NotSupportedError):
        pack(entry)


def test_unpack_when_tensorclass_is_unknown_then_names_it() -> None:
    is_entry, note, structure, *leaves = pack(turns(2))
    message = spec_pb2.Spec.FromString(structure)
    message.root.tensorclass = "nowhere.Turns"
    with pytest.raises(NotSupportedError, match=r"nowhere\.Turns.*import module nowhere"):
        unpack((is_entry, note, message.SerializeToString(), *leaves))


@pytest.mark.parametrize(
    "value",
    [
        None,
        1,
        (),
        (99,),
        (-1,),
        (False, None, b"", []),
        (False, None, None, []),
        (False, None, PLAIN[2], []),
        (False, None, PLAIN[2], [(3, 2), b"1234"]),
        (False, None, PLAIN[2], [(3,), b"1234"]),
        (False, None, PLAIN[2], [(2, 2), b"1234" * 4], 1),
        (True, None, *PLAIN[2:]),
        STACK[:5],
        (*STACK[:3], [(2,), b"12345678"], *STACK[4:]),
        (*STACK[:4], "x", "y"),
        (*STACK[:4], (False, None, None, *PLAIN[3:]), PLAIN),
        (False, (0, b""), *PLAIN[2:]),
        (False, 0, *PLAIN[2:]),
    ],
)
def test_unpack_when_value_is_no_entry_then_refuses(value: Any) -> None:
    with pytest.raises(RemoteProtocolError):
        unpack(value)


def test_unpack_when_values_are_damaged_at_random_then_an_entry_or_our_error() -> None:
    chance = random.Random(7)
    for case in CASES.values():
        data = bytearray(encode_value(pack(case)))
        for _ in range(20):
            damaged = bytearray(data)
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
            try:
                unpack(decode_value(bytes(damaged)))
            except (RemoteProtocolError, NotSupportedError):
                continue


def test_unpack_when_a_value_has_any_type_then_it_stays() -> None:
    found = unpack(pack(NonTensorData({"a": (1, None)}, batch_size=[2])))
    assert found.data == {"a": (1, None)}
    assert found.batch_size == torch.Size([2])


def test_unpack_when_exact_and_a_part_is_locked_then_it_is() -> None:
    td = TensorDict({"n": TensorDict({"a": torch.ones(2)}).lock_(), "m": {}})
    (element, _), (plain, _) = (
        capture(lazy_stack([td, TensorDict({})]), is_exact=is_exact).values[()] for is_exact in (True, False)
    )
    found = unpack(decode_value(encode_value(pack(element))))
    assert [found.is_locked, found["n"].is_locked, found["m"].is_locked] == [False, True, False]
    for entry in (td, plain, element.remove_locks()):
        assert not unpack(pack(entry))["n"].is_locked


def test_unpack_when_an_element_has_a_note_then_that_comes_with_it() -> None:
    note = Note(make_spec([Node((3,), None, None, None, (("x", TensorLeaf("float32", (3,))),))], (3,)), 2)
    td = TensorDict({"x": torch.nn.Parameter(torch.ones(()))})
    packed = decode_value(encode_value(pack(Element(td, note=note))))
    found = unpack(packed)
    assert (type(found), found.note) == (Element, note)
    assert isinstance(found.entry["x"], torch.nn.Parameter)
    assert has_notes([found])
    assert unwrap([found]) == [found.entry]
    with pytest.raises(RemoteProtocolError):
        unpack((*STACK[:4], packed, PLAIN))  # it stands for a whole element


def test_unpack_when_an_unbatched_tensor_is_beside_rows_then_its_shape_is_its_own() -> None:
    td = TensorDict({"table": unbatched_tensor(torch.arange(3)), "x": torch.ones(2)}, [2])
    found = unpack(pack(td))
    assert found["table"].tolist() == [0, 1, 2]
    assert found[0]["table"].tolist() == [0, 1, 2]


def test_unpack_when_dimensions_have_names_then_values_have_them_too() -> None:
    td = TensorDict({"v": "word", "x": torch.zeros(2, 3)}, [2, 3], names=["a", "b"])
    assert unpack(pack(td)).get("v").names == td.get("v").names == ["a", "b"]
    td.set("w", NonTensorStack(*[NonTensorStack("x", "y", "x") for _ in range(2)]))
    assert unpack(pack(td)).get("w").names == td.get("w").names == ["a", "b"]


def test_unpack_when_a_structure_has_more_rows_than_the_content_then_refused_at_once() -> None:
    for batch_size in ([1 << 40], [1 << 40, 0]):
        node = spec_pb2.Node(batch_size=batch_size, stack_dim=0)
        with pytest.raises(RemoteProtocolError, match="no more rows"):
            unpack((False, None, spec_pb2.Spec(root=node).SerializeToString(), []))


def test_pack_when_content_was_on_a_device_then_no_structure_names_the_device() -> None:
    member = Node((2,), None, "cuda:0", None, (("x", TensorLeaf("float32", (2, 3))),))
    stack = Node((2,), None, "cuda:0", None, member.entries, stack_dim=1, inner=(1,), members=(member,))
    root = Node((2,), None, "cuda:0", None, (("s", stack),))
    rows = [pack(Element(None, CapturedPart(member, {("x",): torch.ones(2, 3)}, {}))) for _ in range(2)]
    packed = pack(
        Element(
            None,
            CapturedPart(root, {}, {("s",): [Element(None, CapturedPart(member, {("x",): torch.ones(2, 3)}, {}))] * 2}),
        )
    )
    for _, _, structure, *_ in (packed, *rows):
        assert b"cuda" not in structure


def test_pack_when_rows_of_a_stack_have_one_structure_then_it_is_there_once() -> None:
    stack: Any = LazyStackedTensorDict(*[turns(1) for _ in range(3)])
    rows = pack(stack)[4:]
    assert [row[2] is None for row in rows] == [False, True, True]
    assert [row.role for row in unpack(pack(stack)).tensordicts] == [["turn 0"]] * 3
