"""A session of a data worker for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.worker.peer import Peer, StoredTensorDict, mixed_store, plain_store


@pytest.fixture
def peer() -> Iterator[Peer]:
    """A session whose channel is not open yet."""
    made = Peer()
    yield made
    made.close()


@pytest.fixture
def plain(tmp_path: Path) -> StoredTensorDict:
    """Six rows of small tensors and nothing else."""
    return plain_store(tmp_path / "plain")


@pytest.fixture
def store(tmp_path: Path) -> StoredTensorDict:
    """Six rows: small ones, and one leaf of 6 MB."""
    return mixed_store(tmp_path / "store")
