"""tdserve/torchrl/table_rows.py: keys that the table needs for itself, and keys that rows lack."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

import tdserve

pytest.importorskip("torchrl")

from tdserve.structure.capture import capture
from tdserve.torchrl.table_rows import complete_rows, from_table, split_sample, to_batch


def make_rows(num_rows: int = 2) -> TensorDict:
    return TensorDict({"x": torch.ones(num_rows), "n": {"y": torch.ones(num_rows, 3)}}, [num_rows])


def test_batch_when_it_has_keys_of_samples_then_they_come_back_but_the_index() -> None:
    rows = make_rows()
    rows["index"], rows["priority"] = torch.arange(2), torch.rand(2)
    batch = to_batch(rows)
    assert not {"index", "priority"} & set(batch.keys())
    assert set(rows.keys()) == {"x", "n", "index", "priority"}
    assert (from_table(batch)["priority"] == rows["priority"]).all()


def test_batch_when_it_is_a_tensor_or_a_list_then_comes_back_as_a_tensor() -> None:
    assert from_table(to_batch(torch.arange(3))).tolist() == [0, 1, 2]
    assert from_table(to_batch([torch.tensor(4), torch.tensor(5)])).tolist() == [4, 5]
    assert to_batch([make_rows()[0], make_rows()[1]]).batch_size == (2,)
    with pytest.raises(tdserve.InvalidRequestError, match="dict"):
        to_batch({"x": torch.ones(2)})


def test_sample_when_split_then_added_columns_are_apart() -> None:
    sample = make_rows()
    sample["index"], sample["generation"], sample["slice_end"] = torch.arange(2), torch.ones(2), torch.ones(2)
    index, added, rows = split_sample(sample)
    assert index.tolist() == [0, 1]
    assert set(added) == {"generation", "slice_end"}
    assert set(rows.keys()) == {"x", "n"}


def test_rows_when_they_lack_keys_then_zeros_are_put_in() -> None:
    spec = capture(make_rows()[0], store="s").spec
    whole = complete_rows(make_rows(4).exclude("n"), spec, name="s", fills=True)
    assert whole["n", "y"].shape == (4, 3)
    assert not whole["n", "y"].any()
    assert set(complete_rows(make_rows().exclude("x"), spec, name="s", fills=False).keys(True, True)) == {("n", "y")}
    same = make_rows()
    assert complete_rows(same, spec, name="s", fills=True) is same


def test_rows_when_they_have_further_keys_then_are_refused() -> None:
    spec = capture(make_rows()[0], store="s").spec
    rows = make_rows()
    rows["n", "z"] = torch.ones(2)
    with pytest.raises(tdserve.SpecMismatchError, match="n/z"):
        complete_rows(rows, spec, name="s", fills=True)
