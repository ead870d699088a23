"""Foreign faults become errors of tdserve that name the path."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tdserve.base.errors import CapacityError, CorruptDataError, InvalidRequestError, TDServeError
from tdserve.store.disk.faults import convert_os_error, convert_os_errors, free_bytes


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (errno.ENOSPC, CapacityError),
        (errno.EDQUOT, CapacityError),
        (errno.EMFILE, CapacityError),
        (errno.EACCES, InvalidRequestError),
        (errno.EROFS, InvalidRequestError),
        (errno.ELOOP, CorruptDataError),
        (errno.EIO, CorruptDataError),
    ],
)
def test_os_fault_when_mapped_then_has_the_class_of_its_meaning(code: int, expected: type[TDServeError]) -> None:
    error = convert_os_error(OSError(code, os.strerror(code)), Path("/some/file"), asked=7)
    assert type(error) is expected
    assert "/some/file" in str(error)
    assert os.strerror(code) in str(error)


def test_os_faults_when_block_raises_then_the_cause_is_kept(tmp_path: Path) -> None:
    with pytest.raises(CorruptDataError) as caught, convert_os_errors(tmp_path / "none"):
        (tmp_path / "none").read_bytes()
    assert isinstance(caught.value.__cause__, FileNotFoundError)


def test_free_bytes_when_path_does_not_exist_then_its_ancestor_answers(tmp_path: Path) -> None:
    assert free_bytes(tmp_path / "a" / "b") == pytest.approx(free_bytes(tmp_path), rel=0.1)
    assert free_bytes(tmp_path) > 0
