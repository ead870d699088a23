"""tdserve/exports/file_formats.py: formats by name, and what each refuses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tdserve.base.errors import InvalidRequestError, NotSupportedError
from tdserve.exports.column_spool import ColumnSpool
from tdserve.exports.content_columns import Columns
from tdserve.exports.file_formats import WRITERS, find_format


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.npz", "npz"),
        ("a.NPZ", "npz"),
        ("a.npy", "npy"),
        ("a.safetensors", "safetensors"),
        ("a.h5", "hdf5"),
        ("a.hdf5", "hdf5"),
        ("a.pt", "pt"),
        ("a.pth", "pt"),
        ("a.jsonl", "jsonl"),
        ("a", "memmap"),
    ],
)
def test_format_when_the_name_ends_so_then_that(tmp_path: Path, name: str, kind: str) -> None:
    assert find_format(tmp_path / name) == kind
    assert kind in WRITERS


def test_format_when_it_is_a_folder_then_memmap_whatever_its_name(tmp_path: Path) -> None:
    (tmp_path / "v1.5").mkdir()
    assert find_format(tmp_path / "v1.5") == "memmap"


def test_format_when_there_is_none_then_lists_them(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"\.npz, \.npy, \.safetensors, \.h5"):
        find_format(tmp_path / "a.csv")


@pytest.mark.parametrize("kind", sorted(WRITERS))
def test_writer_when_a_value_is_of_another_type_then_refused_by_its_key(tmp_path: Path, kind: str) -> None:
    with pytest.raises(NotSupportedError, match="'odd'"):
        WRITERS[kind](tmp_path / "made", {("odd",): [1j, 2j]}, 2)


@pytest.mark.parametrize("kind", sorted({*WRITERS} - {"pt", "npy"}))
@pytest.mark.parametrize("part", ["a/b", "..", ".", "", "a\0b"])
def test_writer_when_a_key_is_no_name_of_a_file_then_refused(tmp_path: Path, kind: str, part: str) -> None:
    with pytest.raises(InvalidRequestError, match="invalid key"):
        WRITERS[kind](tmp_path / "made", {("x", part): torch.zeros(2)}, 2)
    assert list(tmp_path.iterdir()) == []


FLOAT8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu)


@pytest.mark.parametrize(
    ("kind", "dtype"), [("safetensors", torch.complex128), *(("memmap", dtype) for dtype in FLOAT8)]
)
def test_writer_when_the_format_lacks_a_dtype_then_refused_by_its_key_and_nothing_is_written(
    tmp_path: Path, kind: str, dtype: torch.dtype
) -> None:
    columns: Columns = {("good",): torch.zeros(2), ("n", "odd"): torch.zeros(2).to(dtype)}
    with pytest.raises(NotSupportedError, match=f"key 'n/odd' .* it is of {str(dtype)[6:]}, .* write .pt"):
        WRITERS[kind](tmp_path / "made", columns, 2)
    assert list(tmp_path.iterdir()) == []
    WRITERS["pt"](tmp_path / "made.pt", columns, 2)
    assert torch.load(tmp_path / "made.pt", weights_only=True)["n"]["odd"].dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.complex64])
def test_safetensors_when_it_has_the_dtype_then_written_as_it_is(tmp_path: Path, dtype: torch.dtype) -> None:
    WRITERS["safetensors"](tmp_path / "made", {("a",): torch.zeros(2).to(dtype)}, 2)
    assert load_file(tmp_path / "made")["a"].dtype == dtype


@pytest.mark.parametrize("key", [("shape",), ("n", "device"), ("_type", "a")])
def test_memmap_when_tensordict_would_lose_a_key_then_refused(tmp_path: Path, key: tuple[str, ...]) -> None:
    with pytest.raises(InvalidRequestError, match=r"tensordict loses .* write .pt"):
        WRITERS["memmap"](tmp_path / "made", {key: torch.zeros(2)}, 2)
    assert list(tmp_path.iterdir()) == []


def test_jsonl_when_there_are_no_rows_then_refused_without_the_name_of_a_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"invalid path: a .jsonl file has a line for each row"):
        WRITERS["jsonl"](tmp_path / "made.jsonl", {("a",): torch.zeros(2)}, None)


def test_npz_when_numpy_lacks_the_dtype_then_float32(tmp_path: Path) -> None:
    WRITERS["npz"](tmp_path / "made.npz", {("a",): torch.ones(2, dtype=torch.bfloat16)}, 2)
    assert np.load(tmp_path / "made.npz")["a"].dtype == np.float32


def test_npy_when_there_are_several_keys_then_refused_by_their_names(tmp_path: Path) -> None:
    columns: Columns = {("n", f"k{number}"): torch.zeros(2) for number in range(20)}
    with pytest.raises(InvalidRequestError, match=r"n/k0, .*, n/k7, \.\.\.; choose one by key"):
        WRITERS["npy"](tmp_path / "made.npy", columns, 2)
    assert list(tmp_path.iterdir()) == []


LONG = ["x" * 10**6, *99 * "y"]


@pytest.mark.parametrize(("kind", "texts"), [("npz", ["a\0", "b"]), ("hdf5", ["a\0b", "c"]), ("npz", LONG)])
def test_writer_when_texts_would_change_or_explode_then_refused_by_their_key(
    tmp_path: Path, kind: str, texts: list[str]
) -> None:
    with pytest.raises(NotSupportedError, match="key 'text'"):
        WRITERS[kind](tmp_path / "file", {("text",): texts}, len(texts))


def refuse_constant(name: str) -> None:
    pytest.fail(f"{name} is no JSON")


def test_jsonl_when_numbers_are_not_finite_then_null_which_strict_readers_take(tmp_path: Path) -> None:
    nan, inf = float("nan"), float("inf")
    columns: Columns = {
        ("number",): torch.tensor([1.5, nan, inf]),
        ("half",): torch.tensor([[1.0, -inf]] * 3, dtype=torch.bfloat16),
        ("rows",): [torch.ones(1), torch.tensor([nan, 2.0]), torch.ones(0)],
        ("deep", "chat"): [[{"score": nan, "at": 1}], "ä", None],
    }
    WRITERS["jsonl"](tmp_path / "made.jsonl", columns, 3)
    lines = (tmp_path / "made.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(line, parse_constant=refuse_constant) for line in lines] == [
        {"number": 1.5, "half": [1.0, None], "rows": [1.0], "deep": {"chat": [{"score": None, "at": 1}]}},
        {"number": None, "half": [1.0, None], "rows": [None, 2.0], "deep": {"chat": "ä"}},
        {"number": None, "half": [1.0, None], "rows": [], "deep": {"chat": None}},
    ]


def test_pt_when_leaves_without_elements_lie_at_the_place_of_others_then_written(tmp_path: Path) -> None:
    memory = np.arange(6.0)
    empty, whole = torch.from_numpy(memory[:0]), torch.from_numpy(memory).view(torch.int64)
    assert empty.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    columns: Columns = {("a",): empty, ("b",): whole, ("rows",): [torch.from_numpy(memory[:0]), torch.ones(2)]}
    WRITERS["pt"](tmp_path / "made.pt", columns, None)
    found = torch.load(tmp_path / "made.pt", weights_only=True)
    assert torch.equal(found["b"], whole)
    assert (found["a"].shape, found["a"].dtype) == ((0,), torch.float64)
    assert [len(row) for row in found["rows"]] == [0, 2]


def test_spool_when_a_row_is_a_column_of_a_larger_tensor_then_its_content(tmp_path: Path) -> None:
    with ColumnSpool(tmp_path) as spool:
        spool.append({("a",): torch.tensor([[1, 2]])[:, 0]}, 1)
        assert spool.finish()["a",].tolist() == [1]
