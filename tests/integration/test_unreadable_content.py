"""Local writes whose content cannot be read: nothing is written, and the session goes on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from tensordict import TensorDict

import tdserve
from tests.processes import START_TIMEOUT_S

pytestmark = pytest.mark.integration

TIMEOUT_S = 20.0

SHAPE = (8, 1024)


@pytest.fixture
def client(server: tdserve.Server) -> Iterator[tdserve.Client]:
    """A client whose session a test may end."""
    with server.client(transport="shm", timeout_s=START_TIMEOUT_S) as connected:
        connected.timeout_s = TIMEOUT_S
        yield connected


@pytest.fixture
def leased(client: tdserve.Client, name: str) -> Iterator[tuple[Any, Any]]:
    """A queue, and rows on lease, which would be given back if the session ended."""
    queue = client.create_queue(f"{name}-q"[-150:], like={"i": np.int64(0)}, max_size=8)
    queue.extend({"i": np.arange(2)})
    yield queue, queue.take(2, ack=False)
    client.delete(queue.name)


def open_rows(path: Path) -> Any:
    """Returns the rows of a file."""
    found: Any = TensorDict.from_h5(path)
    found.batch_size = [SHAPE[0]]
    return found


def make_damaged_file(folder: Path) -> Any:
    """Returns the content of a file whose last row, at its last key, cannot be read."""
    path = folder / "damaged.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=np.ones(SHAPE))
        file.create_dataset("y", data=np.full(SHAPE, 2.0), chunks=(1, SHAPE[1]), fletcher32=True)
    content = bytearray(path.read_bytes())
    at = content.rindex(np.float64(2.0).tobytes())
    content[at] ^= 1
    path.write_bytes(content)
    return open_rows(path)


def make_cut_file(folder: Path) -> Any:
    """Returns the content of a file that was cut off after it was opened."""
    path = folder / "cut.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=np.ones(SHAPE))
        file.create_dataset("y", data=np.ones(SHAPE))
    found = open_rows(path)
    os.truncate(path, path.stat().st_size - 1024)
    return found


def like(*batch_size: int) -> TensorDict:
    """Returns rows of zeros."""
    zeros = torch.zeros(*batch_size, SHAPE[1], dtype=torch.float64)
    return TensorDict({"x": zeros, "y": zeros.clone()}, batch_size)


def test_overwrite_when_a_file_is_too_short_then_nothing_is_written_and_the_session_goes_on(
    client: tdserve.Client, name: str, leased: tuple[Any, Any], tmp_path: Path
) -> None:
    store = client.memmap(like(SHAPE[0]), name)
    with pytest.raises(tdserve.CorruptDataError, match=r"cut\.h5"):
        client.send(make_cut_file(tmp_path), name)
    assert (store[:] == 0).all()
    queue, rows = leased
    queue.ack(rows)


def test_extend_when_a_row_cannot_be_read_then_none_is_there_and_the_session_goes_on(
    client: tdserve.Client, name: str, leased: tuple[Any, Any], tmp_path: Path
) -> None:
    table = client.create_replay(name, like=like(), capacity=SHAPE[0])
    with pytest.raises(tdserve.InvalidRequestError, match="cannot be read"):
        table.extend(make_damaged_file(tmp_path))
    assert len(table) == 0
    table.extend(like(SHAPE[0]))
    assert len(table) == SHAPE[0]
    queue, rows = leased
    queue.ack(rows)


def test_overwrite_when_a_row_cannot_be_read_then_nothing_is_written_and_the_session_goes_on(
    client: tdserve.Client, name: str, leased: tuple[Any, Any], tmp_path: Path
) -> None:
    store = client.memmap(like(SHAPE[0]), name)
    with pytest.raises(tdserve.InvalidRequestError, match="cannot be read"):
        client.send(make_damaged_file(tmp_path), name)
    assert (store[:] == 0).all()
    queue, rows = leased
    queue.ack(rows)
