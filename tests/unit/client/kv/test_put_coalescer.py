"""Puts that share requests."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from threading import Event
from typing import Any

import pytest

import tdserve
from tdserve.base.deadline import Deadline
from tdserve.base.errors import CapacityError, DeadlineExceededError, TransferAbortedError, VersionConflictError
from tdserve.client.kv import put_coalescer
from tdserve.client.kv.put_coalescer import PutCoalescer, PutPart
from tdserve.client.session.calls.cancellation import Cancellation
from tdserve.client.transfers.write import write_early
from tdserve.values.value_bundles import SplitColumn

pytestmark = pytest.mark.integration


@pytest.fixture
def kv(client: tdserve.Client, name: str) -> Iterator[Any]:
    """A keyed store with little room."""
    made = client.create_kv(name, max_bytes=100_000)
    yield made
    client.delete(name)


def make_part(*keys: str, if_versions: list[int] | None = None, nbytes: int = 1) -> PutPart:
    """Returns a put of these keys, each with a record of an encoded value: nil, or so many bytes."""
    encoded = [key.encode() for key in keys]
    record = b"\0\xc0" if nbytes == 1 else b"\0\xc6" + (nbytes).to_bytes(4, "big") + bytes(nbytes)
    records = SplitColumn.from_values([record] * len(keys))
    return PutPart(encoded, records, if_versions, Deadline.after(20.0), "a put", is_alone=if_versions is not None)


def test_submit_when_many_then_they_share_requests_and_each_has_its_versions(client: tdserve.Client, kv: Any) -> None:
    coalescer = PutCoalescer(client, kv.name, kv.settings.make_stored_spec(kv.spec.fingerprint).fingerprint)
    coalescer.send(make_part("a"))
    newest = client.requests.newest
    parts = [make_part("a", f"{number}") for number in range(100)]
    for part in parts:
        coalescer.submit(part)
    coalescer.flush(Deadline.after(20.0))
    assert not coalescer.is_waiting
    versions = [part.future.result(0) for part in parts]
    assert client.requests.newest - newest < 50
    assert versions == sorted(set(versions))
    assert kv.versions(["a", "0", "99"]) == [versions[-1], versions[0] + 1, versions[-1] + 1]


def test_submit_when_their_times_differ_then_they_share_no_request(client: tdserve.Client, kv: Any) -> None:
    coalescer = PutCoalescer(client, kv.name, kv.settings.make_stored_spec(kv.spec.fingerprint).fingerprint)
    coalescer.send(make_part("a"))
    newest = client.requests.newest
    for number in range(20):
        coalescer.submit(replace(make_part(f"{number}"), deadline=Deadline.after(20.0 if number % 2 else 60.0)))
    coalescer.flush(Deadline.after(20.0))
    assert client.requests.newest - newest == 20


def test_submit_when_some_are_refused_then_the_others_are_put(client: tdserve.Client, kv: Any) -> None:
    coalescer = PutCoalescer(client, kv.name, kv.settings.make_stored_spec(kv.spec.fingerprint).fingerprint)
    parts = [make_part(f"{number}") for number in range(10)]
    parts.insert(4, make_part("x", nbytes=200_000))
    parts.insert(8, make_part("1", if_versions=[7_000]))
    for part in parts:
        coalescer.submit(part)
    with pytest.raises(CapacityError):
        parts[4].future.result(20.0)
    with pytest.raises(VersionConflictError):
        parts[8].future.result(20.0)
    coalescer.flush(Deadline.after(20.0))
    assert kv.keys() == sorted(str(number) for number in range(10))


def test_put_when_cancelled_while_others_wait_then_it_is_not_stored_and_they_are(
    kv: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_taken, may_send, cancellation = Event(), Event(), Cancellation()

    def write_late(*arguments: Any, **options: Any) -> Any:
        has_taken.set()
        assert may_send.wait(30.0)
        return write_early(*arguments, **options)

    def put() -> None:
        with cancellation.watch():
            kv.put("b", 2)

    monkeypatch.setattr(put_coalescer, "write_early", write_late)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(lambda: kv.put("a", 1, return_early=True).result(30.0))
        try:
            assert has_taken.wait(30.0)
            second = threads.submit(put)
            cancellation.cancel()
            with pytest.raises(TransferAbortedError):
                second.result(30.0)
            third = kv.put("c", 3, return_early=True)
        finally:
            may_send.set()
        first.result(30.0)
        third.result(30.0)
    assert sorted(kv.keys()) == ["a", "c"]


def test_removal_when_puts_before_it_have_no_answer_in_time_then_nothing_is_deleted_and_the_next_waits_too(
    kv: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_taken, may_send = Event(), Event()

    def write_late(*arguments: Any, **options: Any) -> Any:
        has_taken.set()
        assert may_send.wait(30.0)
        return write_early(*arguments, **options)

    kv.put("a", 0)
    monkeypatch.setattr(put_coalescer, "write_early", write_late)
    with ThreadPoolExecutor(1) as threads:
        put = threads.submit(lambda: kv.put(["a", "b"], [1, 2], return_early=True).result(30.0))
        try:
            assert has_taken.wait(30.0)
            for _ in range(2):
                with pytest.raises(DeadlineExceededError, match="made before"):
                    kv.delete("a", missing_ok=True, timeout_s=0)
            with pytest.raises(DeadlineExceededError, match="made before"):
                kv.pop("a", timeout_s=1e-3)
            assert kv.get("a") == 0
        finally:
            may_send.set()
        assert kv.delete(["a", "b"]) == 2
        put.result(30.0)
    assert kv.keys() == []


def test_flush_when_a_put_follows_then_it_is_not_waited_for(
    client: tdserve.Client, kv: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_taken, may_send, calls = Event(), [Event(), Event()], count()
    coalescer = PutCoalescer(client, kv.name, kv.settings.make_stored_spec(kv.spec.fingerprint).fingerprint)
    first, second = make_part("a"), make_part("b")

    def write_late(*arguments: Any, **options: Any) -> Any:
        has_taken.set()
        assert may_send[next(calls)].wait(30.0)
        return write_early(*arguments, **options)

    def read_clock() -> float:
        if has_taken.is_set() and not may_send[0].is_set():  # the call has begun
            coalescer.submit(second)
            may_send[0].set()
        return time.monotonic()

    deadline = Deadline.after(30.0, read_clock)
    monkeypatch.setattr(put_coalescer, "write_early", write_late)
    with ThreadPoolExecutor(1) as threads:
        threads.submit(coalescer.submit, first)
        try:
            assert has_taken.wait(30.0)
            coalescer.flush(deadline)
            assert first.future.done()
            assert not second.future.done()
        finally:
            for event in may_send:
                event.set()
        second.future.result(30.0)
