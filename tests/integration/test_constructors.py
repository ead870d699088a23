"""Every constructor of tensordict, as its documentation shows it: its result goes in and comes out equal."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensordict
import torch
from tensordict import NonTensorData, NonTensorStack, PersistentTensorDict, TensorClass, TensorDict
from torch import nn

import tdserve
from tests.sameness import assert_same

pytestmark = pytest.mark.integration

make_tensordict: Any = tensordict.make_tensordict
make: Any = TensorDict  # the stubs lack the keyword arguments of the documentation


@dataclasses.dataclass
class Measured:
    """Neither a tensordict nor a tensorclass."""

    obs: Any
    other: Any
    label: str = "text"


class MeasuredClass(TensorClass):
    """What a dataclass becomes."""

    obs: torch.Tensor
    other: torch.Tensor
    label: str = "text"


class Pair(NamedTuple):
    """A named tuple."""

    a: Any
    b: Any


PETS = np.array([("Rex", 9, 81.0), ("Fido", 3, 27.0)], dtype=[("name", "U10"), ("age", "i4"), ("weight", "f4")])


def seeded(build: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    return build()


def linear() -> nn.Module:
    module: nn.Module = seeded(lambda: nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))
    return module


def rows(*sizes: int) -> list[TensorDict]:
    return [TensorDict({"x": torch.arange(size), "n": {"y": torch.ones(size)}}) for size in sizes]


def batches(*sizes: int) -> list[TensorDict]:
    return [TensorDict({"x": torch.arange(size)}, [size]) for size in sizes]


TREE = {"a": torch.zeros(3, 4), "b": {"c": torch.ones(3, 4, 5), "d": {}}}

MADE: dict[str, Callable[[Path], Any]] = {
    "from_dict": lambda _: make.from_dict(TREE),
    "from_dict auto": lambda _: make.from_dict(TREE, auto_batch_size=True),
    "from_dict dims": lambda _: make.from_dict(TREE, auto_batch_size=True, batch_dims=1),
    "from_any dict": lambda _: tensordict.from_any({"a": torch.zeros(3), "b": {"c": [1, 2, 3], "d": "text"}}),
    "from_any tuple": lambda _: tensordict.from_any((torch.zeros(3), {"a": (1, 2.0)})),
    "from_any dataclass": lambda _: tensordict.from_any(Measured(torch.zeros(3), torch.ones(3, 2))),
    "from_any struct array": lambda _: tensordict.from_any(PETS),
    "from_dataclass": lambda _: make.from_dataclass(Measured(torch.zeros(3), torch.ones(3)), auto_batch_size=True),
    "from_dataclass class": lambda _: MeasuredClass.from_dataclass(Measured(torch.zeros(3), torch.ones(3))),
    "from_module": lambda _: make.from_module(linear()),
    "from_module as_module": lambda _: make.from_module(linear(), as_module=True),
    "from_modules": lambda _: seeded(lambda: make.from_modules(nn.Linear(2, 3), nn.Linear(2, 3))),
    "from_modules lazy": lambda _: seeded(lambda: make.from_modules(nn.Linear(2, 3), nn.Linear(2, 3), lazy_stack=True)),
    "from_namedtuple": lambda _: make.from_namedtuple(Pair(torch.zeros(3), {"c": torch.ones(3)}), auto_batch_size=True),
    "from_tuple": lambda _: make.from_tuple((torch.zeros(3), {"c": torch.ones(3)}), auto_batch_size=True),
    "from_pytree": lambda _: make.from_pytree(
        {"obs": torch.zeros(2), "pair": (torch.ones(1), [torch.zeros(())]), 3: collections.OrderedDict(a=torch.ones(1))}
    ),
    "from_struct_array": lambda _: make.from_struct_array(PETS),
    "from_struct_array row": lambda _: make.from_struct_array(PETS[0]),
    "fromkeys": lambda _: make.fromkeys(["a", ("b", "c")], 1),
    "lazy_stack": lambda _: make.lazy_stack(rows(2, 3)),
    "lazy_stack dim": lambda _: make.lazy_stack([td.unsqueeze(0) for td in rows(2, 3)], 1),
    "maybe_dense_stack": lambda _: make.maybe_dense_stack(rows(2, 2)),
    "maybe_dense_stack lazy": lambda _: make.maybe_dense_stack(rows(2, 3)),
    "stack": lambda _: make.stack(rows(2, 2)),
    "torch.stack": lambda _: torch.stack(tuple(rows(2, 2))),
    "cat": lambda _: make.cat(batches(2, 3)),
    "merge_tensordicts": lambda _: tensordict.merge_tensordicts(
        *(td.select(key) for key, td in zip("xn", rows(2, 2), strict=True))
    ),
    "pad": lambda _: tensordict.pad(batches(3)[0], [0, 2], value=-1),
    "pad_sequence": lambda _: tensordict.pad_sequence(batches(2, 3), return_mask=True),
    "dense_stack_tds": lambda _: tensordict.dense_stack_tds(make.lazy_stack(rows(2, 2))),
    "make_tensordict": lambda _: make_tensordict(a=torch.zeros(3), b={"c": 1}),
    "consolidate": lambda _: rows(3)[0].set("n2", TensorDict({"z": torch.arange(5)})).consolidate(),
    "from_consolidated": lambda path: make.from_consolidated(_consolidated(path)),
    "load_memmap": lambda path: make.load_memmap(_saved(path)),
    "memmap_like": lambda path: rows(3)[0].memmap_like(path / "like"),
    "pack_memmap": lambda path: make.load_memmap(_packed(path)),
    "from_h5": lambda path: make.from_h5(_h5(path)),
    "share_memory_": lambda _: rows(3)[0].share_memory_(),
    "a stack of values": lambda _: TensorDict(
        {"v": NonTensorStack(NonTensorStack("a", None), NonTensorStack(1, "b"))}, [2]
    ),
    "a value": lambda _: TensorDict({"v": NonTensorData({"nested": (1, [2.0])}, batch_size=[2])}, [2]),
}


def _consolidated(path: Path) -> Path:
    rows(3)[0].consolidate(path / "consolidated")
    return path / "consolidated"


def _saved(path: Path) -> Path:
    rows(3)[0].memmap(path / "saved")
    return path / "saved"


def _packed(path: Path) -> Path:
    archive = path / "saved.zip"
    tensordict.pack_memmap(_saved(path), archive)
    return archive


def _h5(path: Path) -> Path:
    stored: Any = PersistentTensorDict
    stored.from_dict({"a": torch.zeros(3), "n": {"y": torch.ones(3, 2)}}, path / "x.h5").close()
    return path / "x.h5"


def plain(td: Any) -> Any:
    """Returns the expected result: files and their memory do not travel."""
    if isinstance(td, PersistentTensorDict):
        return td.to_tensordict()
    if isinstance(td, tensordict.LazyStackedTensorDict) or not any(map(is_mapped, td.values(True, True))):
        return td
    copied = td.apply(lambda leaf: leaf.as_subclass(torch.Tensor).clone())
    return copied.lock_() if td.is_locked else copied


def is_mapped(leaf: Any) -> bool:
    return isinstance(leaf, tensordict.MemoryMappedTensor)


@pytest.mark.parametrize("kind", MADE)
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning:tensordict.*")
def test_constructor_when_what_it_makes_is_stored_then_comes_out_equal(
    client: tdserve.Client, name: str, tmp_path: Path, kind: str
) -> None:
    td = MADE[kind](tmp_path)
    client.init_remote(td, name)
    expected = plain(td)
    if kind == "from_struct_array" or kind == "from_any struct array":
        expected = expected.clone()  # its tensors are views of the array's fields, with gaps
    assert_same(client.from_remote_init(name), expected)
    client.send(td, name)
    assert_same(client.load_memmap(name), expected)


def test_pytree_when_stored_then_is_one_again(client: tdserve.Client, name: str) -> None:
    tree = {"obs": torch.zeros(2), "pair": (torch.ones(1), [torch.zeros(())])}
    client.init_remote(make.from_pytree(tree), name)
    found = client.from_remote_init(name).to_pytree()
    assert type(found["pair"]) is tuple
    assert type(found["pair"][1]) is list
    assert found["pair"][0].equal(torch.ones(1))


def test_weights_when_they_come_back_then_go_into_a_module(client: tdserve.Client, name: str) -> None:
    module = linear()
    client.init_remote(make.from_module(module), name)
    other = seeded(lambda: nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))).requires_grad_()
    nn.init.zeros_(other[0].weight)
    found = client.from_remote_init(name)
    with found.to_module(other):
        assert torch.equal(other[0].weight, module[0].weight)  # type: ignore[index]
    assert not other[0].weight.any()


def test_content_when_it_comes_back_then_tensordicts_functions_take_it(
    client: tdserve.Client, name: str, tmp_path: Path
) -> None:
    client.init_remote(batches(3)[0], name)
    found = client.from_remote_init(name)
    local = batches(3)[0]
    assert_same(tensordict.pad(found, [0, 2], value=-1), tensordict.pad(local, [0, 2], value=-1))
    assert_same(torch.stack([found, local]), torch.stack([local, local]))
    assert_same(torch.cat([found, local]), torch.cat([local, local]))
    assert_same(
        tensordict.merge_tensordicts(found, TensorDict({"z": torch.ones(3)})), local.copy().set("z", torch.ones(3))
    )
    assert found.consolidate(tmp_path / "c")["x"].equal(local["x"])
    assert_same(tensordict.pad_sequence([found, local[:2]]), tensordict.pad_sequence([local, local[:2]]))
    client.init_remote(make.lazy_stack(rows(2, 2)), f"{name}-stack")
    stack = client.from_remote_init(f"{name}-stack")
    assert_same(tensordict.dense_stack_tds(stack), tensordict.dense_stack_tds(make.lazy_stack(rows(2, 2))))
    client.delete(f"{name}-stack")
