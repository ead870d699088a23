"""What a tensordict is beside its content, noted and given back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import MemoryMappedTensor, TensorClass, TensorDict
from tensordict.nn import TensorDictParams

from tdserve.base.errors import NotSupportedError
from tdserve.structure.building.build import build
from tdserve.structure.captures.capture import capture
from tdserve.structure.tensordicts.state import make_params, mark_tensor, read_mark, read_params, restore_state
from tdserve.structure.trees import codec
from tdserve.structure.trees.nodes import Params, TensorKind
from tdserve.v1 import spec_pb2
from tests.conformance.kinds import KINDS
from tests.sameness import assert_same

PARAMETER, BUFFER = torch.nn.Parameter, torch.nn.Buffer


class Weights(TensorClass):
    """A class whose instances may be around parameters, or inside."""

    w: torch.Tensor


@pytest.mark.filterwarnings("ignore:.*nested tensors.*prototype")
@pytest.mark.parametrize("name", KINDS)
def test_kind_when_captured_sent_and_built_then_the_same(name: str) -> None:
    captured = capture(KINDS[name].make(), is_exact=True)
    spec = codec.decode(spec_pb2.Spec.FromString(codec.encode(captured.spec).SerializeToString()))
    assert spec == captured.spec
    if not captured.spec.packed:  # whose elements are exact only when they were packed
        tensors = {path: tensor.cpu() for path, tensor in captured.tensors.items()}  # of a file: read when sent
        found = build(spec, tensors, captured.values)
        assert_same(found, KINDS[name].expected(KINDS[name].make()))


@pytest.mark.parametrize(
    ("tensor", "mark"),
    [
        (torch.ones(2), (TensorKind.PLAIN, False)),
        (torch.ones(2, requires_grad=True) * 2, (TensorKind.PLAIN, True)),
        (PARAMETER(torch.ones(2)), (TensorKind.PARAMETER, True)),
        (PARAMETER(torch.ones(2, dtype=torch.int64), requires_grad=False), (TensorKind.PARAMETER, False)),
        (BUFFER(torch.ones(2)), (TensorKind.BUFFER, False)),
        (BUFFER(torch.ones(2), persistent=False), (TensorKind.NON_PERSISTENT_BUFFER, False)),
        (MemoryMappedTensor.from_tensor(torch.ones(2)), (TensorKind.PLAIN, False)),
    ],
)
def test_mark_of_when_given_back_then_the_same_kind_of_the_same_memory(tensor: torch.Tensor, mark: Any) -> None:
    assert read_mark(tensor) == mark
    plain = torch.ones(2, dtype=tensor.dtype)
    found = mark_tensor(plain, *mark)
    assert read_mark(found) == mark
    assert found.is_leaf
    assert found.data_ptr() == plain.data_ptr()
    assert not plain.requires_grad


def test_mark_of_when_the_class_is_another_then_refused() -> None:
    class Image(torch.Tensor):
        pass

    with pytest.raises(NotSupportedError, match=r"class Image.*as_subclass"):
        read_mark(torch.ones(2).as_subclass(Image))


def test_capture_when_exact_and_the_class_of_a_tensor_would_be_lost_then_refused_by_its_key() -> None:
    class Image(torch.Tensor):
        pass

    td = TensorDict({"n": {"a": torch.ones(2).as_subclass(Image)}})
    with pytest.raises(NotSupportedError, match=r"\('n', 'a'\)"):
        capture(td, is_exact=True)
    assert not capture(td).spec.has_state


def test_params_of_when_it_has_hooks_then_refused_by_its_key() -> None:
    params: Any = TensorDictParams(TensorDict({"a": torch.ones(2)}))
    params.register_get_post_hook(lambda _, value: value)
    with pytest.raises(NotSupportedError, match=r"hooks.*'actor'"):
        capture(TensorDict({"actor": params}), is_exact=True)
    capture(TensorDict({"actor": params}))


@pytest.mark.parametrize(
    "params", [Params(), Params(True), Params("skip", True, True), Params(False, False, True, True)]
)
def test_params_around_when_made_then_it_is_as_noted(params: Params) -> None:
    found = make_params(TensorDict({"a": PARAMETER(torch.ones(2)), "b": BUFFER(torch.ones(2))}), params)
    assert read_params(found) == params
    assert [list(found._parameters), list(found._buffers)] == [["a"], ["b"]]


@pytest.mark.parametrize(
    "make",
    [
        lambda td: TensorDictParams(Weights.from_tensordict(td)),  # type: ignore[arg-type]  # it is a tensordict
        lambda td: Weights.from_tensordict(TensorDictParams(td)),
    ],
)
def test_params_when_a_tensorclass_is_inside_or_around_then_the_same(make: Any) -> None:
    made = [make(TensorDict({"w": torch.ones(2, 3)}, [2])) for _ in range(2)]
    captured = capture(made[0], is_exact=True)
    assert_same(build(captured.spec, captured.tensors, captured.values), made[1])


def test_restore_state_when_nodes_are_locked_then_with_what_is_below_and_once() -> None:
    spec = capture(TensorDict({"a": {"b": torch.ones(2)}, "c": {}}).lock_(), is_exact=True).spec
    found = restore_state(TensorDict({"a": {"b": torch.ones(2)}, "c": {}}), spec.root)
    assert [found.is_locked, found["a"].is_locked, found["c"].is_locked] == [True] * 3
    assert not found.unlock_()["a"].is_locked


def test_capture_when_not_exact_then_specs_of_parameters_are_those_of_their_content() -> None:
    content = TensorDict({"w": torch.ones(2), "n": {"i": torch.ones(2, dtype=torch.int64)}})
    bare = capture(TensorDictParams(content.clone()).eval()).spec
    assert bare == capture(content, is_exact=True).spec
    assert capture(TensorDictParams(content.clone()), is_exact=True).spec.without_state == bare
