"""PersistentTensorDict: read from its file while it is sent, and back as a TensorDict of the same content."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from tensordict import PersistentTensorDict, TensorDict

import tdserve
from tests.processes import REPOSITORY, wait_for
from tests.sameness import difference

pytestmark = pytest.mark.integration

UNREADABLE = "its content cannot be read any more"

FILE_NBYTES = 256 << 20
ROOM_NBYTES = 96 << 20
"""Staging memory of a channel, threads, and what HDF5 itself takes."""

PROGRAM = (sys.executable, "-m", "tests.lent.program")
SENDER = (*PROGRAM, "tests.integration.h5_sender")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("h5") / "large.h5"
    with h5py.File(path, "w") as file:
        pixels = file.create_dataset("pixels", (FILE_NBYTES >> 16, 1 << 16), np.uint8)
        for start in range(0, len(pixels), 256):
            rows = (np.arange(256)[:, None] + start // 256).astype(np.uint8)
            pixels[start : start + 256] = np.repeat(rows, 1 << 16, axis=1)  # to broadcast takes h5py minutes
    yield path
    path.unlink()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("transport", "call"),
    [
        ("gloo", "init_remote"),
        pytest.param("gloo", "extend", marks=pytest.mark.full),
        pytest.param("shm", "init_remote", marks=pytest.mark.full),
        ("shm", "extend"),
        pytest.param("shm", "set", marks=pytest.mark.full),
    ],
)
def test_file_when_sent_with_less_memory_than_it_is_long_then_all_of_it_arrives(
    server: tdserve.Server, large: Path, transport: str, call: str
) -> None:
    command = [*SENDER, server.address, transport, str(large)]
    with server.client(transport="shm", timeout_s=30.0) as client:
        try:
            done = subprocess.run(
                [*command, str(ROOM_NBYTES), call],
                cwd=REPOSITORY,
                check=False,
                capture_output=True,
                text=True,
                timeout=90,
            )
            assert done.returncode == 0, done.stderr[-2000:]
            store = client["sent"]
            for start in range(0, FILE_NBYTES >> 16, 256):
                rows = store[start : start + 256]["pixels"]
                expected = (torch.arange(256) + start // 256).to(torch.uint8)[:, None]
                assert bool((rows == expected).all())
        finally:
            for name in ("sent", "warm"):
                if name in client:
                    client.delete(name)


@pytest.mark.slow
def test_mapped_file_when_sent_with_less_memory_than_it_is_long_then_all_of_it_arrives(
    server: tdserve.Server, tmp_path: Path
) -> None:
    num_rows = FILE_NBYTES >> 16
    mapped = TensorDict({"pixels": torch.zeros((), dtype=torch.uint8).expand(num_rows, 1 << 16)}, [num_rows])
    mapped = mapped.memmap_like(tmp_path / "mapped")
    mapped["pixels"][:] = torch.arange(num_rows)[:, None]
    command = [*SENDER, server.address, "gloo", str(tmp_path / "mapped")]
    with server.client(transport="shm", timeout_s=30.0) as client:
        try:
            command += [str(ROOM_NBYTES), "init_remote"]
            done = subprocess.run(command, cwd=REPOSITORY, check=False, capture_output=True, text=True, timeout=90)
            assert done.returncode == 0, done.stderr[-2000:]
            store = client["sent"]
            expected = torch.arange(num_rows).to(torch.uint8)
            for start in range(0, num_rows, 1024):
                assert bool((store[start : start + 64]["pixels"] == expected[start : start + 64, None]).all())
        finally:
            for name in ("sent", "warm"):
                if name in client:
                    client.delete(name)


def test_file_when_it_must_be_whole_in_memory_then_the_room_of_these_tests_is_too_small(large: Path) -> None:
    program = (
        f"from tests.integration.h5_sender import *; limit_memory({ROOM_NBYTES}); TensorDict.from_h5({str(large)!r})"
    )
    command = [*PROGRAM, "-c", f"{program}['pixels']"]
    done = subprocess.run(command, cwd=REPOSITORY, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "MemoryError" in done.stderr or "allocate" in done.stderr


def small(path: Path) -> tuple[PersistentTensorDict, TensorDict]:
    td = TensorDict({"x": torch.arange(30.0).view(10, 3), "n": TensorDict({"y": torch.arange(10)}, [10])}, [10])
    make: Any = PersistentTensorDict
    stored: PersistentTensorDict = make.from_dict(td, path)
    return stored, td.select("n", "x")


def test_file_when_sent_in_any_way_then_comes_back_as_a_tensordict(
    client: tdserve.Client, name: str, tmp_path: Path
) -> None:
    stored, td = small(tmp_path / "s.h5")
    store = client.memmap(stored, name)
    assert difference(td, client.from_remote_init(name)) is None
    zeros = td.clone().zero_()
    client.send(zeros, name)
    client.send(stored, name)
    assert difference(td, client.load_memmap(name)) is None
    for write in (
        lambda: store.__setitem__(slice(None), stored),
        lambda: store.__setitem__(slice(2, 5), stored[2:5]),
        lambda: store.__setitem__(torch.tensor([4, 2, 3]), stored[torch.tensor([4, 2, 3])]),
        lambda: store.__setitem__(3, stored[3]),
        lambda: store.set("n", stored["n"]),
        lambda: store.update_(stored),
        lambda: store.update_({"n": stored["n"]}),
    ):
        client.send(zeros, name)
        write()  # type: ignore[no-untyped-call]
        found = store.to_tensordict()
        changed = found["n", "y"] != 0
        assert bool(changed.any())
        assert found["n", "y"][changed].equal(td["n", "y"][changed])


def test_file_when_rows_of_it_extend_a_replay_then_are_there(client: tdserve.Client, name: str, tmp_path: Path) -> None:
    stored, td = small(tmp_path / "s.h5")
    replay = client.create_replay(name, td[0], 12)
    replay.extend(stored)
    replay.extend(stored[6:10])  # over the end of the ring
    assert difference(torch.cat([td[8:], td[2:], td[6:8]]), replay[:].select("n", "x")) is None
    with replay.writer(batch=2) as writer:
        writer.append(stored[4])
        writer.append(stored[5])
        writer.append(td[6])
    assert difference(td[4:7], replay[2:5].select("n", "x")) is None


def is_created(client: tdserve.Client, name: str) -> bool:
    """Creates a store of three ones; returns False while an earlier creation under its name has not ended."""
    try:
        client.init_remote(TensorDict({"x": torch.ones(3)}, []), name)
    except tdserve.StoreExistsError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["gloo", "shm"])
def test_file_when_cut_off_while_it_is_open_then_refused_instead_of_zeros(
    server: tdserve.Server, tmp_path: Path, transport: str
) -> None:
    path = tmp_path / "cut.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=np.ones((32, 1 << 18)))
    stored = TensorDict.from_h5(path)
    os.truncate(path, 16 << 20)
    with server.client(transport=transport, timeout_s=20.0) as client:
        with pytest.raises(tdserve.CorruptDataError, match=r"cut\.h5.*expected 67\d+ bytes.*found 16777216"):
            client.init_remote(stored, "cut")
        wait_for(lambda: is_created(client, "cut"), "the end of what was begun")
        assert client.from_remote_init("cut")["x"].tolist() == [1.0] * 3
        client.delete("cut")


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["gloo", "shm"])
def test_file_when_it_is_damaged_then_the_write_is_refused_and_nothing_is_there(
    server: tdserve.Server, tmp_path: Path, transport: str
) -> None:
    path = tmp_path / "damaged.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=np.ones((32, 1 << 18)), chunks=(1, 1 << 18), fletcher32=True)
    content = bytearray(path.read_bytes())
    content[48 << 20] ^= 1
    path.write_bytes(content)
    stored = TensorDict.from_h5(path)
    with server.client(transport=transport, timeout_s=20.0) as client:
        kept = client.memmap(
            TensorDict({"x": torch.zeros(32, 1 << 18, dtype=torch.float64)}, stored.batch_size), "kept"
        )
        calls: dict[str, Callable[[], object]] = {
            "assignment": lambda: kept.__setitem__(slice(None), stored),
            "update_": lambda: kept.update_(stored),
            "publish": lambda: client.publish("weights", stored),
            "put": lambda: client.create_kv("entries", exists_ok=True).put("a", stored),
        }
        for name, call in calls.items():
            with pytest.raises(tdserve.InvalidRequestError, match=UNREADABLE):
                call()
            assert not kept["x"].any(), name
        for name in ("kept", "entries"):
            client.delete(name)
        with pytest.raises(tdserve.InvalidRequestError, match=UNREADABLE):
            client.init_remote(stored, "damaged")
        wait_for(lambda: is_created(client, "damaged"), "the end of what was begun")
        assert client.from_remote_init("damaged")["x"].tolist() == [1.0] * 3
        client.delete("damaged")
