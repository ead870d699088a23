from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tensordict import MemoryMappedTensor, TensorDict
from tensordict.nn import TensorDictParams

from tdserve.structure.captures.capture import capture
from tdserve.structure.captures.capture_cache import MAX_KEPT, Recall
from tdserve.structure.tensors.tensor_view import MIN_LEAVES

RESULT = object()


def make_td(num_leaves: int = MIN_LEAVES) -> TensorDict:
    """Two of them nested, one square."""
    leaves = {f"k{number}": torch.full((2, 3), float(number)) for number in range(num_leaves - 3)}
    leaves["square"] = torch.arange(4.0).view(2, 2)
    nested = TensorDict({"x": torch.zeros(2, 4), "y": torch.ones(2, 4)}, [2])
    return TensorDict({**leaves, "n": nested}, [2], device="cpu")


def remembering(td: Any) -> Recall:
    """A recall that knows a tensordict."""
    recall = Recall()
    result, view = recall.find(td, "purpose")
    assert result is None
    assert view is not None
    recall.keep(view, RESULT)
    return recall


def is_found(recall: Recall, td: Any, purpose: object = "purpose") -> bool:
    """Whether its result is."""
    return recall.find(td, purpose)[0] is RESULT


def replace_leaf(td: TensorDict) -> None:
    td["k3"] = td["k3"].clone()


def assign_data(td: TensorDict) -> None:
    td["n", "x"].data = td["n", "x"].clone()


def change_dtype(td: TensorDict) -> None:
    td["k3"].data = td["k3"].half()


def transpose(td: TensorDict) -> None:
    td["square"].t_()


def resize(td: TensorDict) -> None:
    td["k3"].resize_(2, 2)


def change_batch_size(td: TensorDict) -> None:
    td["n"].batch_size = torch.Size([2, 4])


def change_names(td: TensorDict) -> None:
    td.names = ["rows"]


def rename(td: TensorDict) -> None:
    td.rename_key_("k0", "renamed")


def reorder(td: TensorDict) -> None:
    td["k0"] = td.pop("k0")


def exchange(td: TensorDict) -> None:
    td["k3"], td["k4"] = td["k4"], td["k3"]


def move(td: TensorDict) -> None:
    td["x"] = td["n"].pop("x")


def add(td: TensorDict) -> None:
    td["added"] = torch.zeros(2)


def remove(td: TensorDict) -> None:
    del td["k5"]


def add_empty(td: TensorDict) -> None:
    td["empty"] = TensorDict({}, [2])


CHANGES: list[Callable[[TensorDict], Any]] = [
    replace_leaf,
    assign_data,
    change_dtype,
    transpose,
    resize,
    change_batch_size,
    change_names,
    TensorDict.clear_device_,
    rename,
    reorder,
    exchange,
    move,
    add,
    remove,
    add_empty,
]


def test_find_when_the_tensors_are_the_same_then_the_result_whatever_holds_them() -> None:
    td = make_td()
    recall = remembering(td)
    td["k3"].fill_(77.0)
    td.lock_()
    for same in (td, td, td.copy()):
        assert is_found(recall, same)
    assert not is_found(recall, td.clone())


@pytest.mark.parametrize("change", CHANGES)
def test_find_when_anything_was_changed_then_nothing(change: Callable[[TensorDict], Any]) -> None:
    td = make_td(MIN_LEAVES + 1)
    recall = remembering(td)
    assert is_found(recall, td)
    change(td)
    assert not is_found(recall, td)


@pytest.mark.parametrize("change", CHANGES)
def test_capture_when_anything_was_changed_then_as_if_never_captured_before(
    change: Callable[[TensorDict], Any],
) -> None:
    td = make_td(MIN_LEAVES + 1)
    assert capture(td) is not capture(td) is capture(td)
    change(td)
    found, fresh = capture(td), capture(td.to_tensordict(retain_none=True))
    assert found.spec is fresh.spec
    for path, tensor in found.tensors.items():
        leaf = td[path]
        assert (tensor.data_ptr(), tensor.dtype, tensor.stride()) == (leaf.data_ptr(), leaf.dtype, leaf.stride())
        assert torch.equal(tensor, fresh.tensors[path])


def test_find_when_for_another_purpose_then_nothing() -> None:
    td = make_td()
    recall = remembering(td)
    assert not is_found(recall, td, "another")
    _, view = recall.find(td, "another")
    assert view is not None
    recall.keep(view, "another result")
    assert is_found(recall, td)
    assert recall.find(td, "another")[0] == "another result"


def test_find_when_others_were_kept_since_then_only_the_latest() -> None:
    tds = [make_td() for _ in range(MAX_KEPT + 1)]
    recall = remembering(tds[0])
    for td in tds[1:]:
        _, view = recall.find(td, "purpose")
        assert view is not None
        recall.keep(view, RESULT)
    assert [is_found(recall, td) for td in tds] == [False] + [True] * MAX_KEPT


def test_find_when_two_begin_with_the_same_tensor_then_neither_is_taken_for_the_other() -> None:
    first = make_td()
    second = TensorDict({**first.clone(), "k0": first["k0"]}, [2], device="cpu")
    assert second["k0"] is first["k0"]
    recall = remembering(first)
    result, view = recall.find(second, "purpose")
    assert result is None
    assert view is not None
    recall.keep(view, "another result")
    assert recall.find(second, "purpose")[0] == "another result"
    assert not is_found(recall, first)


def plain(leaf: Any) -> TensorDict:
    """Large enough; one leaf is special."""
    return TensorDict({**make_td(), "special": leaf}, [2])


@pytest.mark.parametrize(
    "make",
    [
        lambda: make_td(MIN_LEAVES - 1),
        lambda: plain(torch.zeros(2, dtype=torch.complex64).conj().imag),
        lambda: plain(torch.zeros(2, dtype=torch.complex64).conj()),
        lambda: plain(torch.zeros(2, 2).to_sparse()),
        lambda: plain(MemoryMappedTensor.from_tensor(torch.zeros(2))),
        lambda: plain("text"),
        lambda: make_td()._get_sub_tensordict(slice(1)),
        lambda: None,
        dict,
    ],
    ids=["small", "negative", "conjugate", "sparse", "memory-mapped", "value", "sub-tensordict", "none", "dict"],
)
def test_find_when_small_or_not_of_plain_tensors_then_never_kept(make: Callable[[], Any]) -> None:
    assert Recall().find(make(), "purpose") == (None, None)


def network() -> torch.nn.Sequential:
    """Returns a network of so many parameters that its capture is cached."""
    return torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(MIN_LEAVES // 2)))


@pytest.mark.parametrize("form", [TensorDict, TensorDictParams])
def test_capture_when_of_parameters_then_the_same_until_one_is_another(form: Any) -> None:
    module = network()

    def weights() -> Any:
        td = TensorDict.from_module(module)
        return td if form is TensorDict else TensorDictParams(td, no_convert=True)

    capture(weights())
    first = capture(weights())  # kept when it came again
    assert capture(weights()) is first
    linear: Any = module[0]
    with torch.no_grad():
        linear.weight.fill_(3.0)
    assert capture(weights()) is first
    assert first.tensors["0", "weight"].tolist() == [[3.0, 3.0]] * 2
    linear.weight = torch.nn.Parameter(torch.zeros(2, 2))
    assert capture(weights()).tensors["0", "weight"].data_ptr() == linear.weight.data_ptr()


def test_capture_when_the_form_is_another_then_not_the_same() -> None:
    td = TensorDict.from_module(network())
    params = TensorDictParams(td, no_convert=True)
    assert capture(td) is not capture(td) is capture(td)
    assert capture(td) is not capture(params)


def test_capture_when_a_destination_then_not_that_of_a_source() -> None:
    td = make_td()
    assert capture(td) is not capture(td) is capture(td)
    assert capture(td, is_destination=True) is not capture(td, is_destination=True) is capture(td, is_destination=True)
    assert capture(td) is not capture(td, is_destination=True)


def test_capture_when_the_content_was_changed_in_place_then_the_new_content() -> None:
    td = make_td()
    capture(td)
    before = capture(td)
    td["k3"].add_(1.0)
    after = capture(td)
    assert after is before
    assert after.tensors["k3",].data_ptr() == td["k3"].data_ptr()
    assert after.tensors["k3",].tolist() == [[4.0] * 3] * 2


def over_arrays() -> tuple[TensorDict, list[weakref.ref[NDArray[np.float32]]]]:
    """A tensordict over memory whose end can be observed."""
    arrays = [np.zeros(2, np.float32) for _ in range(MIN_LEAVES)]
    td = TensorDict({f"k{number}": torch.from_numpy(array) for number, array in enumerate(arrays)}, [2])
    return td, [weakref.ref(array) for array in arrays]


def test_capture_when_the_tensordict_goes_then_so_does_its_memory() -> None:
    td, memory = over_arrays()
    leaf = weakref.ref(td["k3"])
    for _ in range(2):
        capture(td)
        capture(td, is_destination=True)
    assert all(array() is not None for array in memory)
    del td
    gc.collect()
    assert leaf() is None
    assert [array() for array in memory] == [None] * MIN_LEAVES


def test_capture_when_one_tensor_goes_then_so_does_its_memory() -> None:
    td, memory = over_arrays()
    assert capture(td) is not capture(td) is capture(td)
    td["k3"] = torch.zeros(2)
    gc.collect()
    assert [number for number, array in enumerate(memory) if array() is None] == [3]


def test_has_met_when_the_same_come_again_then_true_once_they_were_noted() -> None:
    recall, td = Recall(), make_td()

    def meet(each: TensorDict) -> bool:
        _, view = recall.find(each, "purpose")
        assert view is not None
        return recall.has_met(view)

    assert [meet(td), meet(td), meet(td.copy()), meet(td)] == [False, True, True, True]
    assert [meet(make_td()) for _ in range(20)] == [False] * 20  # their memory and numbers are those of others before
    replace_leaf(td)
    assert [meet(td), meet(td)] == [False, True]


def test_capture_when_tensors_come_where_others_were_then_of_those() -> None:
    for number in range(50):
        td = TensorDict({f"k{key}": torch.full((2,), number) for key in range(MIN_LEAVES)}, [2])
        assert capture(td).tensors["k7",].tolist() == [number] * 2


def test_capture_when_data_was_assigned_then_the_next_one_lets_the_old_memory_go() -> None:
    td, memory = over_arrays()
    assert capture(td) is not capture(td) is capture(td)
    leaves: Any = list(td.values())
    for leaf in leaves:
        leaf.data = torch.zeros(2)  # as module.to(device) does
    del leaf
    capture(td)
    gc.collect()
    assert all(array() is None for array in memory)


def test_capture_when_modules_swap_their_tensors_then_does_not_stand_in_the_way() -> None:
    module = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(MIN_LEAVES)))
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        for _ in range(3):
            capture(TensorDict.from_module(module))
        module.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
