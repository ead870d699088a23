from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from tensordict import NonTensorData, NonTensorStack, TensorClass, TensorDict
from tensordict.nn import TensorDictParams

from tdserve.base.errors import LocalProtocolError, NotSupportedError, SpecMismatchError
from tdserve.structure.building.build import build, fill
from tdserve.structure.captures.capture import capture
from tdserve.structure.tensors.torch_types import TO_TORCH
from tdserve.structure.trees import codec
from tdserve.structure.trees.tree import Node, Spec, TensorLeaf
from tdserve.v1 import spec_pb2
from tests.errors import raises
from tests.sameness import difference
from tests.tensordict_strategies import ODD, RESERVED, Inner, Outer, tensordicts
from tests.tensordict_versions import skip_old

# torch warns once per process when the first complex32 tensor is made


def stacked(*tds: Any) -> Any:
    return torch.stack(list(tds))


def rebuilt(td: Any) -> Any:
    captured = capture(td)
    return build(captured.spec, captured.tensors, captured.values)


def example() -> TensorDict:
    inner = TensorDict({"b": torch.arange(6).reshape(3, 2)}, [3, 2])
    return TensorDict({"a": torch.arange(3.0), "n": inner, "v": "text", "w": ["x", "y", "z"]}, [3])


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(tensordicts())
def test_tensordict_when_captured_sent_and_built_then_is_equal_in_type_structure_and_value(td: Any) -> None:
    captured = capture(td)
    wire = codec.encode(captured.spec).SerializeToString()
    spec = codec.decode(spec_pb2.Spec.FromString(wire))
    assert spec == captured.spec
    assert spec.fingerprint == captured.spec.fingerprint
    built = build(spec, captured.tensors, captured.values)
    assert difference(td, built) is None
    assert list(built.keys(True, True)) == list(td.keys(True, True))


@pytest.mark.parametrize("key", RESERVED + ODD)
def test_key_when_tensordict_or_a_file_system_reserves_it_then_survives_at_every_level_and_kind(key: str) -> None:
    td = TensorDict({key: {key: {key: torch.ones(2)}, "v": {key: "text"}}, "w": {key: ["x", "y"]}}, [2])
    captured = capture(td)
    spec = codec.decode(spec_pb2.Spec.FromString(codec.encode(captured.spec).SerializeToString()))
    assert difference(td, build(spec, captured.tensors, captured.values)) is None


@pytest.mark.parametrize("name", TO_TORCH)
@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (2, 3)])
def test_leaf_when_of_any_dtype_and_zero_sizes_then_survives(name: str, shape: tuple[int, ...]) -> None:
    leaf = torch.zeros(shape, dtype=TO_TORCH[name])
    td = TensorDict({"whole": {"a": leaf}, "rows": TensorDict({"a": leaf}, shape)}, [])
    assert difference(td, rebuilt(td)) is None
    assert capture(td).spec.tensors[0][1] == TensorLeaf(name, shape)


def test_build_when_td_has_memory_then_shares_it() -> None:
    td = example()
    assert rebuilt(td)["n", "b"].data_ptr() == td["n", "b"].data_ptr()


def test_build_when_used_afterwards_then_behaves_as_any_tensordict() -> None:
    td = rebuilt(example())
    td["new"] = torch.zeros(3)
    td.names = ["t"]
    assert td[1]["w"] == "y"
    assert td.clone().lock_().is_locked
    assert td["n"].names == ["t", None]
    assert stacked(td, td).batch_size == (2, 3)


def test_build_when_repeated_then_names_of_one_are_not_those_of_another() -> None:
    captured = capture(TensorDict({"a": torch.zeros(3)}, [3], names=["t"]))
    first, second = (build(captured.spec, captured.tensors, captured.values) for _ in range(2))
    first._td_dim_names[0] = "changed"
    assert second.names == ["t"]


@skip_old("has no names of a stack without rows")
def test_build_when_batch_is_empty_then_stack_of_values_is_empty_too() -> None:
    for empty in (example()[0:0], TensorDict({"w": [["a", "b"], ["c", "d"]]}, [2, 2])[:, 0:0]):
        assert difference(empty, rebuilt(empty)) is None


def test_build_when_leaf_is_missing_then_names_it() -> None:
    captured = capture(example())
    with pytest.raises(LocalProtocolError, match="'b'"):
        build(captured.spec, {("a",): torch.zeros(3)}, captured.values)


def test_build_when_tensorclass_has_post_init_then_does_not_run_it_again() -> None:
    class Counted(TensorClass):
        x: torch.Tensor

        def __post_init__(self) -> None:
            self.x = self.x + 1

    assert rebuilt(Counted(x=torch.zeros(2), batch_size=[2])).x.tolist() == [1, 1]


def test_build_when_tensorclass_is_frozen_then_is_frozen_again() -> None:
    base: Any = TensorClass

    class Frozen(base["frozen"]):  # type: ignore[misc]  # tensordict's own spelling of the option
        x: torch.Tensor

    frozen = rebuilt(Frozen(x=torch.ones(2), batch_size=[2]))
    assert type(frozen) is Frozen
    with pytest.raises(AttributeError):
        frozen.x = torch.zeros(2)


def test_build_when_class_was_defined_again_then_takes_the_newest() -> None:
    def define() -> Any:
        class Twice(TensorClass):
            x: torch.Tensor

        return Twice

    old = define()
    captured = capture(old(x=torch.ones(2), batch_size=[2]))
    assert type(build(captured.spec, captured.tensors, {})) is old
    new = define()
    assert type(build(captured.spec, captured.tensors, {})) is new


@pytest.mark.parametrize(
    "name",
    [
        "os.system",
        "no.such.Class",
        "tensordict.tensorclass.NonTensorData",
        "tensordict._td.TensorDict",
        "antigravity.X",
    ],
)
def test_build_when_tensorclass_is_not_registered_then_refuses_and_imports_nothing(name: str) -> None:
    spec = Spec(Node((), None, None, name, ()))
    with pytest.raises(NotSupportedError, match=f"import module {name.rpartition('.')[0]} first"):
        build(spec, {}, {})
    assert "antigravity" not in sys.modules


def test_build_when_tensorclass_lacks_a_field_then_refuses_by_its_name() -> None:
    spec = Spec(Node((), None, None, f"{Inner.__module__}.Inner", (("other", TensorLeaf("bool", ())),)))
    with pytest.raises(NotSupportedError, match="no fields \\['other'\\]"):
        build(spec, {("other",): torch.zeros(())}, {})


def test_fill_when_structure_matches_then_copies_into_the_same_memory() -> None:
    source, target = example(), example().zero_()
    pointer = target["n", "b"].data_ptr()
    captured = capture(source)
    fill(target, captured.spec, captured.tensors, captured.values)
    assert difference(source, target) is None
    assert target["n", "b"].data_ptr() == pointer


def test_fill_when_values_differ_then_replaces_them() -> None:
    source, target = example(), example()
    source["v"], source["w"] = "new", NonTensorData("all", batch_size=[3])
    captured = capture(source)
    fill(target, captured.spec, captured.tensors, captured.values)
    assert difference(source, target) is None


def test_fill_when_target_is_a_tensorclass_then_fills_its_fields() -> None:
    def outer(value: float, note: str) -> Any:
        return Outer(
            x=torch.full((2,), value), y=torch.zeros(2), note=note, rest=TensorDict(batch_size=[2]), batch_size=[2]
        )

    target, captured = outer(0.0, "old"), capture(outer(1.0, "new"))
    fill(target, captured.spec, captured.tensors, captured.values)
    assert (target.x.tolist(), target.note) == ([1, 1], "new")


def test_fill_when_value_lies_beside_the_tensors_then_replaces_it() -> None:
    target, source = (Inner.from_tensordict(TensorDict(z=torch.ones(())), {"tag": tag}) for tag in ("old", "new"))
    captured = capture(source)
    assert captured.values == {("tag",): "new"}
    fill(target, captured.spec, captured.tensors, captured.values)
    assert target.tag == "new"


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_fill_when_target_holds_parameters_then_writes_through_to_the_module(is_wrapped: bool) -> None:
    module = torch.nn.Linear(2, 2)
    td = TensorDict.from_module(module)
    captured = capture(td.clone().zero_())
    fill(TensorDictParams(td, no_convert=True) if is_wrapped else td.lock_(), captured.spec, captured.tensors, {})
    assert module.weight.detach().tolist() == [[0, 0], [0, 0]]
    assert module.weight.requires_grad


def test_fill_when_target_is_memory_mapped_then_writes_its_files(tmp_path: Any) -> None:
    target = example().exclude("v", "w").memmap_like(str(tmp_path))
    captured = capture(example().exclude("v", "w"))
    fill(target, captured.spec, captured.tensors, captured.values)
    assert TensorDict.load_memmap(str(tmp_path), allow_pickle=False)["a"].tolist() == [0, 1, 2]


def test_fill_when_target_is_locked_and_a_value_changes_then_refuses_before_writing() -> None:
    target = example().zero_().lock_()
    source = example()
    source["n", "u"] = "new"
    target.unlock_()["n", "u"] = "old"
    captured = capture(source)
    with pytest.raises(NotSupportedError, match=r"\('n', 'u'\)"):
        fill(target.lock_(), captured.spec, captured.tensors, captured.values)
    assert target["a"].tolist() == [0, 0, 0]


def test_fill_when_target_does_not_fit_then_writes_nothing() -> None:
    target = example().zero_()
    target["n", "b"] = torch.zeros(3, 2)
    captured = capture(example())
    with pytest.raises(SpecMismatchError, match=r"expected int64\[3, 2\], got float32\[3, 2\]"):
        fill(target, captured.spec, captured.tensors, captured.values)
    assert target["a"].tolist() == [0, 0, 0]


def test_fill_when_a_tensor_contradicts_the_spec_then_writes_nothing() -> None:
    target, captured = example().zero_(), capture(example())
    with raises(SpecMismatchError, key="('n', 'b')"):
        fill(target, captured.spec, {**captured.tensors, ("n", "b"): torch.zeros(1)}, captured.values)
    assert target["a"].tolist() == [0, 0, 0]


def test_fill_when_stack_becomes_one_value_then_follows_the_source() -> None:
    target = TensorDict({"w": NonTensorStack("a", "b")}, [2])
    captured = capture(TensorDict({"w": NonTensorData(["a", "b"], batch_size=[2])}, [2]))
    fill(target, captured.spec, captured.tensors, captured.values)
    assert type(target.get("w")) is NonTensorData


def test_fill_when_a_value_is_one_that_only_pickle_carries_then_it_is_replaced() -> None:
    td = TensorDict({"v": NonTensorData(range(1))})
    fill(td, capture(td, allow_pickle=True).spec, {}, {("v",): range(2)})
    assert td["v"] == range(2)
