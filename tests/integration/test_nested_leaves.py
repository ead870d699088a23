"""Nested tensors at a live server: masks of padded reads, leaves that are written later, one row, errors that name what
may differ."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from tensordict import TensorDict, lazy_stack

import tdserve
from tests.ragged import jagged, strided

pytestmark = pytest.mark.integration


def make_rows() -> tuple[TensorDict, TensorDict]:
    """A row of a table, and three rows for it."""
    row = TensorDict({"t": torch.zeros(4, dtype=torch.int64), "r": torch.zeros(2)})
    return row, TensorDict({"t": jagged([3, 0, 5]), "r": torch.rand(3, 2)}, [3])


@pytest.mark.parametrize("rows", [[0, 1], [1, 2], [0, 2], [0, 3], [0], 3, []])
def test_rows_when_padded_then_masks_follow_the_structure_and_not_the_sizes(
    client: tdserve.Client, name: str, rows: Any
) -> None:
    made = [
        TensorDict({"image": torch.ones(3, height, width), "t": torch.ones(size)})
        for height, width, size in ((2, 5, 4), (4, 5, 4), (4, 6, 3), (2, 5, 4))
    ]
    ragged: Any = {"image": (1, 2), "t": (0,)}
    table = client.create_replay(name, made[0], 9, ragged=ragged, sampler=tdserve.Fifo())
    table.extend(lazy_stack(made))
    found = table.get_at(["image", "t"], rows, pad=0)
    shape = found["image"].shape
    assert found["masks", "image"].shape == (*shape[:-3], *shape[-2:])
    assert found["masks", "t"].shape == found["t"].shape
    assert shape[-3] == 3
    assert table.get_at(["t"], [0, 3], pad={"image": 1})["masks", "t"].all()
    sampled = table.sample(2, pad=0)
    assert sampled["masks", "image"].shape == (2, 4, 5)


def test_view_when_padded_then_as_of_the_store(client: tdserve.Client, name: str) -> None:
    content = TensorDict({"t": jagged([2, 2]), "n": TensorDict({"u": jagged([2, 0], (2,))}, [2])}, [2])
    view = client.memmap(content, name).exclude("n")
    found = view.to_tensordict(pad=7, device="cpu")
    assert found["t"].tolist() == [part.tolist() for part in content["t"].unbind()]
    assert found["masks", "t"].tolist() == [[True, True]] * 2
    assert set(found.keys()) == {"t", "masks"}
    assert view.get("t", pad=0).shape == view.get_at("t", slice(0, 2), pad=0).shape == (2, 2)
    with view.batches(1, pad=0) as batches:
        assert [batch["masks", "t"].shape for batch in batches] == [(1, 2)] * 2


def test_leaves_when_written_where_rows_are_the_same_then_nested_ones_too(client: tdserve.Client, name: str) -> None:
    row, batch = make_rows()
    replay = client.create_replay(name, row, 50, ragged=["t"])
    index = replay.extend(batch)
    pieces = [torch.arange(size) for size in (2, 6, 0)]
    wanted = [piece.tolist() for piece in pieces]
    nested = (torch.nested.nested_tensor(pieces, layout=layout) for layout in (torch.jagged, torch.strided))
    for given in (*nested, pieces, [piece.numpy() for piece in pieces]):
        replay.set_at_("t", given, index)
        assert [part.tolist() for part in replay[index]["t"].unbind()] == wanted
        generations = replay.get_with_generations(index)[1]
        generations[1] += 1 << 20  # of another row
        replay.set_at_("t", torch.arange(1), index)
        written = replay.update_if_present(index, {"t": given}, generation=generations)
        assert written.tolist() == [True, False, True]
        assert [part.tolist() for part in replay[index]["t"].unbind()] == [wanted[0], [0], wanted[2]]
    with pytest.raises(tdserve.InvalidRequestError, match="one tensor at key 't' for 3 rows"):
        replay.update_if_present(index, {"t": torch.arange(3)}, generation=generations)


def test_extend_when_a_strided_nested_tensor_has_too_many_rows_or_one_then_stored(
    client: tdserve.Client, name: str
) -> None:
    row = TensorDict({"image": torch.zeros(3, 1, 1)})
    table = client.create_replay(name, row, 2, ragged={"image": (1, 2)})
    images = strided((3, 1, 2), (3, 2, 2), (3, 5, 1))
    assert table.extend(TensorDict({"image": images}, [3])).tolist() == [-1, 0, 1]
    assert [tuple(table[number]["image"].shape) for number in (0, 1)] == [(3, 2, 2), (3, 5, 1)]
    number = int(table.extend(TensorDict({"image": strided((3, 4, 4))}, [])))
    assert table[number]["image"].shape == (3, 4, 4)
    with pytest.raises(tdserve.SpecMismatchError, match="expected the tensor of one row, got nested tensor of 3"):
        table.extend(TensorDict({"image": images}, []))


@pytest.mark.parametrize(
    ("ragged", "wanted"), [(["image"], "(1, 2)"), ({"image": 1}, "(1, 2)"), ({"image": 2}, "(1, 2)")]
)
def test_extend_when_dimensions_differ_that_are_not_declared_then_the_error_names_them(
    client: tdserve.Client, name: str, ragged: Any, wanted: str
) -> None:
    table = client.create_replay(name, TensorDict({"image": torch.zeros(3, 1, 1)}), 9, ragged=ragged)
    images = [TensorDict({"image": torch.ones(3, height, height + 1)}) for height in (2, 4)]
    with pytest.raises(
        tdserve.SpecMismatchError, match=re.escape(f"create the table with ragged={{'image': {wanted}}}")
    ):
        table.extend(lazy_stack(images))
