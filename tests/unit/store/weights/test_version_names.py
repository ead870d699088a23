"""Names of version files, and the changes that need no mapping."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tdserve.store.weights.version_names import discard, make_part_name, make_retired_name, make_values_name, retire


def test_version_when_retired_then_keeps_its_file_under_another_name(tmp_path: Path) -> None:
    final = tmp_path / "3.safetensors"
    final.write_bytes(b"data")
    make_values_name(final).write_bytes(b"values")
    inode = final.stat().st_ino
    retire(final)
    assert os.listdir(tmp_path) == ["3.retired"]
    assert make_retired_name(final).stat().st_ino == inode
    retire(final)
    assert make_retired_name(final).read_bytes() == b"data"


@pytest.mark.parametrize("name", [make_part_name, make_retired_name, make_values_name, Path])
def test_version_when_discarded_in_any_state_then_nothing_is_left(tmp_path: Path, name: type[Path]) -> None:
    final = tmp_path / "3.safetensors"
    name(final).write_bytes(b"data")
    (tmp_path / "4.safetensors").write_bytes(b"another")
    discard(final)
    discard(final)
    assert os.listdir(tmp_path) == ["4.safetensors"]
