from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tensordict import TensorDict

from tdserve.base.errors import CorruptDataError
from tdserve.bench import content

POOLS = [
    (content.make_transitions, "reward", 84 * 8 + 24 + 4 + 1),
    (content.make_pixels, "action", 2 * 4 * 84 * 84 + 8 + 4 + 1),
]


@pytest.mark.parametrize(("make", "key", "nbytes"), POOLS)
def test_pool_when_made_then_a_row_has_the_size_of_the_plan_and_names_itself(
    make: Callable[[int], TensorDict], key: str, nbytes: int
) -> None:
    pool = make(8)
    assert content.compute_row_nbytes(pool) == nbytes
    assert pool.get(key).tolist() == list(range(8))


@pytest.mark.parametrize(("make", "key", "nbytes"), POOLS)
def test_check_rows_when_rows_come_in_any_order_with_more_keys_then_passes(
    make: Callable[[int], TensorDict], key: str, nbytes: int
) -> None:
    pool = make(8)
    batch = pool[torch.tensor([3, 3, 7])].clone()
    batch["index"] = torch.arange(3)
    content.check_rows(batch, pool, source_key=key, what="test")


def test_check_rows_when_one_byte_differs_then_names_the_key() -> None:
    pool = content.make_pixels(8)
    batch = pool[torch.tensor([3, 7])].clone()
    batch["next", "observation"][1, 0, 0, 0] += 1
    with pytest.raises(CorruptDataError, match=r"\('next', 'observation'\)"):
        content.check_rows(batch, pool, source_key="action", what="test")


def test_check_rows_when_a_row_is_of_no_pool_then_says_so() -> None:
    pool = content.make_transitions(8)
    batch = pool[:2].clone()
    batch["reward"][1] = 8.0
    with pytest.raises(CorruptDataError, match="rows 0 to 7"):
        content.check_rows(batch, pool, source_key="reward", what="test")


@pytest.mark.parametrize("changed", [{}, {"x": torch.zeros(3, dtype=torch.float64)}, {"x": torch.zeros(2)}])
def test_check_equal_when_a_leaf_is_missing_or_of_another_kind_then_refuses(changed: dict[str, torch.Tensor]) -> None:
    with pytest.raises(CorruptDataError):
        content.check_equal(TensorDict(changed, []), TensorDict({"x": torch.zeros(3)}, []), what="test")


def test_weights_when_made_then_have_the_number_and_bytes_asked_for() -> None:
    tree = content.make_weights(10, 4_000)
    assert len(content.list_tensors(tree)) == 10
    assert content.compute_total_nbytes(tree) == 4_000


def test_stamp_when_the_number_changes_then_no_tensor_stays_equal() -> None:
    tree = content.make_weights(3, 1_200)
    content.stamp(tree, 1)
    before = tree.clone()
    content.stamp(tree, 2)
    equal = [torch.equal(leaf, content.list_tensors(before)[key]) for key, leaf in content.list_tensors(tree).items()]
    assert equal == [False] * 3
