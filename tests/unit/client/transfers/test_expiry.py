"""Futures whose time is over."""

from __future__ import annotations

from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

from tdserve.client.transfers.expiry import ExpiryWatch


def test_watch_when_the_time_of_some_is_over_then_they_expire_in_their_order_and_no_others() -> None:
    watch, expired = ExpiryWatch(), SimpleQueue[str]()
    futures: dict[str, Future[Any]] = {name: Future() for name in ("last", "done", "first", "never")}
    times_s = {"last": 0.3, "done": 0.01, "first": 0.1, "never": None}
    for name, future in futures.items():
        watch.watch(future, times_s[name], lambda name=name: expired.put(name))  # type: ignore[misc]
        if name == "done":
            future.set_result(None)
    assert [expired.get(timeout=20.0) for _ in range(2)] == ["first", "last"]
    assert expired.empty()


def test_watch_when_the_future_is_done_already_then_nothing_is_kept() -> None:
    watch, expired = ExpiryWatch(), SimpleQueue[str]()
    watch.watch(_make_done(), 0.01, lambda: expired.put("done"))
    watch.watch(Future(), 0.1, lambda: expired.put("other"))
    assert expired.get(timeout=20.0) == "other"
    assert expired.empty()


def _make_done() -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(None)
    return future
