"""A server whose disk is full serves what is there and refuses what does not fit; deleting makes room."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

import tdserve

pytestmark = pytest.mark.integration

DISK_BYTES = 32 << 20

ROWS = TensorDict({"x": torch.arange(64 * 1024).reshape(64, 1024)}, [64])
"""Half a megabyte."""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a tmpfs of its own; skips where root may not mount."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("a disk of its own cannot be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(disk: Path) -> None:
    """Fills the disk to the last page."""
    with (disk / "filling").open("ab", buffering=0) as file:
        while found := os.statvfs(disk).f_bavail:
            file.write(bytes(found * 4096))


@pytest.mark.slow
@pytest.mark.once("shm")
@pytest.mark.parametrize("transport", ["gloo", "shm"])
def test_store_when_the_disk_is_full_then_it_stays_as_it_is_over_a_restart_until_something_is_deleted(
    disk: Path, transport: str
) -> None:
    root = disk / "root"
    with tdserve.Server(root) as server, server.client(transport=transport, timeout_s=60.0) as client:
        client.memmap(ROWS, "kept")
        client.memmap(TensorDict({"x": torch.zeros(1 << 20)}, [1 << 20]), "other")
        assert client.publish("policy", ROWS) == 1
        fill(disk)
        check_full(client)
    fill(disk)
    with tdserve.Server(root) as server, server.client(transport=transport, timeout_s=60.0) as client:
        check_full(client)
        client.delete("other")
        client["kept"].set("more", torch.ones(64))
        assert (client["kept"]["more"] == 1).all()
        client["kept"].set_at_("x", torch.zeros(1, 1024, dtype=torch.int64), [0])
        assert not client["kept"]["x"][0].any()


@pytest.mark.slow
def test_table_when_its_first_values_find_a_full_disk_then_refused_and_no_worker_ends(disk: Path) -> None:
    like = TensorDict({"number": torch.tensor(0), "text": ""}, [])
    with tdserve.Server(disk / "root") as server, server.client(transport="gloo", timeout_s=60.0) as client:
        table = client.create_replay("texts", like=like, capacity=1000)
        assert len(table) == 0  # the first use makes its files
        fill(disk)
        row = TensorDict({"number": torch.tensor([1]), "text": NonTensorStack("z" * 2000)}, [1])
        with pytest.raises(tdserve.CapacityError):
            table.extend(row)
        assert [worker["num_restarts"] for worker in client.stats()["workers"]] == [0]
        assert len(table) == 0
        (disk / "filling").unlink()
        assert table[table.extend(row)].get("text").tolist() == ["z" * 2000]


def check_full(client: tdserve.Client) -> None:
    """Checks that changes that take room are refused and change nothing."""
    with pytest.raises(tdserve.CapacityError):
        client["kept"].set("wide", torch.ones(64, 4096))
    with pytest.raises(tdserve.CapacityError):
        client.publish("policy", TensorDict({"x": torch.zeros(1 << 20)}, []))
    with pytest.raises(tdserve.CapacityError):
        client.memmap(TensorDict({"x": torch.zeros(1 << 20)}, [1 << 20]), "new")
    assert client.from_remote_init("kept").keys() == {"x"}
    assert (client.from_remote_init("kept") == ROWS).all()
    weights = client.latest("policy")
    assert weights is not None
    assert weights.version == 1
    assert sorted(client.stores()) == ["kept", "other", "policy"]


@pytest.mark.slow
@pytest.mark.once("shm")
@pytest.mark.parametrize("transport", ["gloo", "shm"])
def test_entries_when_the_disk_is_full_then_refused_and_what_is_there_stays(disk: Path, transport: str) -> None:
    with tdserve.Server(disk / "root") as server, server.client(transport=transport, timeout_s=60.0) as client:
        kv = client.create_kv("entries")
        kv.put(["a", "b", "c"], [bytes(100_000)] * 3)
        version = kv.put("a", "kept")
        fill(disk)
        with pytest.raises(tdserve.CapacityError):
            kv.put("b", bytes(1_000_000))
        assert kv.get_with_versions("a") == ("kept", version)
        assert kv["b"] == bytes(100_000)
        assert kv.delete(["b", "c"]) == 2
        kv.put("d", bytes(10_000))
        assert kv.keys() == ["a", "d"]
