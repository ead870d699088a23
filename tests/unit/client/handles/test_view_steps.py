from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tdserve.base.errors import KeyNotFoundError, SelectionError
from tdserve.client.handles.view_steps import (
    INDEX_STEP,
    Step,
    compose_index,
    count_elements,
    make_grid,
    narrow_dims,
    spread,
)
from tdserve.messages.selection.selection import encode
from tdserve.messages.selection.torch_selection import to_torch_index

ROWS = torch.arange(6 * 4 * 5).reshape(6, 4, 5)

DIMS: list[tuple[Any, ...]] = [
    (range(6), range(4), range(5)),
    (range(2, 5), range(4), range(1, 3)),
    (3, range(4), range(5)),
    (range(1, 6), 2, range(5)),
    (range(0, 6, 2), range(1, 4), 4),
    (1, 2, 3),
]

INDICES: list[Any] = [
    (),
    0,
    -1,
    slice(1, None),
    slice(None, None, -1),
    [0, 1, 0],
    torch.tensor([[0, 1], [1, 0]]),
    (..., 0),
    (slice(None), [1, 0]),
    ([1, 0], [0, 1]),
    (None, 0),
    (..., None),
    True,
]


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("index", INDICES, ids=str)
def test_placed_when_dimensions_were_narrowed_then_selects_what_the_index_does_of_them(dims: Any, index: Any) -> None:
    sizes = [len(dim) for dim in dims if isinstance(dim, range)]
    mesh = np.ix_(*([*dim] if isinstance(dim, range) else [dim] for dim in dims))
    left = torch.from_numpy(ROWS.numpy()[mesh].reshape(sizes))
    try:
        selection = encode(index, batch_size=sizes)
    except SelectionError:  # fewer dimensions are left than it has items
        assert not sizes
        return
    expected = left[to_torch_index(selection, sizes)]
    found = encode(compose_index(dims, selection), batch_size=ROWS.shape)
    assert torch.equal(ROWS[to_torch_index(found, ROWS.shape)], expected)


def test_placed_when_masks_then_their_positions() -> None:
    dims = (range(2, 5), 1, range(5))
    left = ROWS[2:5, 1]
    for mask in [left % 2 == 0, left[:, 0] % 3 == 0]:
        found = encode(compose_index(dims, encode(mask, batch_size=left.shape)), batch_size=ROWS.shape)
        assert torch.equal(ROWS[to_torch_index(found, ROWS.shape)], left[mask])


def test_narrow_dims_when_again_then_of_what_is_left() -> None:
    dims = narrow_dims((range(6), range(4), range(5)), (slice(1, 5), 2))
    assert dims == (range(1, 5), 2, range(5))
    assert narrow_dims(dims, (1, slice(3, None))) == (2, 2, range(3, 5))
    assert count_elements(dims) == 20


def test_grid_when_arranged_then_spread_finds_the_elements() -> None:
    dims = (range(1, 5), 2, range(5))
    steps = [Step("select", ("a",), {}), Step("permute", (1, 0), {}), Step(INDEX_STEP, (slice(1, 3),), {})]
    grid = make_grid(dims, steps)
    expected = ROWS[1:5, 2].permute(1, 0)[1:3]
    assert torch.equal(ROWS[tuple(map(torch.as_tensor, spread(dims, grid.numpy())))], expected)


def test_step_when_a_key_is_missing_then_only_the_check_raises() -> None:
    td = TensorDict({"a": torch.zeros(2)}, [2])
    step = Step("select", ("a", "z"), {"strict": True})
    assert list(step.apply(td).keys()) == ["a"]
    with pytest.raises(KeyNotFoundError, match="'frames' has no key 'z'"):
        step.check(td, store="frames")
