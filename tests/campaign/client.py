"""One client of a campaign, as a process: it has a thread for each kind of call, all over one connection.

``python -m tests.campaign.client ADDRESS TRANSPORT FOLDER NUMBER SLOTS``; it goes on until its standard input closes.
"""

from __future__ import annotations

import itertools
import os
import random
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread
from typing import Any

import torch
from tensordict import TensorDict

import tdserve
from tdserve.base.config import check_transport
from tests.campaign.history import Recorder
from tests.campaign.stores import (
    KEYS,
    NUM_SLOTS,
    QUEUE,
    SLOTS,
    check_part,
    make_part,
    make_rows,
    make_slots,
    open_queue,
    open_tables,
    read_slot_values,
)

TIMEOUT_S = 90.0
"""Timeout of every call, longer than any restart of the server on a busy machine."""

NUM_PARTS = 3
"""Parts that a client leaves in the store whose keys change."""

PAUSE_S = 0.005
"""Pause between two calls of a thread, as of an actor that steps its environment, so that the stores do not
overflow."""


class CampaignClient:
    """The state that the threads share.

    Args:
        client: A client of the server.
        folder: Folder of the histories.
        number: Number of this process, different for every process.
        first_slot, num_slots: The rows that only this client overwrites.
    """

    def __init__(self, client: tdserve.Client, folder: Path, *, number: int, first_slot: int, num_slots: int) -> None:
        self.client = client
        self.folder = folder
        self.number = number
        self.slots = range(first_slot, first_slot + num_slots)
        self.is_over = Event()
        self.random = random.Random(number)

    def run(self, role: str, act: Callable[[Recorder, int], None]) -> None:
        """Acts until the campaign ends: calls ``act`` with the history and a number that grows."""
        recorder = Recorder(self.folder / f"{role}-{self.number:05d}.jsonl")
        for count in itertools.count():
            if self.is_over.wait(PAUSE_S):
                return
            try:
                act(recorder, count)
            except tdserve.TDServeError as error:  # fields of a read: a write is recorded with its outcome
                if not error.retryable:
                    raise

    def call(self, recorder: Recorder, make: Callable[[], Any], **fields: Any) -> Any:
        """Makes one call and records it; returns None if it fails."""
        recorder.write("call", **fields)
        try:
            answer = make()
        except tdserve.TDServeError as error:
            recorder.write("failed", error=f"{type(error).__name__}: {error}"[:500])
            return None
        recorder.write("ok", answer=answer if isinstance(answer, int) else None)
        return answer

    def extender(self, name: str) -> Callable[[Recorder, int], None]:
        """Extends a table by rows with growing numbers."""
        table = open_tables(self.client)[name]
        following = 0

        def act(recorder: Recorder, _: int) -> None:
            nonlocal following
            num_rows = self.random.randint(1, 8)
            rows = make_rows(name, self.number, following, num_rows)
            self.call(recorder, lambda: table.extend(rows, timeout_s=TIMEOUT_S), first=following, num_rows=num_rows)
            following += num_rows

        return act

    def overwrite(self, recorder: Recorder, count: int) -> None:
        """Overwrites some of its slots and reads one of them."""
        store = self.client[SLOTS]
        first = self.random.choice(self.slots)
        last = min(first + self.random.randint(1, 4), self.slots.stop)
        value = self.number * 1_000_000 + count + 1

        def write() -> None:
            store[first:last] = make_slots(value, last - first)

        self.call(recorder, write, first=first, last=last, value=value)
        try:
            recorder.write("saw", slot=first, value=read_slot_values(store[first : first + 1])[0])
        except tdserve.CorruptDataError:
            recorder.write("saw", slot=first, value=None)

    def alter(self, recorder: Recorder, count: int) -> None:
        """Adds a part of a store, renames it, reads it, and removes an older one."""
        store = self.client[KEYS]
        value = self.number * 1_000_000 + count
        made, named = f"made {value}", f"named {value}"
        steps = {
            "add": lambda: store.update({made: make_part(value)}),
            "rename": lambda: store.rename_key_(made, named),
        }
        for what, do in steps.items():
            self.call(recorder, do, what=what, value=value)
        check_part(store[named], value)
        if count >= NUM_PARTS:
            oldest = value - NUM_PARTS
            self.call(recorder, lambda: store.del_(f"named {oldest}"), what="remove", value=oldest)

    def publish(self, recorder: Recorder, count: int) -> None:
        """Publishes a version whose content names its publisher."""
        name, identity = f"policy-{self.slots.start}", self.number * 1_000_000 + count
        weights = TensorDict({"w": torch.full((2_000,), float(identity), dtype=torch.float64)}, [])
        self.call(
            recorder,
            lambda: self.client.publish(name, weights, metadata={"id": identity}, timeout_s=TIMEOUT_S),
            name=name,
            id=identity,
        )

    def follower(self, name: str) -> Callable[[Recorder, int], None]:
        """Records the versions that it sees, in order."""
        newest = 0

        def act(recorder: Recorder, _: int) -> None:
            nonlocal newest
            weights = self.client.latest(name, newer_than=newest, timeout_s=0)
            if weights is not None:
                newest = weights.version
                content = weights.data["w"].unique().tolist()
                recorder.write("saw", name=name, version=newest, id=weights.metadata["id"], content=content)

        return act

    def producer(self) -> Callable[[Recorder, int], None]:
        """Puts jobs with numbers of their own into the queue."""
        queue = open_queue(self.client)

        def act(recorder: Recorder, count: int) -> None:
            first = self.number * 1_000_000 + 4 * count
            jobs = list(range(first, first + self.random.randint(1, 4)))
            rows = TensorDict({"job": torch.tensor(jobs)}, [len(jobs)])
            self.call(recorder, lambda: queue.extend(rows, timeout_s=TIMEOUT_S), jobs=jobs)

        return act

    def consume(self, recorder: Recorder, _: int) -> None:
        """Takes jobs and acknowledges them."""
        queue = self.client.queue(QUEUE)
        try:
            rows = queue.take(self.random.randint(1, 8), timeout_s=2.0, ack=False)
        except tdserve.DeadlineExceededError:
            return
        self.call(recorder, lambda: queue.ack(rows, timeout_s=TIMEOUT_S), jobs=rows["job"].tolist())

    def create(self, recorder: Recorder, count: int) -> None:
        """Creates stores, reads them and deletes most of them; some names are used again and again."""
        name = f"made-{self.number}-{count % 5}"
        if count >= 5:
            self.call(recorder, lambda: self.client.delete(name), name=name, what="delete")
        made = TensorDict({"count": torch.full((3,), count)}, [3])
        self.call(recorder, lambda: self.client.init_remote(made, name), name=name, what="create", count=count)

    def roles(self) -> dict[str, Callable[[Recorder, int], None]]:
        """Returns the activities by name."""
        return {
            **{f"extend-{name}": self.extender(name) for name in ("claimed", "asked", "chats")},
            "overwrite": self.overwrite,
            "alter": self.alter,
            "publish": self.publish,
            "follow": self.follower(f"policy-{(self.slots.start + len(self.slots)) % NUM_SLOTS}"),
            "produce": self.producer(),
            "consume": self.consume,
            "create": self.create,
        }


def _run(shared: CampaignClient, role: str, act: Callable[[Recorder, int], None]) -> None:
    """Runs a thread. An unexpected error is recorded, and the check reports it."""
    try:
        shared.run(role, act)
    except BaseException:  # noqa: BLE001 (the check reports it)
        if not shared.is_over.is_set():
            (shared.folder / f"fault-{role}-{shared.number}.txt").write_text(traceback.format_exc())


def main(arguments: list[str]) -> None:
    """Runs one client."""
    address, transport, folder, number, first_slot = arguments
    torch.set_num_threads(1)
    client = tdserve.connect(address, transport=check_transport(transport), timeout_s=TIMEOUT_S)
    shared = CampaignClient(
        client, Path(folder), number=int(number), first_slot=int(first_slot), num_slots=NUM_SLOTS // 4
    )
    threads = [Thread(target=_run, args=(shared, role, act), daemon=True) for role, act in shared.roles().items()]
    for thread in threads:
        thread.start()
    sys.stdin.read()
    shared.is_over.set()
    for thread in threads:
        thread.join(TIMEOUT_S)
    client.close()
    os._exit(1 if any(thread.is_alive() for thread in threads) else 0)


if __name__ == "__main__":
    main(sys.argv[1:])
