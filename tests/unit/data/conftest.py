"""Stores on disk for each test."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from tests.unit.worker.peer import StoredTensorDict


@pytest.fixture
def plain(tmp_path: Path) -> StoredTensorDict:
    """Six rows of small tensors and nothing else."""
    return StoredTensorDict(tmp_path / "plain", TensorDict({"small": torch.arange(6)}, [6]))


@pytest.fixture
def store(tmp_path: Path) -> StoredTensorDict:
    """Six rows: small ones, and one leaf of 6 MB."""
    td = TensorDict({"small": torch.arange(6), "large": torch.rand(6, 250_000), "n": {"v": "text"}}, [6])
    return StoredTensorDict(tmp_path / "store", td)
