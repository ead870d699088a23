"""Rows that a check has marked as damaged: no kind of read serves them, over any transport."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.base.config import TransportName
from tdserve.server.checking.root_check import check_root
from tdserve.server.mutations.unfinished_writes import RETRY_GRACE_S

pytestmark = pytest.mark.integration

NUM_ROWS, WIDTH, DAMAGED = 16, 256, 7

READS: dict[str, Callable[[Any], Any]] = {
    "[:]": lambda store: store[:],
    "['b']": lambda store: store["b"],
    "get": lambda store: store.get("b"),
    "get_at": lambda store: store.get_at("b", slice(0, None)),
    "clone": lambda store: store.clone(),
    "select": lambda store: store.select("b")[:],
    "to_tensordict": lambda store: store.to_tensordict(),
    "part": lambda store: store[DAMAGED - 1 : DAMAGED + 1],
    "row": lambda store: store[DAMAGED],
    "list": lambda store: store[[DAMAGED]],
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root with a damaged row, after a repair of all that can be repaired."""
    path = tmp_path / "root"
    with tdserve.Server(path) as server, server.client() as client:
        ones = torch.ones(NUM_ROWS, WIDTH)
        client.init_remote(TensorDict({"a": ones, "b": ones}, [NUM_ROWS]), "td")
        client["td"].set_at_("a", torch.ones(WIDTH), 0)  # the files of a small store come with its first use
    with open(path / "stores" / "td" / "rows" / "b.memmap", "r+b") as file:
        file.seek(DAMAGED * WIDTH * 4 + 2)
        file.write(b"\x55")
    (finding,) = check_root(path, repairs=True).findings
    assert finding.repaired == "1 rows are reported as damaged until they are written again"
    return path


@pytest.mark.parametrize("transport", ["shm", "gloo", "grpc"])
def test_row_when_a_check_has_marked_it_then_no_read_serves_it_until_it_is_written(
    root: Path, transport: TransportName
) -> None:
    with tdserve.Server(root) as server, server.client(transport=transport) as client:
        store = client["td"]
        assert store[0]["b"].tolist() == [1.0] * WIDTH  # whole rows are read as ever
        for name, read in READS.items():
            with pytest.raises(tdserve.CorruptDataError):
                pytest.fail(f"{name} returned {read(store)}")
        with pytest.raises(tdserve.CorruptDataError):  # at once: no writer is waited for
            store.get_at("b", [DAMAGED], timeout_s=RETRY_GRACE_S / 10)
        store[DAMAGED] = TensorDict({"a": torch.zeros(WIDTH), "b": torch.zeros(WIDTH)}, [])
        for read in READS.values():
            read(store)
        assert store["b"].sum(1).tolist() == [0.0 if row == DAMAGED else float(WIDTH) for row in range(NUM_ROWS)]
