"""Marks of use."""

from __future__ import annotations

from pathlib import Path

import pytest

from tdserve.base.errors import CorruptDataError
from tdserve.store.values.use_marks import UseMarks


def test_take_when_set_by_another_then_once(tmp_path: Path) -> None:
    assert not UseMarks.exist(tmp_path)
    own = UseMarks(tmp_path, creates=True)
    assert UseMarks.exist(tmp_path)
    assert not own.take(b"a")
    UseMarks(tmp_path).set(b"a")
    assert not own.take(b"b")
    assert own.take(b"a")
    assert not own.take(b"a")


def test_open_when_missing_then_an_error_names_it(tmp_path: Path) -> None:
    with pytest.raises(CorruptDataError, match="used"):
        UseMarks(tmp_path)
