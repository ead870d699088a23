"""Stores under ``torch.utils.data.DataLoader`` with worker processes, and epochs that processes share."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict
from torch.utils.data import DataLoader

import tdserve
from tests.processes import children_of, num_fds, wait_for
from tests.sameness import difference

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")]

NUM_ROWS = 1003


def _rows() -> TensorDict:
    number = torch.arange(NUM_ROWS)
    texts = NonTensorStack(*[f"row {i}" for i in range(NUM_ROWS)])
    deep = TensorDict({"x": number[:, None] + torch.zeros(NUM_ROWS, 300), "y": number.double()}, [NUM_ROWS])
    return TensorDict({"a": number, "n": deep, "text": texts}, [NUM_ROWS])


@pytest.fixture
def store(client: tdserve.Client, name: str) -> Iterator[tdserve.StoreHandle]:
    """A store of 1003 rows; afterwards nobody but the client itself has a session, and no process is left."""
    before, children = _sessions(client), set(children_of(os.getpid()))
    yield client.memmap(_rows(), name)
    wait_for(lambda: _sessions(client) <= before, "the end of all sessions but the client's")
    wait_for(lambda: not _others(children), "the end of all processes")


def _others(known: set[int]) -> set[int]:
    """Children of this process, without known ones and without multiprocessing's own, which live as long as this
    process."""
    return {pid for pid in children_of(os.getpid()) if pid not in known and not _is_tracker(pid)}


def _is_tracker(pid: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False  # it ended meanwhile
    return b"resource_tracker" in command or b"forkserver" in command


def _sessions(client: tdserve.Client) -> set[int]:
    return {each["session"] for each in client.stats()["sessions"]}


def _as_it_is(batch: Any) -> Any:
    return batch


def _loader(store: Any, **options: Any) -> DataLoader[Any]:
    return DataLoader(store, batch_size=64, shuffle=True, **{"num_workers": 2, **options})


def _check_epoch(batches: list[Any]) -> None:
    assert sorted(int(number) for batch in batches for number in batch["a"]) == list(range(NUM_ROWS))
    rows = _rows()
    for batch in batches:
        assert type(batch) is TensorDict
        assert difference(rows[batch["a"]], batch) is None


@pytest.mark.slow
@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.full)])
def test_loader_when_workers_read_then_every_row_once(store: tdserve.StoreHandle, context: str) -> None:
    _check_epoch(list(_loader(store, multiprocessing_context=context, collate_fn=_as_it_is)))


@pytest.mark.slow
def test_loader_when_workers_are_persistent_then_every_epoch_is_whole_over_the_same_sessions(
    store: tdserve.StoreHandle, client: tdserve.Client
) -> None:
    before = _sessions(client)
    # torch's own collate function takes a batch as it is
    loader = _loader(store, persistent_workers=True, multiprocessing_context="fork")
    _check_epoch(list(loader))
    sessions = _sessions(client) - before
    assert len(sessions) == 2
    fds = num_fds(os.getpid())
    _check_epoch(list(loader))
    _check_epoch(list(loader))
    assert _sessions(client) - before == sessions
    assert num_fds(os.getpid()) <= fds + 2
    del loader


@pytest.mark.slow
def test_loader_when_the_store_came_by_pickle_then_workers_read_it(
    store: tdserve.StoreHandle, client: tdserve.Client
) -> None:
    handle = pickle.loads(pickle.dumps(store))
    before = _sessions(client)
    _check_epoch(list(_loader(handle, multiprocessing_context="fork", collate_fn=_as_it_is)))
    wait_for(lambda: _sessions(client) <= before, "the end of the workers' sessions")  # this process has opened none


@pytest.mark.slow
def test_loader_when_given_a_view_then_workers_read_its_keys(store: tdserve.StoreHandle) -> None:
    loader = _loader(store.select("a", ("n", "y")), multiprocessing_context="fork")
    batches = list(loader)
    assert sorted(int(number) for batch in batches for number in batch["a"]) == list(range(NUM_ROWS))
    for batch in batches:
        assert difference(_rows().select("a", ("n", "y"))[batch["a"]], batch) is None


@pytest.mark.slow
def test_loader_when_given_a_replay_then_workers_read_its_rows(client: tdserve.Client, name: str) -> None:
    replay = client.create_replay(name, _rows()[0], NUM_ROWS)
    replay.extend(_rows())
    _check_epoch(list(_loader(replay, multiprocessing_context="fork", collate_fn=_as_it_is)))


def _with_sums(batch: TensorDict) -> TensorDict:
    return batch.set("sum", batch["n", "x"].sum(-1)).exclude("text")


@pytest.mark.slow
def test_loader_when_its_function_works_on_batches_then_what_it_returns_arrives(store: tdserve.StoreHandle) -> None:
    for batch in _loader(store, num_workers=1, multiprocessing_context="fork", collate_fn=_with_sums):
        assert torch.equal(batch["sum"], 300.0 * batch["a"])


@pytest.mark.slow
@pytest.mark.once("gloo")
def test_loader_when_a_worker_is_killed_then_an_error_and_the_next_epoch_is_whole(
    store: tdserve.StoreHandle, client: tdserve.Client
) -> None:
    own = set(children_of(os.getpid()))
    batches = iter(_loader(store, multiprocessing_context="fork", collate_fn=_as_it_is))
    next(batches)
    gc.disable()  # torch raises the error in a signal handler: in a callback of the collector it would be lost
    try:
        os.kill(min(_others(own)), signal.SIGKILL)
        with pytest.raises(RuntimeError, match="worker"):
            list(batches)
    finally:
        gc.enable()
    del batches
    _check_epoch(list(_loader(store, multiprocessing_context="fork", collate_fn=_as_it_is)))


def _read_share(store: tdserve.StoreHandle, rank: int, found: Any) -> None:
    sampler = tdserve.WithoutReplacement(seed=5)
    batches = store.batches(50, sampler=sampler, rank=rank, world_size=8, epoch=2, with_index=True)
    found.put([int(row) for batch in batches for row in batch["index"]])


@pytest.mark.slow
@pytest.mark.once("shm")
def test_batches_when_eight_processes_share_an_epoch_then_each_row_once(store: tdserve.StoreHandle) -> None:
    context = multiprocessing.get_context("fork")
    found: Any = context.SimpleQueue()
    readers = [context.Process(target=_read_share, args=(store, rank, found)) for rank in range(8)]
    for reader in readers:
        reader.start()
    shares = [found.get() for _ in readers]
    for reader in readers:
        reader.join(60.0)
        assert reader.exitcode == 0
    assert sorted(row for share in shares for row in share) == list(range(NUM_ROWS))
    assert {len(share) for share in shares} == {125, 126}
