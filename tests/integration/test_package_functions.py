"""The functions of tensordict's package accept the results of reads as they accept what was written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensordict
import torch
from tensordict import MemoryMappedTensor, TensorDict

import tdserve
from tests.sameness import assert_same, difference

pytestmark = pytest.mark.integration

functions: Any = tensordict


def example() -> TensorDict:
    """Rows with a key that repeats itself."""
    return TensorDict(
        {"key": torch.tensor([[0, 1], [2, 3], [0, 1]]), "x": torch.arange(3.0), "n": {"y": torch.ones(3, 2)}}, [3]
    )


def reference() -> TensorDict:
    """Returns one of its rows, and another one."""
    return TensorDict({"key": torch.tensor([[0, 1], [9, 9]])}, [2])


CALLS: dict[str, Callable[[Any], Any]] = {
    "expand_right": lambda td: functions.utils.expand_right(td["x"], (3, 4)),
    "expand_as_right": lambda td: functions.utils.expand_as_right(td["x"], td["n", "y"]),
    "isin": lambda td: functions.utils.isin(td, reference(), "key"),
    "remove_duplicates": lambda td: functions.utils.remove_duplicates(td, "key"),
    "is_tensor_collection": functions.is_tensor_collection,
    "is_batchedtensor": lambda td: functions.utils.is_batchedtensor(td["x"]),
    "make_tensordict": lambda td: functions.make_tensordict(a=td["x"], b={"c": td["key"]}),
    "merge_tensordicts": lambda td: functions.merge_tensordicts(td, TensorDict({"z": torch.ones(3)}, [3])),
    "pad": lambda td: functions.pad(td, [0, 2], value=-1),
    "pad_sequence": lambda td: functions.pad_sequence([td, td[:2]], return_mask=True),
    "dense_stack_tds": lambda td: functions.dense_stack_tds([td, td], 0),
    "lazy_stack": lambda td: functions.lazy_stack([td, td]),
    "maybe_dense_stack": lambda td: functions.maybe_dense_stack([td, td]),
    "stack": lambda td: functions.stack([td, td]),
    "cat": lambda td: functions.cat([td, td]),
    "from_dict": lambda td: functions.from_dict(td.to_dict()),
    "from_any": lambda td: functions.from_any(td.to_dict()),
    "capture_non_tensor_stack": lambda td: functions.capture_non_tensor_stack(),
    "is_leaf_nontensor": lambda td: functions.is_leaf_nontensor(type(td["x"])),
}


@pytest.mark.parametrize("name_of_call", CALLS)
def test_function_when_given_what_comes_back_then_as_of_the_original(
    client: tdserve.Client, name: str, name_of_call: str
) -> None:
    client.init_remote(example(), name)
    call = CALLS[name_of_call]
    found, expected = call(client.from_remote_init(name)), call(example())
    assert found == expected if isinstance(expected, bool) else difference(found, expected) is None


@pytest.mark.filterwarnings("ignore:The legacy lazy mode:DeprecationWarning")
def test_lazy_legacy_when_set_then_what_comes_back_is_viewed_lazily(client: tdserve.Client, name: str) -> None:
    client.init_remote(example(), name)
    with functions.set_lazy_legacy(True):
        assert functions.lazy_legacy()
        viewed = client.from_remote_init(name).unsqueeze(0)
        assert type(viewed) is type(example().unsqueeze(0)) is not TensorDict
        assert_same(viewed.to_tensordict(), example().unsqueeze(0).to_tensordict())


def test_repr_when_parsed_then_a_tensordict_of_the_same_structure(client: tdserve.Client, name: str) -> None:
    client.init_remote(example(), name)
    parsed, expected = (
        functions.parse_tensor_dict_string(repr(td)) for td in (client.from_remote_init(name), example())
    )
    assert_same(parsed.apply(torch.zeros_like), expected.apply(torch.zeros_like))


def test_memory_mapped_tensor_when_a_leaf_then_its_content_comes_back(client: tdserve.Client, name: str) -> None:
    images = MemoryMappedTensor.from_tensor(torch.arange(12.0).reshape(4, 3))
    store = client.memmap(TensorDict({"image": images, "part": images[1:, :2].expand(4, 3, 2)}, [4]), name)
    assert torch.equal(store[:2]["image"], torch.arange(6.0).reshape(2, 3))
    assert torch.equal(client.load_memmap(name)["part"], images[1:, :2].expand(4, 3, 2))


def test_context_managers_when_of_what_comes_back_then_undone_at_the_end(client: tdserve.Client, name: str) -> None:
    client.init_remote(example().lock_(), name)
    data = client.from_remote_init(name)
    with data.unlock_():
        data.set("key2", torch.ones(3))
    assert data.is_locked
    module = torch.nn.Linear(2, 3)
    client.init_remote(TensorDict.from_module(module).data.clone().zero_(), f"{name}-params")
    before = module.weight.clone()
    with client.from_remote_init(f"{name}-params").to_module(module):
        assert not module(torch.ones(2)).any()
    assert torch.equal(module.weight, before)
    client.delete(f"{name}-params")
