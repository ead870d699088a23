from __future__ import annotations

import gc
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.base.deadline import Deadline
from tdserve.base.errors import ClosedError, DeadlineExceededError, StoreNotFoundError
from tdserve.client.content.devices import begin
from tdserve.client.tables.draws import batches as table_batches
from tdserve.client.tables.draws.batches_ahead import BatchesAhead
from tdserve.client.tables.draws.sampling import ask
from tests.processes import wait_for
from tests.threads import find_threads

ROWS = TensorDict({"a": torch.arange(8)}, [8])


@pytest.fixture
def replay(client: tdserve.Client, name: str) -> tdserve.ReplayHandle:
    """A full ring of eight rows."""
    made: tdserve.ReplayHandle = client.create_replay(name, ROWS[0], 8)
    made.extend(ROWS)
    return made


@pytest.mark.parametrize("prefetch", [1, 2, 7])
def test_next_when_asked_then_batches_of_that_many_rows(replay: tdserve.ReplayHandle, prefetch: int) -> None:
    with replay.batches(4, prefetch=prefetch) as batches:
        for batch in islice(batches, 10):
            assert batch["a"].tolist() == batch["index"].tolist()
            assert len(batch) == 4


@pytest.mark.parametrize(
    ("row_nbytes", "prefetch", "expected"),
    [(8, 100_000, table_batches.MAX_BATCHES_ASKED), (8, 6, 3), (4 << 20, 100_000, 4), (32 << 20, 6, 1)],
)
def test_request_when_many_batches_are_prefetched_then_asks_for_few_bytes_and_batches_of_them(
    client: tdserve.Client, name: str, monkeypatch: pytest.MonkeyPatch, row_nbytes: int, prefetch: int, expected: int
) -> None:
    asked = list[int]()

    def note(*arguments: Any, num_batches: int, **options: Any) -> Any:
        asked.append(num_batches)
        return ask(*arguments, num_batches=num_batches, **options)

    monkeypatch.setattr(table_batches, "ask", note)
    made = client.create_replay(name, TensorDict({"a": torch.zeros(row_nbytes, dtype=torch.uint8)}), 8)
    with made.batches(4, prefetch=prefetch):
        wait_for(lambda: asked, "a request")
    assert asked[0] == expected


def test_next_when_there_are_too_few_rows_then_deadline_and_goes_on_later(client: tdserve.Client, name: str) -> None:
    replay = client.create_replay(name, ROWS[0], 8)
    with replay.batches(4, timeout_s=0.1) as batches:
        with pytest.raises(DeadlineExceededError, match=name):
            next(batches)
        replay.extend(ROWS)
        while True:
            try:
                assert len(next(batches)) == 4
                break
            except DeadlineExceededError:
                continue  # those that were requested before the rows came


@pytest.mark.slow
@pytest.mark.parametrize("prefetch", [1, 2])
def test_next_when_the_session_is_lost_while_nothing_is_under_way_then_goes_on_however_often(
    client: tdserve.Client, replay: tdserve.ReplayHandle, prefetch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    came = list[Any]()

    def note_batch(batch: Any, device: Any) -> Any:
        came.append(batch)
        return begin(batch, device)

    monkeypatch.setattr(table_batches, "begin", note_batch)
    with replay.batches(4, prefetch=prefetch, timeout_s=20.0) as batches:
        for number in range(4 * prefetch):
            assert len(next(batches)) == 4
            wait_for(lambda number=number: len(came) == number + 1 + prefetch, "full prefetch")  # type: ignore[misc]
            client.session(Deadline.after(20.0)).close()
        assert len(next(batches)) == 4


def test_close_when_a_thread_waits_for_a_batch_then_it_ends(client: tdserve.Client, name: str) -> None:
    batches = client.create_replay(name, ROWS[0], 8).batches(4, timeout_s=20.0)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(next, batches)
        batches.close()
        with pytest.raises(ClosedError):
            waiting.result(20.0)
    assert not find_threads(f"tdserve-batches-{name}")


@pytest.mark.slow
def test_batches_when_dropped_then_their_thread_ends(replay: tdserve.ReplayHandle) -> None:
    batches = replay.batches(4)
    next(batches)
    (thread,) = find_threads(f"tdserve-batches-{replay.name}")
    del batches
    gc.collect()
    thread.join(20.0)
    assert not thread.is_alive()


def test_next_when_the_store_is_deleted_then_its_error_and_batches_again_once_it_is_made_anew(
    client: tdserve.Client, replay: tdserve.ReplayHandle
) -> None:
    with replay.batches(4, prefetch=2) as batches:
        next(batches)
        client.delete(replay.name)
        for _ in range(2):
            with pytest.raises(StoreNotFoundError, match=replay.name):
                list(batches)  # what was prefetched, then the error
        client.create_replay(replay.name, ROWS[0], 8).extend(ROWS)
        wait_for(lambda: has_batch(batches), "a batch of the new table")


def has_batch(batches: Any) -> bool:
    """Takes a batch; returns False if the table was not there when it was asked for."""
    with suppress(StoreNotFoundError):
        return len(next(batches)) == 4
    return False


def test_iterator_when_closed_then_its_batches_and_its_thread_are_freed(replay: tdserve.ReplayHandle) -> None:
    def count() -> int:
        gc.collect()
        return sum(isinstance(each, BatchesAhead) for each in gc.get_objects())

    before = count()
    with replay.batches(4, prefetch=2) as batches:
        assert len(next(batches)) == 4
        assert count() == before + 1
    del batches
    assert count() == before


def test_next_when_the_time_of_its_block_is_over_then_ends_and_goes_on_later(client: tdserve.Client, name: str) -> None:
    replay = client.create_replay(name, ROWS[0], 8)
    queue = client.create_queue(f"{name}-queue", ROWS[0], 8)
    with replay.batches(4, timeout_s=60.0) as batches, queue.batches(4, timeout_s=60.0) as taken:
        for iterator in (batches, taken):
            with tdserve.within(0.1), pytest.raises(DeadlineExceededError, match=r"within 0\.1 s"):
                next(iterator)
        replay.extend(ROWS)
        queue.extend(ROWS)
        assert len(next(batches)) == len(next(taken)) == 4


def test_next_when_only_earlier_waits_were_in_vain_then_returns_what_is_there_by_now(
    client: tdserve.Client, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[None]()

    def note(*arguments: Any, **options: Any) -> Any:
        asked.append(None)
        return ask(*arguments, **options)

    monkeypatch.setattr(table_batches, "ask", note)
    replay = client.create_replay(name, ROWS[0], 8)
    with replay.batches(4, prefetch=2, timeout_s=0.1) as batches:
        wait_for(lambda: len(asked) >= 5, "waits that are over")
        replay.extend(ROWS)
        wait_for(lambda: replay.info()["samples"], "batches")
        assert len(next(batches)) == 4
        assert len(next(batches)) == 4


def test_take_when_an_error_has_passed_before_it_began_then_only_a_later_one_is_raised() -> None:
    ahead = BatchesAhead("t", max_batches=2)
    for number in range(2):
        ahead.put_passing(DeadlineExceededError(what=f"batch {number}", timeout_s=1.0))
    ahead.put("ready")
    assert ahead.take(time.monotonic()) == "ready"
    began_s = time.monotonic()
    ahead.put_passing(DeadlineExceededError(what="batch 2", timeout_s=1.0))
    with pytest.raises(DeadlineExceededError, match="batch 2"):
        ahead.take(began_s)


FORKING = """
import os, sys
from threading import Event
from tdserve.client.tables.draws.batches_ahead import BatchesAhead

over, parent = Event(), os.getpid()

def end():
    over.set()
    if os.getpid() != parent:
        os._exit(7)

ahead = BatchesAhead("t", max_batches=1)
ahead.start(lambda: (ahead.put("ready"), over.wait()), end)
ahead.take(0.0)
child = os.fork()
if child == 0:
    sys.exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), over.is_set())
"""


def test_exit_when_of_a_forked_child_then_the_batches_of_its_parent_go_on() -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORKING]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["0", "False"]
