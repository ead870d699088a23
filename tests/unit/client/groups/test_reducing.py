from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict

from tdserve.base.errors import InvalidRequestError, NotSupportedError, SpecMismatchError
from tdserve.client.groups.reducing import Reducing, find_first_of_memory, parse_operation
from tdserve.messages.layout import LARGE_LEAF_BYTES

NUM_LARGE = LARGE_LEAF_BYTES // 4
ROWS = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)


def leaves() -> TensorDict:
    """Leaves of two dtypes, small and large, contiguous or not."""
    return TensorDict(
        {
            "a": torch.ones(3),
            "b": {"c": torch.ones(2, 4).T},
            "int": torch.ones(5, dtype=torch.int64),
            "large": torch.ones(NUM_LARGE),
            "strided": torch.ones(NUM_LARGE, 2)[:, 1],
        }
    )


def test_flats_when_leaves_are_small_then_together_by_dtype_and_large_ones_apart() -> None:
    flats = Reducing(leaves(), "sum", name="g").make_flats()
    assert [(flat.dtype, flat.numel()) for flat in flats] == [
        (torch.float32, NUM_LARGE),
        (torch.float32, NUM_LARGE),
        (torch.float32, 11),
        (torch.int64, 5),
    ]


def test_flats_when_cut_then_alike_however_the_leaves_lie() -> None:
    here, there = (Reducing(td, "max", name="g").make_flats() for td in (leaves(), leaves().contiguous().clone()))
    assert [flat.shape for flat in here] == [flat.shape for flat in there]


def test_finish_when_flats_have_changed_then_every_leaf_has() -> None:
    td = leaves()
    pointer = td["large"].data_ptr()
    reducing = Reducing(td, "sum", name="g")
    for number, flat in enumerate(reducing.make_flats()):
        assert number > 0 or flat.data_ptr() == pointer
        flat.copy_(torch.arange(flat.numel()))
    reducing.finish(4)
    assert td["a"].tolist() == [0, 1, 2]
    assert td["b", "c"].reshape(-1).tolist() == list(range(3, 11))
    assert td["int"].tolist() == list(range(5))
    assert torch.equal(td["strided"], torch.arange(NUM_LARGE).float())


def test_finish_when_a_mean_then_divided_by_the_members() -> None:
    td = TensorDict({"x": torch.full((3,), 6.0)})
    reducing = Reducing(td, "mean", name="g")
    reducing.make_flats()
    reducing.finish(4)
    assert td["x"].tolist() == [1.5] * 3


@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("num", [5, NUM_LARGE])
def test_finish_when_leaves_share_memory_then_each_is_reduced_once_and_divided_as_where_they_do_not(
    op: str, num: int
) -> None:
    shared = torch.full((2 * num,), 3.0)
    td = TensorDict({"a": shared[:num], "b": shared[: num + 1], "c": shared[num:], "same": shared[:num]})
    apart = TensorDict({key: value.clone() for key, value in td.items()})
    reducing, other = Reducing(td, op, name="g"), Reducing(apart, op, name="g")
    flats, others = reducing.make_flats(), other.make_flats()
    assert [flat.shape for flat in flats] == [flat.shape for flat in others]
    for flat, there in zip(flats, others, strict=True):
        flat += there
    reducing.finish(2)
    assert set(shared.tolist()) == {6.0 if op == "sum" else 3.0}


def test_firsts_when_memory_is_connected_then_only_the_first_leaf_of_it() -> None:
    memory = torch.zeros(100)
    leaves = [memory[50:60], memory[20:30], memory[:10], memory[5:25], torch.zeros(4), memory[:10], memory[60:70]]
    assert find_first_of_memory(leaves) == [True, True, False, False, True, False, True]
    assert find_first_of_memory([]) == []


@pytest.mark.parametrize(
    ("td", "op", "error"),
    [
        (TensorDict({"x": torch.ones(1)}), "avg", InvalidRequestError),
        (TensorDict({"x": torch.ones(1, dtype=torch.int8)}), "mean", NotSupportedError),
        (TensorDict({"x": torch.ones(1, dtype=torch.bool)}), "sum", NotSupportedError),
        (TensorDict({"x": torch.ones(1, dtype=torch.complex64)}), "min", NotSupportedError),
        (TensorDict({"x": torch.ones(1).to(torch.float8_e4m3fn)}), "max", NotSupportedError),
        (TensorDict({"x": torch.ones(1, dtype=torch.uint16)}), "sum", NotSupportedError),
        (TensorDict({"x": torch.ones(1).expand(4)}), "sum", NotSupportedError),
        (TensorDict({"x": ROWS}, [2]), "sum", NotSupportedError),
    ],
)
def test_reducing_when_it_cannot_be_done_then_typed_error(td: TensorDict, op: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        Reducing(td, op, name="g")


def test_check_when_another_structure_then_names_the_key() -> None:
    reducing = Reducing(TensorDict({"x": torch.ones(1)}), "sum", name="g")
    reducing.check(reducing.spec)
    with pytest.raises(SpecMismatchError):
        reducing.check(Reducing(TensorDict({"x": torch.ones(2)}), "sum", name="g").spec)


def test_operation_when_it_is_one_of_torch_distributed_then_as_its_name() -> None:
    of_torch = dist.ReduceOp
    ops = (of_torch.SUM, of_torch.PRODUCT, of_torch.AVG, of_torch.MAX, of_torch.MIN, "mean", "other")
    assert [parse_operation(op) for op in ops] == ["sum", "product", "mean", "max", "min", "mean", "other"]
    with pytest.raises(InvalidRequestError, match="BAND"):
        Reducing(leaves(), parse_operation(of_torch.BAND), name="g")
