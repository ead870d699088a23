"""Files that are made in the folder of a store after its deletion: its folder does not come again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tdserve.base.errors import CorruptDataError
from tdserve.store.exchange.spools import SpoolWriter
from tdserve.store.exchange.staging import Staging
from tdserve.store.values.objects import Objects


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: Staging(folder / "staging"),
        lambda folder: SpoolWriter(str(folder / "staging" / "0.values")),
        lambda folder: Objects(folder / "objects", writable=True),
    ],
    ids=["staging", "spool", "values"],
)
def test_file_when_made_after_its_store_then_refused_and_the_folder_stays_gone(
    tmp_path: Path, make: Callable[[Path], object]
) -> None:
    with pytest.raises(CorruptDataError):
        make(tmp_path / "gone")
    assert list(tmp_path.iterdir()) == []
