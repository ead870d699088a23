"""What the catalog has of a store, in the store's own folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tdserve.base.errors import CorruptDataError
from tdserve.store.disk.checked_json import encode_checked
from tdserve.store.roots.record_file import FILE_NAME, KeptRecord, KeptSpec

KEPT = KeptRecord(
    b'{"name": "rows"}', b"", (KeptSpec(b"\x00\xff", "ab", b"\x80spec"),), ((b"\x01", b"\x80draw"),), moment=7
)


def test_record_when_saved_then_is_read_and_an_equal_one_is_not_written_again(tmp_path: Path) -> None:
    assert KeptRecord.load(tmp_path) is None
    KEPT.save(tmp_path)
    assert KeptRecord.load(tmp_path) == KEPT
    without_draws = replace(KEPT, draws=None)
    without_draws.save(tmp_path)
    assert KeptRecord.load(tmp_path) == without_draws
    KEPT.save(tmp_path)
    inode = (tmp_path / FILE_NAME).stat().st_ino
    KEPT.save(tmp_path)
    assert [(path.name, path.stat().st_ino) for path in tmp_path.iterdir()] == [(FILE_NAME, inode)]


def test_record_when_any_byte_differs_then_corrupt_data(tmp_path: Path) -> None:
    KEPT.save(tmp_path)
    content = (tmp_path / FILE_NAME).read_bytes()
    for at in range(len(content)):
        (tmp_path / FILE_NAME).write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with pytest.raises(CorruptDataError):
            KeptRecord.load(tmp_path)


@pytest.mark.parametrize("specs", [None, [["x"]], [["00", "", 1]]])
def test_record_when_it_is_something_else_then_corrupt_data(tmp_path: Path, specs: object) -> None:
    (tmp_path / FILE_NAME).write_bytes(encode_checked({"record": "", "state": "", "specs": specs}))
    with pytest.raises(CorruptDataError):
        KeptRecord.load(tmp_path)
