"""Rows with nested tensors on three servers: written, changed and read as on one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict, lazy_stack

import tdserve
from tests.ragged import jagged, strided

pytestmark = pytest.mark.integration

NUM_ROWS = 9
PIECES = [torch.full((size,), float(size)) for size in (2, 0, 5, 1, 3, 3, 1, 4, 2)]
SIZES = [
    (3, height, width) for height, width in ((2, 5), (4, 5), (4, 6), (2, 5), (1, 1), (3, 2), (2, 2), (7, 1), (1, 4))
]

FORMS: dict[str, Any] = {
    "jagged": lambda: torch.nested.nested_tensor(PIECES, layout=torch.jagged),
    "strided": lambda: torch.nested.as_nested_tensor(PIECES),
    "listed": lambda: PIECES,
    "arrays": lambda: [piece.numpy() for piece in PIECES],
}


def create(client: tdserve.ClusterClient, name: str) -> tuple[Any, torch.Tensor]:
    """A table of which every server has some rows, and their numbers."""
    row = TensorDict({"key": torch.tensor(0), "v": torch.zeros(1), "n": TensorDict({"w": torch.zeros(1)})})
    table: Any = client.create_replay(name, row, 60, ragged=["v", ("n", "w")], shards="all", shard_by="key")
    index = table.extend(TensorDict({"key": torch.arange(NUM_ROWS)}, [NUM_ROWS]))
    assert len((index // table.part_capacity).unique()) == 3
    return table, index


def read(table: Any, index: Any) -> list[list[float]]:
    return [piece.tolist() for piece in table.get_at("v", index).unbind()]


@pytest.mark.parametrize("form", FORMS)
def test_leaves_when_written_later_in_any_form_then_each_row_has_its_own(
    user: tdserve.ClusterClient, name: str, form: str
) -> None:
    table, index = create(user, name)
    wanted = [piece.tolist() for piece in PIECES]
    table.set_at_("v", FORMS[form](), index)
    assert read(table, index) == wanted
    order = index.flip(0)
    generations = table.get_with_generations(order)[1]
    given = {"v": FORMS[form](), "n": {"w": FORMS[form]()}}
    assert table.update_if_present(order, given, generation=generations).all()
    assert read(table, order) == wanted
    assert [piece.tolist() for piece in table[order]["n", "w"].unbind()] == wanted


def test_leaves_when_one_tensor_is_written_to_all_rows_then_not_divided(
    client: tdserve.ClusterClient, name: str
) -> None:
    table, index = create(client, name)
    table.set_at_("v", torch.arange(float(NUM_ROWS)), index)  # of as many elements as there are rows
    assert read(table, index) == [list(range(NUM_ROWS))] * NUM_ROWS
    generations = table.get_with_generations(index)[1]
    with pytest.raises(tdserve.InvalidRequestError, match="one tensor at key 'v' for 9 rows"):
        table.update_if_present(index, {"v": torch.arange(float(NUM_ROWS))}, generation=generations)


def test_leaves_when_values_are_as_many_as_one_server_has_then_refused(
    client: tdserve.ClusterClient, name: str
) -> None:
    table, index = create(client, name)
    num_values = int(((index // table.part_capacity) == 0).sum())
    with pytest.raises(tdserve.SpecMismatchError, match=r"expected int64\[9\], got int64"):
        table.set_at_("key", torch.zeros(num_values, dtype=torch.int64) if num_values > 1 else torch.zeros(2), index)
    assert table.get_at("key", index).tolist() == list(range(NUM_ROWS))


def test_rows_when_a_strided_nested_tensor_is_divided_by_key_then_read_as_given(
    user: tdserve.ClusterClient, name: str
) -> None:
    row = TensorDict({"key": torch.tensor(0), "image": torch.zeros(3, 1, 1)})
    images = strided(*SIZES)
    given = TensorDict({"key": torch.arange(NUM_ROWS), "image": images}, [NUM_ROWS])
    for number, ragged in enumerate(({"image": (1, 2)}, None)):  # declared, or by the first batch
        table: Any = user.create_replay(f"{name}-{number}", row, 60, ragged=ragged, shards="all", shard_by="key")
        index = table.extend(given)
        assert len((index // table.part_capacity).unique()) > 1
        found = table[index.flip(0)]
        assert found["key"].tolist() == list(range(NUM_ROWS))[::-1]
        for at, wanted in enumerate(reversed(images.unbind())):
            assert torch.equal(found[at]["image"], wanted)


@pytest.mark.parametrize("rows", [[0, 1], [1, 2], [0, 3], [5], 2, [], [[0, 1], [2, 3]]])
def test_reads_when_padded_then_the_structure_decides_what_has_a_mask(
    client: tdserve.ClusterClient, name: str, rows: Any
) -> None:
    row = TensorDict({"key": torch.tensor(0), "image": torch.zeros(3, 1, 1), "t": torch.zeros(1)})
    made = [
        TensorDict({"key": torch.tensor(number), "image": torch.ones(size), "t": torch.ones(4)})
        for number, size in enumerate(SIZES)
    ]
    ragged: Any = {"image": (1, 2), "t": (0,)}
    table: Any = client.create_replay(name, row, 60, ragged=ragged, shards="all", shard_by="key")
    index = table.extend(lazy_stack(made))[torch.tensor(rows, dtype=torch.int64)]
    found = table.get_at(["image", "t"], index, pad={"image": 7, "t": 0})
    shape = found["image"].shape
    assert found["masks", "image"].shape == (*index.shape, *shape[-2:])
    assert found["masks", "t"].shape == found["t"].shape == (*index.shape, 4 if index.numel() else 0)
    assert found["masks", "image"].all() == (found["image"] == 1).all()


def test_dataset_when_it_has_nested_tensors_then_divided_written_and_read(
    user: tdserve.ClusterClient, name: str
) -> None:
    images = strided(*SIZES)
    content = TensorDict({"image": images, "t": jagged([3, 0, 5, 1, 2, 2, 4, 1, 6])}, [NUM_ROWS])
    dataset: Any = user.memmap(content, name, shards="all")
    order = [8, 0, 4, 4]
    assert [tuple(piece.shape) for piece in dataset[order]["image"].unbind()] == [SIZES[number] for number in order]
    assert [len(piece) for piece in dataset.get_at("t", order).unbind()] == [6, 3, 2, 2]
    assert [len(piece) for piece in dataset.get("t").unbind()] == [3, 0, 5, 1, 2, 2, 4, 1, 6]
    dataset.set_at_("t", [torch.arange(size) for size in (1, 2, 3)], [8, 0, 4])
    dataset.set_at_("t", jagged([7, 8]), [1, 7])
    dataset[2:6] = TensorDict({"image": strided(*SIZES[:4]), "t": jagged([9, 9, 9, 9])}, [4])
    padded = dataset.to_tensordict(pad=0)
    assert padded["masks", "t"].sum(1).tolist() == [2, 7, 9, 9, 9, 9, 4, 8, 1]
    assert padded["masks", "image"].shape == (NUM_ROWS, 3, 7, 6)


def test_entries_when_given_as_a_nested_tensor_then_each_key_has_its_own(
    client: tdserve.ClusterClient, name: str
) -> None:
    table = client.create_kv(name, shards="all")
    keys = [f"key {number}" for number in range(NUM_ROWS)]
    table.put(keys, torch.nested.as_nested_tensor(PIECES))
    assert [value.tolist() for value in table.get(keys)] == [piece.tolist() for piece in PIECES]
    table.put(keys, TensorDict({"image": strided(*SIZES)}, [NUM_ROWS]))
    assert [tuple(value["image"].shape) for value in table.get(keys)] == SIZES
