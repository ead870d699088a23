"""tdserve/imports/import_source.py: columns of a file as rows."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from tdserve.base.errors import InvalidRequestError, NotSupportedError
from tdserve.imports.import_source import (
    ColumnSource,
    ImportOptions,
    ImportSource,
    SourceColumn,
    make_missing_package_error,
    make_value_array,
    split_key,
)


def make_column(name: str, array: Any) -> SourceColumn:
    """A column of an array in memory."""
    return SourceColumn(
        split_key(name), array.shape, array.nbytes, lambda start, stop: array[start:stop], lambda: array
    )


def make_source(options: ImportOptions = ImportOptions(), **arrays: Any) -> tuple[ColumnSource, list[str]]:  # noqa: B008
    """A source of arrays, and what is filled when it is closed."""
    closed: list[str] = []
    columns = [make_column(name.replace("__", "/"), array) for name, array in arrays.items()]
    return ColumnSource("file", columns, options, partial(closed.append, "closed")), closed


def test_rows_when_read_in_batches_then_nested_and_in_order() -> None:
    source, closed = make_source(obs__x=np.arange(7), y=np.ones((7, 2)))
    assert (source.num_rows, source.row_nbytes) == (7, 24)
    with source:
        found = list(source.iter_batches(3))
        assert [num_rows for num_rows, _ in found] == [3, 3, 1]
        assert [batch["obs"]["x"].tolist() for _, batch in found] == [[0, 1, 2], [3, 4, 5], [6]]
        assert found[2][1]["y"].shape == (1, 2)
        assert not closed
    assert closed == ["closed"]


def test_columns_when_chosen_by_key_then_only_these_must_have_the_same_rows() -> None:
    chosen = ImportOptions(keys=[("obs",), ("z",)])
    source, _ = make_source(chosen, obs__x=np.arange(7), y=np.ones(2), z=np.ones(7))
    ((num_rows, batch),) = source.iter_batches(10)
    assert num_rows == 7
    assert batch.keys() == {"obs", "z"}


@pytest.mark.parametrize(
    ("options", "arrays", "message"),
    [
        (ImportOptions(), {"a": np.ones(2), "b": np.ones(3)}, r"no common first dimension: a \[2\], b \[3\]"),
        (ImportOptions(), {"a": np.ones(())}, r"a \[\]"),
        (ImportOptions(), {"a": np.ones(2), "a__b": np.ones(2)}, "a/b is below"),
        (ImportOptions(), {"a__b": np.ones(2), "a____b": np.ones(2)}, "2 arrays in it have the key a/b; choose"),
        (ImportOptions(), {}, "no array"),
        (ImportOptions(keys=[("b",)]), {"a": np.ones(2)}, r"has no b: a \[2\]"),
    ],
)
def test_columns_when_they_are_no_rows_then_error_and_closed(
    options: ImportOptions, arrays: dict[str, Any], message: str
) -> None:
    closed: list[str] = []
    columns = [make_column(name.replace("__", "/"), array) for name, array in arrays.items()]
    with pytest.raises(InvalidRequestError, match=message):
        ColumnSource("file", columns, options, partial(closed.append, "closed"))
    assert closed == ["closed"]


def test_columns_when_read_without_rows_then_whole() -> None:
    source, _ = make_source(ImportOptions(has_rows=False), a=np.ones(2), b=np.float32(3.0))
    assert source.num_rows == 1
    assert source.read_whole()["a"].tolist() == [1.0, 1.0]

    class OneRow(ImportSource):
        num_rows = row_nbytes = 1

        def iter_batches(self, max_rows: int) -> Any:
            return iter(())

    with OneRow() as rows, pytest.raises(NotSupportedError, match="without rows"):
        rows.read_whole()


def test_values_when_lists_of_one_length_then_one_object_per_row() -> None:
    array = make_value_array([[1, 2], [3, 4]])
    assert array.shape == (2,)
    assert array[1] == [3, 4]


def test_missing_package_when_reported_then_the_command_is_in_the_error() -> None:
    assert "pip install 'tdserve[hdf5]'" in str(make_missing_package_error("h5py", "tdserve[hdf5]"))
