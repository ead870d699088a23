from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tensordict import TensorDict

from tdserve.base.errors import CorruptDataError
from tdserve.bench import workload_data
from tdserve.bench.figures import Scale

POOLS = [
    (workload_data.make_transitions, "reward", 84 * 8 + 24 + 4 + 1, Scale("rows/s", 4)),
    (workload_data.make_pixels, "action", 2 * 4 * 84 * 84 + 8 + 4 + 1, Scale("GB/s", 4 * 56_461 / 1e9)),
]


@pytest.mark.parametrize(("make", "key", "nbytes", "rate"), POOLS)
def test_pool_when_made_then_a_row_has_the_size_of_the_plan_and_names_itself(
    make: Callable[[int], workload_data.Pool], key: str, nbytes: int, rate: Scale
) -> None:
    pool = make(8)
    assert pool.row_nbytes == nbytes
    assert pool.make_rate(4) == rate
    assert pool.rows.get(key).tolist() == list(range(8))


def test_batches_when_taken_on_and_on_then_start_again_and_are_always_whole() -> None:
    batches = workload_data.make_transitions(5).iter_batches(2)
    assert [next(batches)["reward"].tolist() for _ in range(3)] == [[0, 1], [2, 3], [0, 1]]


@pytest.mark.parametrize("make", [workload_data.make_transitions, workload_data.make_pixels])
def test_check_when_rows_come_in_any_order_with_more_keys_then_passes(
    make: Callable[[int], workload_data.Pool],
) -> None:
    pool = make(8)
    batch = pool.rows[torch.tensor([3, 3, 7])].clone()
    batch["index"] = torch.arange(3)
    pool.check(batch)


def test_check_when_one_byte_differs_then_names_the_key() -> None:
    pool = workload_data.make_pixels(8)
    batch = pool.rows[torch.tensor([3, 7])].clone()
    batch["next", "observation"][1, 0, 0, 0] += 1
    with pytest.raises(CorruptDataError, match=r"\('next', 'observation'\)"):
        pool.check(batch)


def test_check_when_a_row_is_of_no_pool_then_corrupt_data_names_the_rows() -> None:
    pool = workload_data.make_transitions(8)
    batch = pool.rows[:2].clone()
    batch["reward"][1] = 8.0
    with pytest.raises(CorruptDataError, match="rows 0 to 7"):
        pool.check(batch)


@pytest.mark.parametrize("changed", [{}, {"x": torch.zeros(3, dtype=torch.float64)}, {"x": torch.zeros(2)}])
def test_check_equal_when_a_leaf_is_missing_or_of_another_kind_then_refuses(changed: dict[str, torch.Tensor]) -> None:
    with pytest.raises(CorruptDataError):
        workload_data.check_equal(TensorDict(changed, []), TensorDict({"x": torch.zeros(3)}, []), what="test")


def test_weights_when_made_then_have_the_number_and_bytes_asked_for() -> None:
    tree = workload_data.make_weights(10, 4_000)
    assert len(workload_data.list_tensors(tree)) == 10
    assert workload_data.compute_nbytes(tree) == 4_000


def test_stamp_when_the_number_changes_then_no_tensor_stays_equal() -> None:
    tree = workload_data.make_weights(3, 1_200)
    workload_data.stamp(tree, 1)
    before = tree.clone()
    workload_data.stamp(tree, 2)
    equal = [
        torch.equal(leaf, workload_data.list_tensors(before)[key])
        for key, leaf in workload_data.list_tensors(tree).items()
    ]
    assert equal == [False] * 3
