from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from tdserve.server.recovery.process_watch import ProcessWatch
from tdserve.store.exchange.session_locks import SessionLock
from tests.unit.server.world import Loop


def held(folder: Path, name: str) -> SessionLock:
    """A lock of this process."""
    lock = SessionLock.hold(folder, name)
    assert lock is not None
    return lock


def test_is_gone_when_the_lock_is_held_then_not_and_else_its_file_goes(tmp_path: Path) -> None:
    process_watch = ProcessWatch(tmp_path)
    lock = held(tmp_path, "a")
    assert not process_watch.is_gone("a")
    assert os.listdir(tmp_path) == ["a"]
    lock.release()
    assert process_watch.is_gone("a")
    assert os.listdir(tmp_path) == []
    assert process_watch.is_gone("never there")


def test_remove_unused_when_some_are_held_then_only_the_files_of_the_others_go(tmp_path: Path) -> None:
    lock = held(tmp_path, "a")
    (tmp_path / "b").touch()
    ProcessWatch(tmp_path).remove_unused()
    assert os.listdir(tmp_path) == ["a"]
    lock.release()
    ProcessWatch(tmp_path).remove_unused()
    assert os.listdir(tmp_path) == []


def test_tidy_when_the_folder_was_removed_then_nothing_is_left_to_do(tmp_path: Path) -> None:
    ProcessWatch(tmp_path / "removed").remove_unused()


def test_watch_when_the_lock_is_released_then_each_waiting_call_returns_once(tmp_path: Path, run: Loop) -> None:
    async def scenario() -> None:
        process_watch, called = ProcessWatch(tmp_path), list[str]()
        lock, other = held(tmp_path, "a"), asyncio.Event()
        process_watch.watch("a", lambda: called.append("first"))
        process_watch.watch("a", lambda: called.append("second"))
        process_watch.watch("free", other.set)
        await other.wait()  # so it was looked at "a" too
        assert called == []
        lock.release()
        over = asyncio.Event()
        process_watch.watch("a", over.set)
        await over.wait()
        assert called == ["first", "second"]
        assert os.listdir(tmp_path) == []

    run(scenario())


def test_watch_when_it_was_idle_for_a_while_then_it_looks_again(tmp_path: Path, run: Loop) -> None:
    async def scenario() -> None:
        process_watch = ProcessWatch(tmp_path)
        for _ in range(2):
            over = asyncio.Event()
            process_watch.watch("free", over.set)
            await over.wait()
            await asyncio.gather(*looking())

    run(scenario())


def looking() -> list[asyncio.Task[Any]]:
    """Returns the task that looks, if it is not over."""
    return [task for task in asyncio.all_tasks() if task.get_name() == "tdserve-process-watch"]


def test_watch_when_one_file_cannot_be_looked_at_then_nothing_is_proved_and_the_other_waits_end(
    tmp_path: Path, run: Loop
) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")

    async def scenario() -> None:
        process_watch, called, over = ProcessWatch(tmp_path), list[str](), asyncio.Event()
        process_watch.watch("link", lambda: called.append("link"))
        process_watch.watch("free", over.set)
        await over.wait()
        assert not process_watch.is_gone("link")
        assert called == []
        process_watch.close()

    run(scenario())


def test_close_when_a_process_is_waited_for_then_no_more(tmp_path: Path, run: Loop) -> None:
    async def scenario() -> None:
        process_watch = ProcessWatch(tmp_path)
        process_watch.close()
        lock = held(tmp_path, "a")
        process_watch.watch("a", lambda: pytest.fail("told"))
        (task,) = looking()
        process_watch.close()
        await asyncio.wait({task})
        assert task.cancelled()
        lock.release()

    run(scenario())


def test_tidy_when_the_server_starts_then_only_files_that_matter_stay(tmp_path: Path, run: Loop) -> None:
    async def scenario() -> None:
        process_watch = ProcessWatch(tmp_path)
        lock = held(tmp_path, "held")
        for name in ("waiting", "left"):
            (tmp_path / name).touch()
        (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
        process_watch.watch("waiting", lambda: None)
        process_watch.remove_unused()
        assert sorted(os.listdir(tmp_path)) == ["held", "link", "waiting"]
        process_watch.close()
        lock.release()

    run(scenario())
