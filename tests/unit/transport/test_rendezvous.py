from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from tdserve.base.errors import ConnectError
from tdserve.transport.rendezvous import Branch, KVStore


def test_set_when_called_then_published_and_known_here() -> None:
    posted: list[tuple[str, bytes]] = []
    store = KVStore(lambda key, value: posted.append((key, value)))
    store.set("rank 0", "text")
    store.set("rank 1", b"bytes")
    assert posted == [("rank 0", b"text"), ("rank 1", b"bytes")]
    assert store.get("rank 0") == b"text"


def test_wait_when_the_other_end_sets_later_then_returns() -> None:
    store = KVStore(lambda key, value: None)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(store.wait, ["a", "b"], timedelta(seconds=20))
        store.feed("b", b"2")
        store.feed("a", b"1")
        waiting.result(20.0)
    assert store.get("a") == b"1"


def test_get_when_closed_then_connect_error_but_known_entries_stay() -> None:
    store = KVStore(lambda key, value: None)
    store.feed("known", b"x")
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(store.get, "unknown")
        store.close()
        with pytest.raises(ConnectError, match="closed during the rendezvous"):
            waiting.result(20.0)
    assert store.get("known") == b"x"


def test_branch_when_the_rendezvous_is_closed_then_waiting_calls_get_connect_error() -> None:
    store = KVStore(lambda key, value: None)
    store.close()
    with pytest.raises(ConnectError):
        Branch(store, "a").get("key")


def test_branch_when_both_ends_have_one_then_entries_of_others_are_not_seen() -> None:
    posted: list[tuple[str, bytes]] = []
    store = KVStore(lambda key, value: posted.append((key, value)))
    Branch(Branch(store, "order"), "attempt 0").set("0", b"x")
    assert posted == [("order/attempt 0/0", b"x")]
    assert Branch(Branch(store, "order"), "attempt 0").get("0") == b"x"
    other = Branch(store, "attempt 0")
    other.timeout_s = 0.01
    with pytest.raises(ConnectError, match="did not come"):
        other.get("0")
