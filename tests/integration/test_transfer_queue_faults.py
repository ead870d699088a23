"""Faults of the backend of TransferQueue: refused puts, damaged checkpoints, clears during a save."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
from tensordict import TensorDict
from transfer_queue.storage.clients.base import StorageClientFactory

import tdserve
import tdserve.transfer_queue as backend

pytestmark = pytest.mark.integration


@pytest.fixture
def clients(server: tdserve.Server) -> Iterator[tuple[Any, Any]]:
    """Two storage clients of one store, as two processes have them."""
    yield from make_pair(server)


@pytest.fixture
def short_lived(server: tdserve.Server) -> Iterator[tuple[Any, Any]]:
    """The same over a store whose entries expire."""
    yield from make_pair(server, ttl_s=2.0)


def make_pair(server: tdserve.Server, **settings: Any) -> Iterator[tuple[Any, Any]]:
    name = f"queue-{uuid4().hex}"
    with server.client() as client:
        client.create_kv(name, **settings)
    made = [StorageClientFactory.create("tdserve", {"address": server.address, "store": name}) for _ in range(2)]
    yield made[0], made[1]
    for each in made:
        each.close()


def clear_sample(client: Any, number: int) -> None:
    client.clear([f"{number}@{name}" for name in client.list_fields()])


def find_there(client: Any, keys: list[str]) -> list[str]:
    return [key for key in keys if is_there(client, key)]


def is_there(client: Any, key: str) -> bool:
    try:
        client.get([key])
    except KeyError:
        return False
    return True


def test_put_when_the_name_of_a_field_is_too_long_then_refused_and_others_can_be_cleared(
    clients: tuple[Any, Any],
) -> None:
    first, second = clients
    first.put(["0@x"], [1])
    for length in (backend.MAX_FIELD_BYTES + 1, 1000):
        with pytest.raises(tdserve.InvalidRequestError, match="the name of the field 'fff"):
            first.put(["0@" + "f" * length], [1])
    first.put([f"0@{'f' * backend.MAX_FIELD_BYTES}", "9223372036854775807@" + "f" * backend.MAX_FIELD_BYTES], [1, 2])
    clear_sample(second, 0)
    clear_sample(second, 2**63 - 1)
    assert second.list_fields() == ["f" * backend.MAX_FIELD_BYTES, "x"]
    assert find_there(first, ["0@x", f"0@{'f' * backend.MAX_FIELD_BYTES}"]) == []


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["cut", "gone"])
def test_load_when_a_file_is_damaged_or_missing_then_named_and_nothing_is_changed(
    clients: tuple[Any, Any], tmp_path: Path, fault: str
) -> None:
    first, second = clients
    keys = [f"{number}@x" for number in range(3 * backend.MAX_SAVED_KEYS)]
    first.put(keys, [*range(len(keys))])
    first.save(tmp_path / "saved")
    first.clear(keys[:1])
    file = sorted((tmp_path / "saved").iterdir())[1]
    file.write_bytes(file.read_bytes()[:50]) if fault == "cut" else file.unlink()
    with pytest.raises(tdserve.CorruptDataError, match=str(file if fault == "cut" else file.parent)):
        second.load(tmp_path / "saved")
    assert not is_there(second, keys[0])
    assert second.get(keys[1:]) == [*range(1, len(keys))]


def test_save_when_samples_are_cleared_meanwhile_then_has_the_others(clients: tuple[Any, Any], tmp_path: Path) -> None:
    first, second = clients
    num_samples = 3 * backend.MAX_SAVED_KEYS
    keys = [f"{number}@x" for number in range(num_samples)]
    first.put(keys, [*range(num_samples)])

    def clear() -> None:
        for number in reversed(range(num_samples // 2, num_samples)):
            second.clear([keys[number]])

    thread = Thread(target=clear)
    thread.start()
    first.save(tmp_path / "saved")
    thread.join()
    first.load(tmp_path / "saved")
    assert first.get(keys[: num_samples // 2]) == [*range(num_samples // 2)]


def test_fields_when_another_process_has_loaded_then_what_is_put_later_can_be_cleared(
    clients: tuple[Any, Any], tmp_path: Path
) -> None:
    first, second = clients
    first.put(["0@x"], [1])
    first.save(tmp_path / "saved")
    first.put(["1@z"], [2])
    second.load(tmp_path / "saved")
    first.put(["2@z", "2@x"], [2, 1])
    clear_sample(second, 2)
    assert find_there(first, ["0@x", "1@z", "2@z", "2@x"]) == ["0@x"]


def test_fields_when_entries_expire_then_they_are_listed_as_long_as_a_sample_is_there(
    short_lived: tuple[Any, Any],
) -> None:
    first, second = short_lived
    first.put(["0@x"], [1])
    number = 0
    while is_there(first, "0@x"):
        number += 1
        first.put([f"{number}@x"], [1])
    assert is_there(second, f"{number}@x")
    clear_sample(second, number)
    assert not is_there(first, f"{number}@x")


def test_put_when_a_field_is_one_text_then_refused(server: tdserve.Server) -> None:
    with pytest.raises(tdserve.InvalidRequestError, match="it is one text for all samples"):
        asyncio.run(backend.TDServeBackend.put_data(object.__new__(backend.TDServeBackend), make_text(), None))


def make_text() -> TensorDict:
    return TensorDict({"x": "abcd"}, [4])


@pytest.mark.slow
def test_objects_when_together_larger_than_a_call_then_stored_by_several(clients: tuple[Any, Any]) -> None:
    storage, _ = clients
    values = [{"image": np.full(70 * 2**20, number, np.uint8)} for number in range(3)]  # whose size shows once encoded
    keys = [f"{number}@image" for number in range(3)]
    storage.put(keys, values)
    assert [int(value["image"][0]) for value in storage.get(keys)] == [0, 1, 2]
    storage.clear(keys)


def test_run_when_a_forked_child_has_it_too_then_its_end_leaves_everything(
    server: tdserve.Server, tmp_path: Path
) -> None:
    client = server.client()
    client.create_kv("of a run")
    run = backend.StorageRun(client, "of a run", None, str(tmp_path))
    pid = os.fork()
    if not pid:
        try:
            run.end()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert tmp_path.is_dir()
    with server.client() as other:
        assert "of a run" in other
        run.end()
        assert "of a run" not in other
