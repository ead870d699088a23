"""Staging files: reused, growing, found again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tdserve.base.errors import CapacityError, InvalidRequestError
from tdserve.store.exchange.staging import Staging
from tests.unit.store.conftest import SMALL_DISK_BYTES


def test_staging_when_reserved_again_then_reuses_its_file_and_grows_only(tmp_path: Path) -> None:
    staging = Staging.open(tmp_path / "new", 1000)
    first = staging.reserve(1000)
    first.fill_(7)
    assert staging.reserve(500).data_ptr() == first.data_ptr()
    grown = staging.reserve(3 << 20)
    assert grown.numel() == 3 << 20
    assert grown[:1000].eq(7).all()
    first.fill_(8)
    assert grown[999] == 8
    assert staging.reserve(1).numel() == 1
    assert staging.nbytes == staging.path.stat().st_size >= 3 << 20


def test_staging_when_opened_by_a_successor_then_has_the_bytes(tmp_path: Path) -> None:
    Staging.open(tmp_path, 5, name="w1").reserve(5).copy_(torch.arange(5))
    assert Staging.open(tmp_path, 5, name="w1").reserve(5).tolist() == [0, 1, 2, 3, 4]
    assert Staging.open(tmp_path, 5, name="w2").reserve(5).tolist() == [0] * 5


def test_staging_when_removed_then_tensors_stay_usable(tmp_path: Path) -> None:
    staging = Staging.open(tmp_path, 5)
    tensor = staging.reserve(5)
    staging.remove()
    staging.remove()
    assert not staging.path.exists()
    assert tensor.fill_(1).sum() == 5
    assert staging.reserve(5).tolist() == [0] * 5


def test_staging_when_the_disk_is_full_then_the_file_is_as_before(small_disk: Path) -> None:
    staging = Staging.open(small_disk, 10)
    staging.reserve(10).fill_(3)
    nbytes = staging.path.stat().st_size
    with pytest.raises(CapacityError):
        staging.reserve(2 * SMALL_DISK_BYTES)
    assert staging.path.stat().st_size == nbytes
    assert staging.reserve(10).tolist() == [3] * 10


@pytest.mark.parametrize("name", ["", "a/b"])
def test_staging_when_name_is_no_file_name_then_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidRequestError):
        Staging(tmp_path, name=name)
