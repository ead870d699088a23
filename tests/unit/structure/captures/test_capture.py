from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import (
    LazyStackedTensorDict,
    MetaData,
    NonTensorData,
    NonTensorStack,
    TensorDict,
)
from tensordict.nn import TensorDictParams

from tdserve.base.errors import InvalidSpecError, NotSupportedError
from tdserve.structure.building.packing import pack, unpack
from tdserve.structure.captures.capture import capture
from tdserve.structure.trees.nodes import MAX_DEPTH
from tdserve.structure.trees.tree import Node, TensorLeaf, ValueLeaf
from tests.sameness import difference
from tests.tensordict_strategies import Inner
from tests.tensordict_versions import skip_old


def test_capture_when_tensordict_is_nested_then_describes_it() -> None:
    inner = TensorDict({"b": torch.zeros(3, 2, dtype=torch.bfloat16)}, [3, 2], device="cpu")
    td = TensorDict({"a": torch.zeros(3), "n": inner, "v": "text", "w": ["x", "y", "z"]}, [3])
    captured = capture(td)
    node = Node((3, 2), None, "cpu", None, (("b", TensorLeaf("bfloat16", (3, 2))),))
    values = (("v", ValueLeaf((3,), False)), ("w", ValueLeaf((3,), True)))
    assert captured.spec.root == Node(
        (3,), None, None, None, (("a", TensorLeaf("float32", (3,))), ("n", node), *values)
    )
    assert captured.values == {("v",): "text", ("w",): ["x", "y", "z"]}
    assert captured.tensors.keys() == {("a",), ("n", "b")}


def test_capture_when_structures_are_equal_then_gives_one_spec_object() -> None:
    first, second = (capture(TensorDict({"a": torch.zeros(3)}, [3])).spec for _ in range(2))
    assert first is second


def test_capture_when_names_are_partly_none_then_keeps_them() -> None:
    some: Any = ["t", None]
    none: Any = [None, None]
    assert capture(TensorDict({}, [3, 2], names=some)).spec.root.names == ("t", None)
    assert capture(TensorDict({}, [3, 2], names=none)).spec.root.names is None


def test_capture_when_leaves_are_parameters_then_gives_detached_tensors_of_the_same_memory() -> None:
    module = torch.nn.Linear(2, 2)
    td = TensorDict.from_module(module)
    for form in (td, TensorDictParams(td, no_convert=True), td.lock_()):
        weight = capture(form).tensors["weight",]
        assert type(weight) is torch.Tensor
        assert not weight.requires_grad
        assert weight.data_ptr() == module.weight.data_ptr()


def test_capture_when_memory_mapped_then_gives_plain_tensors_of_the_same_memory(tmp_path: Any) -> None:
    td = TensorDict({"a": torch.arange(3), "v": "text", "w": ["x", "y", "z"]}, [3]).memmap(str(tmp_path))
    captured = capture(td)
    assert type(captured.tensors["a",]) is torch.Tensor
    assert captured.tensors["a",].data_ptr() == td["a"].data_ptr()
    assert captured.values == {("v",): "text", ("w",): ["x", "y", "z"]}


def test_capture_when_sub_tensordict_then_sees_its_rows() -> None:
    td = TensorDict({"a": torch.arange(3), "n": {"b": torch.arange(3)}}, [3])
    captured = capture(td._get_sub_tensordict(slice(1, 3)))
    assert captured.spec.batch_size == (2,)
    assert captured.tensors["n", "b"].tolist() == [1, 2]


@skip_old("converts no struct array with strings")
def test_capture_when_struct_array_then_strings_are_values() -> None:
    array = np.array([(1, "ab", 2.0), (3, "c", 4.0)], dtype=[("i", "i8"), ("s", "U4"), ("f", "f4")])
    captured = capture(TensorDict.from_struct_array(array))
    assert captured.spec.keys() == ["i", "s", "f"]
    assert captured.values["s",].tolist() == ["ab", "c"]


def test_capture_when_tensor_is_a_lazy_view_then_gives_its_real_bytes() -> None:
    value = torch.tensor([1 + 2j])
    captured = capture(TensorDict({"conj": value.conj(), "neg": value.conj().imag}, [1]))
    assert not captured.tensors["conj",].is_conj()
    assert captured.tensors["conj",].tolist() == [1 - 2j]
    assert not captured.tensors["neg",].is_neg()
    assert captured.tensors["neg",].tolist() == [-2]


def test_capture_when_stack_has_more_dimensions_then_gives_nested_lists() -> None:
    stack = NonTensorStack(NonTensorStack("a", "b"), NonTensorStack("c", "d"))
    columns: Any = [NonTensorData(value, batch_size=[2]) for value in "ab"]
    other = torch.stack(columns, 1)
    captured = capture(TensorDict({"s": stack, "t": other}, [2]))
    assert captured.spec.find(("s",)) == ValueLeaf((2, 2), True)
    assert captured.values == {("s",): [["a", "b"], ["c", "d"]], ("t",): [["a", "b"], ["a", "b"]]}


def test_capture_when_tensorclass_has_a_field_beside_its_tensors_then_sees_it() -> None:
    inner = Inner.from_tensordict(TensorDict(z=torch.ones(2), batch_size=[2]), {"tag": "beside"})
    assert capture(inner).values == {("tag",): "beside"}
    assert capture(inner).spec.root.tensorclass == f"{Inner.__module__}.Inner"


def quantized() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.quint8)


plain: Any = TensorDict


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: torch.zeros(2, 2).to_sparse(), "sparse_coo"),
        (lambda: torch.zeros(2, device="meta"), "meta"),
        (quantized, "quint8"),
        (torch.nn.UninitializedParameter, "uninitialized"),
        (lambda: MetaData("x", batch_size=[2]), "MetaData"),
        (lambda: NonTensorData(range(1), batch_size=[2]), "range"),
        (lambda: NonTensorStack(NonTensorData("x"), NonTensorData(object())), "object"),
        (lambda: NonTensorStack(NonTensorStack("a", "b"), NonTensorStack(NonTensorData(range(1)))), "range"),
    ],
)
def test_capture_when_leaf_does_not_travel_then_names_its_key(make: Callable[[], Any], what: str) -> None:
    inner = TensorDict({"odd.key": make()}, [] if "uninit" in what else [2])
    with pytest.raises(NotSupportedError, match=rf"(?i){what}.*\('n', 'odd\.key'\)"):
        capture(TensorDict({"n": inner}))


@pytest.mark.parametrize("root", [None, [{"a": 1}], torch.zeros(2), Inner, NonTensorData("x")])
def test_capture_when_root_is_no_dense_tensordict_then_names_the_store(root: Any) -> None:
    with pytest.raises(NotSupportedError, match="store 'frames'"):
        capture(root, store="frames")


def test_capture_when_tensordict_is_of_another_class_then_refuses() -> None:
    class Own(plain):  # type: ignore[misc]  # tensordict's __init_subclass__ has no annotations
        pass

    with pytest.raises(NotSupportedError, match=r"Own.*to_tensordict"):
        capture(Own({}, []))


def test_capture_when_tensor_wraps_another_then_refuses() -> None:
    class Wrapper(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func: Any, *rest: Any) -> Any:
            return func(*rest[1])

    with pytest.raises(NotSupportedError, match="Wrapper at key 'a'"):
        capture(TensorDict._new_unsafe({"a": torch.zeros(2).as_subclass(Wrapper)}, batch_size=torch.Size([2])))


def test_capture_when_key_is_no_unicode_then_refuses() -> None:
    with pytest.raises(NotSupportedError, match="ud800"):
        capture(TensorDict({"\ud800": torch.zeros(2)}, [2]))


def test_capture_when_nested_too_deep_then_refuses() -> None:
    td = TensorDict({})
    for _ in range(MAX_DEPTH - 1):
        td = TensorDict({"n": td})
    capture(td)
    with pytest.raises(NotSupportedError, match="levels deep"):
        capture(TensorDict({"n": td}))


@pytest.mark.parametrize("leaf", [torch.zeros(3), TensorDict(batch_size=[3]), NonTensorData("x", batch_size=[3])])
def test_capture_when_leaf_contradicts_the_batch_size_then_raises(leaf: Any) -> None:
    with pytest.raises(InvalidSpecError, match="'a'"):
        capture(TensorDict._new_unsafe({"a": leaf}, batch_size=torch.Size([2])))


@pytest.mark.parametrize(
    "leaf", [torch.zeros(2, dtype=torch.complex64).conj(), torch.zeros(2, 1).expand(2, 3), torch.zeros(1).expand(2)]
)
def test_capture_when_destination_cannot_be_written_through_then_refuses(leaf: torch.Tensor) -> None:
    td = TensorDict({"a": leaf}, [2])
    capture(td)
    with pytest.raises(NotSupportedError, match="'a'"):
        capture(td, is_destination=True)


def test_capture_when_done_then_leaves_the_tensordict_as_it_was() -> None:
    td = TensorDict({"a": torch.arange(3), "v": "text"}, [3], names=["t"]).lock_()
    before = td.clone().lock_()
    capture(td)
    assert td.is_locked
    assert difference(before, td) is None


def test_capture_when_there_are_ten_thousand_leaves_then_is_not_quadratic() -> None:
    td = TensorDict({str(number): torch.zeros(()) for number in range(10_000)})
    start = time.thread_time()
    assert len(capture(td).tensors) == 10_000
    assert time.thread_time() - start < 3.0  # a fifth of a second; were it quadratic, a minute


def test_capture_when_pickle_is_allowed_or_it_is_a_destination_then_values_of_any_type_are_let_through() -> None:
    td = TensorDict({"v": NonTensorData(range(1), batch_size=[2]), "w": NonTensorStack(range(2), 3)}, [2])
    for captured in (capture(td, allow_pickle=True), capture(td, is_destination=True)):
        assert captured.values == {("v",): range(1), ("w",): [range(2), 3]}
    with pytest.raises(NotSupportedError, match="'v'"):
        capture(td)


def test_capture_when_exact_then_notes_what_is_locked() -> None:
    td = TensorDict({"a": TensorDict({"b": {}}).lock_(), "c": {}})
    entries: dict[str, Any] = dict(capture(td, is_exact=True).spec.root.entries)
    assert [entries[key].is_locked for key in "ac"] == [True, False]
    assert not capture(td).spec.has_state
    assert capture(td.lock_(), is_exact=True).spec == capture(td).spec.with_locked(True)


@pytest.mark.parametrize("root", [NonTensorData("x"), NonTensorStack("x", "y")], ids=["data", "stack"])
def test_capture_when_the_root_is_a_value_then_refused_by_where_to_put_it(root: Any) -> None:
    with pytest.raises(NotSupportedError, match="by itself is not supported: put it into a tensordict, under a key"):
        capture(root)


def test_capture_when_like_has_elements_that_require_grad_then_it_is_noted_again() -> None:
    rows = [TensorDict({"x": torch.zeros(1, 3, requires_grad=True)}, [1]) for _ in range(2)]
    first = capture(LazyStackedTensorDict(*rows, stack_dim=1), is_exact=True)
    assert first.spec.packed
    again = capture(LazyStackedTensorDict(*rows, stack_dim=1), like=first.spec, is_exact=True)
    assert unpack(pack(first.values[()]))[0]["x"].requires_grad
    assert unpack(pack(again.values[()]))[0]["x"].requires_grad
