"""tdserve/torchrl/table_rows.py: keys that the table needs for itself, and keys that rows lack."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

import tdserve

pytest.importorskip("torchrl")

from tdserve.structure.captures.capture import capture
from tdserve.torchrl.table_rows import complete_rows, from_table, iter_parts, split_sample, to_batch


def make_rows(num_rows: int = 2) -> TensorDict:
    return TensorDict({"x": torch.ones(num_rows), "n": {"y": torch.ones(num_rows, 3)}}, [num_rows])


def test_batch_when_it_has_keys_of_samples_then_they_come_back_but_the_index() -> None:
    rows = make_rows()
    rows["index"], rows["priority"] = torch.arange(2), torch.rand(2)
    batch = to_batch(rows, keeps_index=False)
    assert not {"index", "priority"} & set(batch.keys())
    assert set(rows.keys()) == {"x", "n", "index", "priority"}
    assert (from_table(batch)["priority"] == rows["priority"]).all()


def test_batch_when_it_is_a_tensor_or_a_list_then_comes_back_as_a_tensor() -> None:
    assert from_table(to_batch(torch.arange(3), keeps_index=False)).tolist() == [0, 1, 2]
    assert from_table(to_batch([torch.tensor(4), torch.tensor(5)], keeps_index=False)).tolist() == [4, 5]
    assert to_batch([make_rows()[0], make_rows()[1]], keeps_index=False).batch_size == (2,)
    with pytest.raises(tdserve.InvalidRequestError, match="dict"):
        to_batch({"x": torch.ones(2)}, keeps_index=False)


def test_sample_when_split_then_added_columns_are_apart() -> None:
    sample = make_rows()
    sample["index"], sample["generation"], sample["slice_end"] = torch.arange(2), torch.ones(2), torch.ones(2)
    index, added, rows = split_sample(sample, None)
    assert index.tolist() == [0, 1]
    assert set(added) == {"generation", "slice_end"}
    assert set(rows.keys()) == {"x", "n"}


class Table:
    """A table of rows like these; knows what was added to it."""

    def __init__(self, row: TensorDict) -> None:
        self.spec = capture(row, store="s").spec

    def add_leaves(self, like: TensorDict) -> None:
        self.spec = capture(like, store="s").spec


def test_rows_when_they_lack_keys_then_zeros_are_put_in() -> None:
    table = Table(make_rows()[0])
    whole = complete_rows(make_rows(4).exclude("n"), table, fills=True)
    assert whole["n", "y"].shape == (4, 3)
    assert not whole["n", "y"].any()
    assert set(complete_rows(make_rows().exclude("x"), table, fills=False).keys(True, True)) == {("n", "y")}
    same = make_rows()
    assert complete_rows(same, table, fills=True) is same


def test_rows_when_they_have_further_keys_then_the_table_gets_them() -> None:
    table = Table(make_rows()[0])
    rows = make_rows()
    rows["n", "z"] = torch.ones(2)
    assert complete_rows(rows, table, fills=True) is rows
    assert table.spec.leaf_paths == (("n", "y"), ("n", "z"), ("x",))


def test_parts_when_a_nested_part_lacks_keys_then_its_keys_are_apart() -> None:
    rows = make_rows()
    whole = capture(rows[0], store="s").spec
    assert [path for path, _ in iter_parts(rows, whole)] == [("x",), ("n",)]
    rows["n", "z"] = torch.ones(2)
    wider = capture(rows[0], store="s").spec
    assert [path for path, _ in iter_parts(make_rows(), wider)] == [("x",), ("n", "y")]
