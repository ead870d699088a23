"""Files of JSON lines: which columns they have, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tdserve.base.errors import InvalidRequestError
from tdserve.imports.formats import open_source
from tdserve.imports.import_source import ImportOptions


def write(path: Path, *rows: Any) -> str:
    """Writes a line for each row."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return str(path)


def read(path: str, *keys: tuple[str, ...], max_rows: int = 100) -> list[tuple[int, dict[str, Any]]]:
    """Returns the pieces of a file."""
    with open_source("jsonl", path, ImportOptions(keys)) as source:
        found = list(source.iter_batches(max_rows))
        assert sum(num_rows for num_rows, _ in found) == source.num_rows
        return found


def test_columns_when_read_then_as_json_has_them(tmp_path: Path) -> None:
    rows = [
        {"i": 1, "f": 0.5, "b": True, "t": "a", "n": {"x": [1, 2], "y": {"z": 1}}, "r": [1.5], "m": [[1, 2], [3, 4]]},
        {"i": -2, "f": 3, "b": False, "t": None, "n": {"x": [3, 4], "y": {"z": 2}}, "r": [], "m": [[5, 6], [7, 8]]},
    ]
    ((num_rows, found),) = read(write(tmp_path / "rows.jsonl", *rows))
    assert num_rows == 2
    assert (found["i"].dtype, found["i"].tolist()) == (np.int64, [1, -2])
    assert (found["f"].dtype, found["f"].tolist()) == (np.float64, [0.5, 3.0])
    assert (found["b"].dtype, found["b"].tolist()) == (np.bool_, [True, False])
    assert (found["t"].dtype, found["t"].tolist()) == (np.object_, ["a", None])
    assert found["n"]["x"].tolist() == [[1, 2], [3, 4]]
    assert found["n"]["y"]["z"].tolist() == [1, 2]
    assert isinstance(found["r"], torch.Tensor)
    assert [row.tolist() for row in found["r"].unbind()] == [[1.5], []]
    assert found["m"].shape == (2, 2, 2)


@pytest.mark.parametrize(
    "values",
    [
        [1, "a"],
        [2**70, 1],
        [[2**70], [1]],
        [[1, "a"], [2]],
        [[[1], [2, 3]], [[4]]],
        [[[1.0, 1.0]], [[1.0, 1.0]] * 2],
        [[{"role": "user"}], []],
        [{"a": 1}, [1]],
        [[1], 1],
        [[], []],
        [True, 1],
        ["é", None],
        [1, None],
        [None, True],
        [[1.5], None],
        [[1, None], [2, 3]],
        [None, None],
    ],
)
def test_column_when_no_tensor_holds_it_then_its_values_stay_what_they_are(tmp_path: Path, values: list[Any]) -> None:
    ((_, found),) = read(write(tmp_path / "rows.jsonl", *({"x": value} for value in values)))
    assert found["x"].dtype == np.object_
    assert list(found["x"]) == values


def test_null_when_among_fractions_then_nan(tmp_path: Path) -> None:
    rows = [{"f": 1.0, "l": [None, 0.5], "n": {"g": 1.5}}, {"f": None, "l": [1.0, 2.0], "n": None}, {"l": [3.0, 4.0]}]
    ((_, found),) = read(write(tmp_path / "rows.jsonl", *rows))
    assert [math.isnan(each) for each in found["f"]] == [False, True, True]
    assert math.isnan(found["l"][0, 0])
    assert [math.isnan(each) for each in found["n"]["g"]] == [False, True, True]


@pytest.mark.parametrize("value", [1, True, [1.0], "a"])
def test_key_when_it_comes_late_then_rows_before_have_none(tmp_path: Path, value: Any) -> None:
    path = write(tmp_path / "late.jsonl", {"y": 1}, {"y": 2, "n": {"x": value}}, {"y": 3, "n": None})
    found = [piece for _, piece in read(path, max_rows=1)]
    assert [list(piece["n"]["x"]) for piece in found] == [[None], [value], [None]]
    assert {piece["n"]["x"].dtype for piece in found} == {np.dtype(np.object_)}
    assert {piece["y"].dtype for piece in found} == {np.dtype(np.int64)}


def test_file_when_rows_are_many_or_large_then_read_in_pieces_of_one_kind(tmp_path: Path) -> None:
    rows = [{"x": number, "text": "a" * (20_000 if number == 50 else 1)} for number in range(100)]
    found = read(write(tmp_path / "rows.jsonl", *rows), max_rows=40)
    assert [number for _, piece in found for number in piece["x"].tolist()] == list(range(100))
    assert [num_rows for num_rows, _ in found] == [40, 11, 40, 9]
    with open_source("jsonl", str(tmp_path / "rows.jsonl"), ImportOptions()) as source:
        assert source.row_nbytes == (tmp_path / "rows.jsonl").stat().st_size // 100


def test_file_when_wrong_then_the_error_names_the_line_or_key(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    for text, match in (
        ('{"x": 1}\n\n{"x"', "line 3 is no JSON"),
        ('{"x": 1}\n[1]\n', "line 2 is no object, but has a list"),
        ('{"x": "\xff"}', "line 1 is no JSON"),
        ("[" * 100_000, "line 1 is no JSON"),
        ("\n \n", "there are no rows"),
        ("{}\n{}\n", "has no columns"),
    ):
        path.write_bytes(text.encode("latin-1"))
        with pytest.raises(InvalidRequestError, match=match):
            read(str(path))
    with pytest.raises(InvalidRequestError, match="has no y: x"):
        read(write(path, {"x": 1}), ("y",))
    with pytest.raises(InvalidRequestError, match="there is no such file"):
        read(str(tmp_path / "absent.jsonl"))
    with pytest.raises(InvalidRequestError, match="it is a folder"):
        read(str(tmp_path))


def test_file_when_it_begins_with_a_mark_and_has_other_line_ends_then_read(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b'\xef\xbb\xbf{"x": 1}\r\n{"x": 2}')
    assert read(str(tmp_path / "rows.jsonl"))[0][1]["x"].tolist() == [1, 2]
