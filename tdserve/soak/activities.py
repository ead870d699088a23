"""What a client of a run does: an activity for each kind of call, each in a thread of its own over one connection."""

from __future__ import annotations

import itertools
import random
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

import torch
from tensordict import TensorDict

from tdserve.base.errors import ConnectError, CorruptDataError, DeadlineExceededError, TDServeError
from tdserve.soak.history import Recorder
from tdserve.soak.round_stores import (
    KEYS,
    NUM_KEYS,
    NUM_SLOTS,
    SLOTS,
    TABLES,
    RoundStores,
    check_part,
    identify_rows,
    make_entry,
    make_part,
    make_rows,
    make_slots,
    read_entry,
    read_slot_values,
)

TIMEOUT_S = 90.0
"""Timeout of every call, longer than any restart of the server on a busy machine."""

HURRY_S = 0.5
"""Timeout of the calls whose ends are compared with their deadlines."""

NUM_PARTS = 3
"""Parts that a client leaves in the store whose keys change."""

PAUSE_S = 0.005
"""Pause between two calls of a thread, like that of an actor that steps its environment, so that the stores do not
overflow."""

Act = Callable[[Recorder, int], None]
"""One step of an activity: it gets the history, and a number that grows."""


class ClientWork:
    """One client's part of a round: its threads, from the construction on until ``end``.

    Args:
        stores: The stores of the round, opened by the client.
        folder: Folder of the histories.
        number: Number of the client, different for every process of a run.
        first_slot: The first of the rows that only this client overwrites.
        num_slots: Their number.
    """

    def __init__(self, stores: RoundStores, folder: Path, *, number: int, first_slot: int, num_slots: int) -> None:
        self.stores = stores
        self.client = stores.client
        self.folder = folder
        self.number = number
        self.slots = range(first_slot, first_slot + num_slots)
        self.is_over = Event()
        self.random = random.Random(number)
        self._threads = [Thread(target=self._run, args=(role,), daemon=True) for role in ACTIVITIES]
        for thread in self._threads:
            thread.start()

    def end(self) -> bool:
        """Ends the threads after the call in which each is; returns whether all have ended in time."""
        self.is_over.set()
        for thread in self._threads:
            thread.join(TIMEOUT_S)
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self, role: str) -> None:
        """Acts until the round ends. An unexpected error is recorded, and the check reports it."""
        try:
            with Recorder(self.folder / f"{role}-{self.number:05d}.jsonl") as recorder:
                self._repeat(recorder, ACTIVITIES[role](self))
        except BaseException:  # noqa: BLE001 (the check reports it)
            if not self.is_over.is_set():
                (self.folder / f"fault-{role}-{self.number}.txt").write_text(traceback.format_exc())

    def _repeat(self, recorder: Recorder, act: Act) -> None:
        for count in itertools.count():
            if self.is_over.wait(PAUSE_S):
                return
            try:
                act(recorder, count)
            except TDServeError as error:  # of a read: a write is recorded with its outcome
                if not error.retryable:
                    raise

    def _call(self, recorder: Recorder, make: Callable[[], Any], **fields: Any) -> Any:
        """Makes one call and records it; returns None if it fails."""
        recorder.write("call", **fields)
        try:
            answer = make()
        except TDServeError as error:
            recorder.write("failed", error=f"{type(error).__name__}: {error}"[:500])
            return None
        numbers = answer.tolist() if isinstance(answer, torch.Tensor) else None  # of the rows that were written
        recorder.write("ok", answer=answer if isinstance(answer, int) else numbers)
        return answer

    def extend(self, name: str) -> Act:
        """Extends a table by rows with growing numbers."""
        table = self.stores.open_table(name)
        following = 0

        def act(recorder: Recorder, _: int) -> None:
            nonlocal following
            num_rows = self.random.randint(1, 8)
            rows = make_rows(name, self.number, following, num_rows)
            self._call(recorder, lambda: table.extend(rows, timeout_s=TIMEOUT_S), first=following, num_rows=num_rows)
            following += num_rows

        return act

    def sample(self) -> Act:
        """Samples each table in turn, checks the rows and updates priorities."""
        tables = {name: self.stores.open_table(name) for name in TABLES}

        def act(recorder: Recorder, count: int) -> None:
            name = TABLES[count % len(TABLES)]
            try:
                sample = tables[name].sample(16, timeout_s=2.0)
            except DeadlineExceededError:
                return
            identify_rows(name, sample)
            recorder.write("saw", name=name, num_rows=len(sample))
            if name == "asked":
                tables[name].update_priority(sample, torch.rand(len(sample)) + 0.1)

        return act

    def overwrite(self) -> Act:
        """Overwrites some of its slots and reads one of them."""
        store = self.client[self.stores.name(SLOTS)]

        def act(recorder: Recorder, count: int) -> None:
            first = self.random.choice(self.slots)
            last = min(first + self.random.randint(1, 4), self.slots.stop)
            value = self.number * 1_000_000 + count + 1

            def write() -> None:
                store[first:last] = make_slots(value, last - first)

            self._call(recorder, write, first=first, last=last, value=value)
            try:
                recorder.write("saw", slot=first, value=read_slot_values(store[first : first + 1])[0])
            except CorruptDataError:
                recorder.write("saw", slot=first, value=None)

        return act

    def alter(self) -> Act:
        """Adds a part of a store, renames it, reads it, and removes an older one."""
        store = self.client[self.stores.name(KEYS)]

        def act(recorder: Recorder, count: int) -> None:
            value = self.number * 1_000_000 + count
            made, named = f"made {value}", f"named {value}"
            self._call(recorder, lambda: store.update({made: make_part(value)}), what="add", value=value)
            self._call(recorder, lambda: store.rename_key_(made, named), what="rename", value=value)
            check_part(store[named], value)
            if count >= NUM_PARTS:
                oldest = value - NUM_PARTS
                self._call(recorder, lambda: store.del_(f"named {oldest}"), what="remove", value=oldest)

        return act

    def publish(self) -> Act:
        """Publishes versions whose content names its publisher."""
        name = self.stores.name(f"policy-{self.slots.start}")

        def act(recorder: Recorder, count: int) -> None:
            identity = self.number * 1_000_000 + count
            weights = TensorDict({"w": torch.full((2_000,), float(identity), dtype=torch.float64)}, [])
            publish = self.client.publish
            self._call(
                recorder,
                lambda: publish(name, weights, metadata={"id": identity}, timeout_s=TIMEOUT_S),
                name=name,
                id=identity,
            )

        return act

    def follow(self) -> Act:
        """Records the versions that another publishes, in order."""
        following = self.slots.stop if self.slots.stop + len(self.slots) <= NUM_SLOTS else 0
        name = self.stores.name(f"policy-{following}")
        newest = 0

        def act(recorder: Recorder, _: int) -> None:
            nonlocal newest
            weights = self.client.latest(name, newer_than=newest, timeout_s=0)
            if weights is not None:
                newest = weights.version
                content = weights.data["w"].unique().tolist()
                recorder.write("saw", name=name, version=newest, id=weights.metadata["id"], content=content)

        return act

    def produce(self) -> Act:
        """Puts jobs with numbers of their own into the queue."""
        queue = self.stores.open_queue()

        def act(recorder: Recorder, count: int) -> None:
            first = self.number * 1_000_000 + 4 * count
            jobs = list(range(first, first + self.random.randint(1, 4)))
            rows = TensorDict({"job": torch.tensor(jobs)}, [len(jobs)])
            self._call(recorder, lambda: queue.extend(rows, timeout_s=TIMEOUT_S), jobs=jobs)

        return act

    def consume(self) -> Act:
        """Takes jobs and acknowledges them."""
        queue = self.stores.open_queue()

        def act(recorder: Recorder, _: int) -> None:
            try:
                rows = queue.take(self.random.randint(1, 8), timeout_s=2.0, ack=False)
            except DeadlineExceededError:
                return
            identity = {name: rows[name].tolist() for name in ("index", "generation")}
            self._call(recorder, lambda: queue.ack(rows, timeout_s=TIMEOUT_S), jobs=rows["job"].tolist(), **identity)

        return act

    def enter(self) -> Act:
        """Puts, reads and deletes entries of its own of the keyed store."""
        entries = self.stores.open_entries()

        def act(recorder: Recorder, count: int) -> None:
            key = f"{self.number}/{self.random.randrange(NUM_KEYS)}"
            if count % 5 == 4:
                delete = entries.delete
                self._call(
                    recorder, lambda: delete(key, missing_ok=True, timeout_s=TIMEOUT_S), key=key, what="delete", value=0
                )
                return
            value = self.number * 1_000_000 + count
            entry = make_entry(value)
            self._call(recorder, lambda: entries.put(key, entry, timeout_s=TIMEOUT_S), key=key, what="put", value=value)
            recorder.write("saw", key=key, value=read_entry(entries.get(key, timeout_s=TIMEOUT_S)))

        return act

    def create(self) -> Act:
        """Creates stores and deletes most of them; some names are used again and again."""

        def act(recorder: Recorder, count: int) -> None:
            name = self.stores.name(f"made-{self.number}-{count % 5}")
            if count >= 5:
                self._call(recorder, lambda: self.client.delete(name), name=name, what="delete")
            made = TensorDict({"count": torch.full((3,), count)}, [3])

            def make() -> None:
                end_s = time.monotonic() + TIMEOUT_S
                while True:
                    try:
                        self.client.init_remote(made, name)
                        return
                    except ConnectError:  # of several servers, the one that decides about the name is down
                        if time.monotonic() > end_s:
                            raise
                    time.sleep(PAUSE_S)

            self._call(recorder, make, name=name, what="create", count=count)

        return act

    def hurry(self) -> Act:
        """Makes calls with a short timeout, and records how late each ends that gives up."""
        table, entries = self.stores.open_table("asked"), self.stores.open_entries()
        calls: list[Callable[[], object]] = [
            lambda: table.sample(4, timeout_s=HURRY_S),
            lambda: entries.get("absent", timeout_s=HURRY_S),
            lambda: self.client.latest(self.stores.name("policy-0"), newer_than=1 << 40, timeout_s=HURRY_S),
        ]

        def act(recorder: Recorder, count: int) -> None:
            begin_s = time.monotonic()
            with suppress(TDServeError):
                calls[count % len(calls)]()
            recorder.write("saw", call=count % len(calls), late_s=time.monotonic() - begin_s - HURRY_S)

        return act


ACTIVITIES: dict[str, Callable[[ClientWork], Act]] = {
    **{f"extend-{name}": lambda work, name=name: work.extend(name) for name in TABLES},  # type: ignore[misc]
    "sample": ClientWork.sample,
    "overwrite": ClientWork.overwrite,
    "alter": ClientWork.alter,
    "publish": ClientWork.publish,
    "follow": ClientWork.follow,
    "produce": ClientWork.produce,
    "consume": ClientWork.consume,
    "enter": ClientWork.enter,
    "create": ClientWork.create,
    "hurry": ClientWork.hurry,
}
"""The activities by name, which is also that of their histories."""
