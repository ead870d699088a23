from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictParams

from tdserve.base.errors import InvalidSpecError, NotSupportedError
from tdserve.structure.captures.capture import capture, capture_module
from tdserve.structure.captures.captured import Captured
from tdserve.structure.captures.known_structures import MAX_KNOWN, KnownStructures
from tdserve.structure.tensordict_private import new_tensordict
from tdserve.structure.tensors.tensor_view import MIN_LEAVES, TensorView, view_tensordict


def make(number: float = 0.0, num_leaves: int = MIN_LEAVES, dtype: torch.dtype = torch.float32) -> TensorDict:
    """Flat and nested tensors of several shapes; one is a view of strange strides."""
    leaves = {f"k{key}": torch.full((2, key % 3), number, dtype=dtype) for key in range(num_leaves - 3)}
    leaves["square"] = torch.full((2, 2), number).t()
    nested = TensorDict({"x": torch.full((2, 4), number), "y": torch.ones(2, 4)}, [2], names=["rows"])
    return TensorDict({**leaves, "n": nested}, [2], device="cpu")


def see(td: Any) -> TensorView:
    """How a tensordict view."""
    view = view_tensordict(td, "purpose")
    assert view is not None
    return view


def learn(td: Any) -> KnownStructures:
    """What has seen a capture of one."""
    known = KnownStructures()
    known.keep(see(td), capture(td))
    return known


def check_same(found: Captured, expected: Captured) -> None:
    """Compares captures of equal tensordicts."""
    assert found.spec == expected.spec.without_state
    assert [*found.tensors] == [*expected.tensors]
    assert found.values == {}
    for path, tensor in found.tensors.items():
        other = expected.tensors[path]
        assert type(tensor) is torch.Tensor
        assert not tensor.requires_grad
        assert tensor.stride() == other.stride()
        assert torch.equal(tensor, other)


@pytest.mark.parametrize("form", [lambda td: td, lambda td: TensorDictParams(td, no_convert=True)])
def test_capture_when_the_structure_is_known_then_the_new_tensors_under_the_kept_paths(form: Any) -> None:
    known = learn(form(make(1.0)))
    td = form(make(2.0))
    found = known.capture(see(td))
    assert found is not None
    check_same(found, capture(td, is_exact=True))
    assert found.tensors["n", "x"].data_ptr() == td["n", "x"].data_ptr()
    assert all((tensor == 2.0).all() for path, tensor in found.tensors.items() if path != ("n", "y"))


def test_capture_when_known_then_without_an_object_per_leaf() -> None:
    num_leaves = 2_000
    known = learn(make(0.0, num_leaves))
    view = see(make(1.0, num_leaves))
    gc.collect()
    gc.disable()
    try:
        before = gc.get_count()[0]
        found = known.capture(view)
        num_made = gc.get_count()[0] - before
    finally:
        gc.enable()
    assert found is not None
    assert num_made < 50


CHANGES: list[Callable[[TensorDict], Any]] = [
    lambda td: td.set("k3", torch.zeros(2, 7)),
    lambda td: td.set("k3", td["k3"].double()),
    lambda td: td.set_("k3", td["k3"]).rename_key_("k3", "renamed"),
    lambda td: td.set("k0", td.pop("k0")),
    lambda td: td.set("added", torch.zeros(2)),
    lambda td: td.set("empty", TensorDict({}, [2])),
    lambda td: td.set("x", td["n"].pop("x")),
    lambda td: setattr(td["n"], "batch_size", torch.Size([2, 4])),
    lambda td: setattr(td, "names", ["others"]),
    lambda td: td.clear_device_(),
]


@pytest.mark.parametrize("change", CHANGES)
def test_capture_when_the_structure_is_another_then_unknown_and_as_if_nothing_was_known(
    change: Callable[[TensorDict], Any],
) -> None:
    capture(make(1.0, MIN_LEAVES + 1))
    known, td = learn(make(1.0, MIN_LEAVES + 1)), make(2.0, MIN_LEAVES + 1)
    change(td)
    assert known.capture(see(td)) is None
    found = capture(td)
    check_same(found, capture(td, is_exact=True))  # which view at each leaf
    assert found.spec != capture(make(1.0, MIN_LEAVES + 1)).spec


@pytest.mark.filterwarnings("ignore:.*nested tensors.*prototype")
@pytest.mark.parametrize(
    "leaf",
    [
        lambda: torch.zeros(2, 1, dtype=torch.complex64).conj().imag,
        lambda: torch.zeros(2, 1, device="meta"),
        lambda: torch.zeros(2, 1).to_sparse(),
        lambda: torch.nested.nested_tensor([torch.zeros(1), torch.zeros(1)]),
    ],
    ids=["negative", "meta", "sparse", "nested"],
)
def test_is_plain_when_a_tensor_of_the_same_shape_is_special_then_false(leaf: Callable[[], torch.Tensor]) -> None:
    td = make()
    assert see(td).is_plain
    assert not see(TensorDict({**td, "k1": leaf()}, [2])).is_plain


def test_capture_when_an_unchecked_constructor_made_a_contradiction_then_refused_all_the_same() -> None:
    capture(make())
    td = make()
    contradictory = new_tensordict(dict(td.items()), batch_size=torch.Size([3]))
    with pytest.raises(InvalidSpecError):
        capture(contradictory)


def test_capture_when_a_destination_of_a_known_structure_is_expanded_then_refused_all_the_same() -> None:
    like = make()
    capture(like, is_destination=True)
    like["k1"] = torch.zeros(1, 1).expand(2, 1)
    with pytest.raises(NotSupportedError, match="k1"):
        capture(like, is_destination=True)


def test_capture_when_the_tensors_require_grad_then_they_are_detached() -> None:
    module = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(MIN_LEAVES // 2)))
    known = learn(TensorDict.from_module(module))
    found = known.capture(see(TensorDict.from_module(module)))
    assert found is not None
    assert all(type(tensor) is torch.Tensor and not tensor.requires_grad for tensor in found.tensors.values())


def test_keep_when_others_were_kept_since_then_only_the_latest_are_known() -> None:
    known = KnownStructures()
    tds = [make(num_leaves=MIN_LEAVES + number) for number in range(MAX_KNOWN + 1)]
    for td in tds:
        known.keep(see(td), capture(td))
    assert [known.capture(see(td)) is not None for td in tds] == [False] + [True] * MAX_KNOWN


def test_keep_when_the_tensordict_goes_then_so_do_its_tensors() -> None:
    td = make()
    leaf = weakref.ref(td["k3"])
    known = learn(td)
    assert known.capture(see(td)) is not None
    del td
    gc.collect()
    assert leaf() is None


class Net(torch.nn.Module):
    """Parameters, buffers, an empty module, one that is there twice, and an entry that is None."""

    def __init__(self, width: int = 2) -> None:
        super().__init__()
        shared = torch.nn.Linear(width, width, bias=False)
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(MIN_LEAVES)), torch.nn.ReLU())
        self.first, self.second = shared, shared
        self.norm = torch.nn.BatchNorm1d(width)
        self.empty = torch.nn.ModuleDict({"inner": torch.nn.Identity()})
        self.scale = torch.nn.Parameter(torch.ones(width))
        self.register_buffer("mask", torch.ones(width, dtype=torch.bool))
        self.register_parameter("absent", None)


def check_as_tensordict(module: torch.nn.Module) -> None:
    """Compares the capture of a module with that of its tensordict."""
    for is_destination in (False, True):
        found = capture_module(module, is_destination=is_destination)
        expected = capture(TensorDict.from_module(module), is_exact=True)
        check_same(found, expected)
        for path, tensor in found.tensors.items():
            assert tensor.data_ptr() == expected.tensors[path].data_ptr()


def test_capture_module_when_captured_again_and_again_then_as_its_tensordict() -> None:
    module = Net()
    for _ in range(4):
        check_as_tensordict(module)
    check_as_tensordict(Net())
    assert capture_module(module) is capture_module(module)


MODULE_CHANGES: list[Callable[[Any], Any]] = [
    lambda module: setattr(module, "scale", torch.nn.Parameter(torch.zeros(3))),
    lambda module: setattr(module, "absent", torch.nn.Parameter(torch.zeros(1))),
    lambda module: setattr(module, "mask", torch.ones(2)),
    lambda module: setattr(module, "second", torch.nn.Linear(2, 2, bias=False)),
    lambda module: setattr(module.empty, "inner", torch.nn.Linear(1, 1)),
    lambda module: module.layers.append(torch.nn.Linear(2, 2)),
    lambda module: delattr(module, "norm"),
    lambda module: module.double(),
    lambda module: module.half(),
    lambda module: setattr(module.layers[3].weight, "data", torch.zeros(2, 2)),
    lambda module: setattr(module, "td", TensorDictParams(TensorDict({"a": torch.zeros(2)}))),
    lambda module: module.layers.__setitem__(
        0, TensorDictParams(TensorDict({"b": torch.zeros(2), "a": torch.ones(2)}))
    ),
]


@pytest.mark.parametrize("change", MODULE_CHANGES)
def test_capture_module_when_the_module_was_changed_then_as_its_tensordict(change: Callable[[Any], Any]) -> None:
    module = Net()
    for _ in range(3):
        capture_module(module)
        capture_module(module, is_destination=True)
    change(module)
    check_as_tensordict(module)
    check_as_tensordict(module)


def test_capture_when_a_module_is_given_itself_then_refused_even_if_it_is_known() -> None:
    module = Net()
    for _ in range(3):
        capture_module(module)
    with pytest.raises(NotSupportedError, match="from_module"):
        capture(module)


def test_capture_module_when_it_goes_then_so_do_its_tensors() -> None:
    module = Net()
    leaf = weakref.ref(module.scale)
    for _ in range(3):
        capture_module(module)
        capture_module(module, is_destination=True)
    del module
    gc.collect()
    assert leaf() is None


@pytest.mark.slow
def test_capture_module_when_known_then_without_an_object_per_module() -> None:
    module = torch.nn.Sequential(*(torch.nn.Linear(1, 1) for _ in range(1_000)))
    for _ in range(3):
        capture_module(module)
    gc.collect()
    gc.disable()
    begun: list[Any] = []
    threshold = gc.get_threshold()
    try:
        before = gc.get_count()[0]
        capture_module(module)
        num_made = gc.get_count()[0] - before
        gc.set_threshold(500, 100, 100)
        gc.collect()
        gc.callbacks.append(lambda phase, info: begun.append((phase, info)))
        gc.enable()
        capture_module(module)
    finally:
        gc.enable()
        gc.set_threshold(*threshold)
        gc.callbacks.pop()
    assert num_made < 50
    assert begun == []
