"""Entries of every kind as plain values, and back; what is no entry is refused."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from tensordict import MetaData, NonTensorData, NonTensorStack, TensorDict, UnbatchedTensor
from tensordict.nn import TensorDictParams

from tdserve.base.errors import NotSupportedError, RemoteProtocolError
from tdserve.structure.nodes import Node, TensorLeaf, ValueLeaf
from tdserve.structure.stacks.packing import (
    Exact,
    find_shared_value,
    holds_exact,
    mark_exact,
    pack,
    unpack,
    unpack_unbatched,
    without_marks,
)
from tdserve.structure.stacks.row_structure import Note, spec_of
from tdserve.values.codec import decode_bytes, encode_bytes
from tests.unit.structure.ragged import CASES, check_same, turns

unbatched_tensor: Any = UnbatchedTensor


@pytest.mark.parametrize("case", CASES)
def test_unpack_when_it_was_packed_and_sent_then_equal(case: str) -> None:
    check_same(CASES[case], unpack(decode_bytes(encode_bytes(pack(CASES[case])))))


def test_unpack_when_it_had_a_device_then_it_is_the_cpu() -> None:
    td = TensorDict({"a": torch.ones(2)}, [2], device="cpu", names=["rows"])
    found = unpack(pack(td))
    assert found.device == torch.device("cpu")
    assert found.names == ["rows"]


def test_pack_when_tensordict_is_a_wrapper_then_its_content() -> None:
    params = TensorDictParams(TensorDict({"a": torch.ones(2)}))
    assert torch.equal(unpack(pack(params))["a"], torch.ones(2))


@pytest.mark.parametrize("entry", [object(), torch.zeros(2).to_sparse(), torch.zeros(2, device="meta"), MetaData(1)])
def test_pack_when_it_cannot_travel_then_says_so(entry: Any) -> None:
    with pytest.raises(NotSupportedError):
        pack(entry)


def test_unpack_when_tensorclass_is_unknown_then_names_it() -> None:
    kind, _, inner, beside = pack(turns(2))
    with pytest.raises(NotSupportedError, match=r"nowhere\.Turns.*import module nowhere"):
        unpack((kind, "nowhere.Turns", inner, beside))


@pytest.mark.parametrize(
    "value",
    [
        None,
        1,
        (),
        (99,),
        (-1,),
        (0, (), None, None, ["a"], []),
        (4, "float32", (3,), b"1234"),
        (7, 0),
    ],
)
def test_unpack_when_value_is_no_entry_then_refuses(value: Any) -> None:
    with pytest.raises(RemoteProtocolError):
        unpack(value)


def test_unpack_when_values_are_damaged_at_random_then_an_entry_or_our_error() -> None:
    chance = random.Random(7)
    for case in CASES.values():
        data = bytearray(encode_bytes(pack(case)))
        for _ in range(20):
            damaged = bytearray(data)
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
            try:
                unpack(decode_bytes(bytes(damaged)))
            except (RemoteProtocolError, NotSupportedError):
                continue


def test_unpack_when_a_value_has_any_type_then_it_stays() -> None:
    found = unpack(pack(NonTensorData({"a": (1, None)}, batch_size=[2])))
    assert found.data == {"a": (1, None)}
    assert found.batch_size == torch.Size([2])


def test_unpack_when_exact_and_a_part_is_locked_then_it_is() -> None:
    td = TensorDict({"n": TensorDict({"a": torch.ones(2)}).lock_(), "m": {}})
    found = unpack(decode_bytes(encode_bytes(pack(mark_exact([td], 1, keeps_locks=True)[0]))))
    assert [found.is_locked, found["n"].is_locked, found["m"].is_locked] == [False, True, False]
    for entry in (td, mark_exact(td, 0, keeps_locks=False)):
        assert not unpack(pack(entry))["n"].is_locked


def test_unpack_when_an_element_tells_what_it_is_of_then_that_comes_with_it() -> None:
    note = Note(spec_of([Node((3,), None, None, None, (("x", TensorLeaf("float32", (3,))),))], (3,)), 2)
    td = TensorDict({"x": torch.nn.Parameter(torch.ones(()))})
    packed = decode_bytes(encode_bytes(pack(Exact(td, keeps_locks=True, note=note))))
    found = unpack(packed)
    assert (type(found), found.note) == (Exact, note)
    assert isinstance(found.entry["x"], torch.nn.Parameter)
    assert holds_exact([found])
    assert without_marks([found]) == [found.entry]
    with pytest.raises(RemoteProtocolError):
        unpack((packed[0], *packed[1:3], packed))  # it stands for a whole element


@pytest.mark.parametrize("values", [[], [pack(torch.ones(1)), pack(torch.ones(2))]])
def test_shared_when_rows_have_values_of_their_own_then_refused(values: Any) -> None:
    with pytest.raises(NotSupportedError, match="UnbatchedTensor"):
        find_shared_value(values, ValueLeaf((len(values),), True, is_unbatched=True))


def test_unbatched_when_unpacked_then_knows_the_batch_it_is_in() -> None:
    value = pack(unbatched_tensor(torch.arange(3)))
    found: Any = unpack_unbatched(find_shared_value([value, value], ValueLeaf((2,), True, is_unbatched=True)), (2,))
    assert type(found) is UnbatchedTensor
    assert torch.equal(found.as_subclass(torch.Tensor), torch.arange(3))
    assert found.batch_size == (2,)
    with pytest.raises(RemoteProtocolError, match="unbatched"):
        unpack_unbatched(pack(torch.ones(2)), (2,))


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
    short: Any = list(pack(td))
    short[5] = [(5, (2,), "word"), *short[5][1:]]  # of another writer: a value with fewer dimensions
    assert unpack(tuple(short))._tensordict["v"].names == ["a"]
