"""tdserve, over gloo or shared memory."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

from tensordict import TensorDict, TensorDictBase

import tdserve
from tdserve.bench.peers.contender import Contender

NUM_UNDER_WAY = 16
"""Extends that are sent before the first of them is waited for."""

WRITER_ROWS = 64
"""Rows that a writer of single rows sends together."""


class _OverTransport(Contender):
    transport: Literal["gloo", "shm"]

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._sent: deque[Future[Any]] = deque()
        self._tables: dict[str, tdserve.ReplayHandle] = {}
        self._items: Any = None
        self._writers: dict[str, Any] = {}

    @classmethod
    def find_missing(cls) -> str:
        return ""

    def open(self, folder: Path) -> None:
        server = self._stack.enter_context(tdserve.Server(folder))
        self._client = self._stack.enter_context(tdserve.connect(server.address, transport=self.transport))

    def close(self) -> None:
        self._stack.close()

    def create(self, name: str, row: TensorDict, capacity: int) -> None:
        self._tables[name] = self._client.create_replay(name, row, capacity)

    def extend(self, name: str, rows: TensorDict) -> None:
        self._tables[name].extend(rows)

    def send(self, name: str, rows: TensorDict) -> None:
        if len(self._sent) == NUM_UNDER_WAY:
            self._sent.popleft().result()
        self._sent.append(self._tables[name].extend(rows, return_early=True))

    def send_one(self, name: str, row: TensorDict) -> None:
        if name not in self._writers:
            self._writers[name] = self._stack.enter_context(self._tables[name].writer(batch=WRITER_ROWS))
        self._writers[name].append(row)

    def flush(self) -> None:
        while self._sent:
            self._sent.popleft().result()
        for writer in self._writers.values():
            writer.flush()

    def sample(self, name: str, num_rows: int) -> TensorDictBase:
        found: TensorDictBase = self._tables[name].sample(num_rows)
        return found

    def put(self, name: str, value: TensorDict) -> None:
        if self._items is None:
            self._items = self._client.create_kv("items")
        self._items.put(name, value)

    def get(self, name: str) -> TensorDictBase:
        found: TensorDictBase = self._items[name]
        return found

    def publish(self, name: str, weights: TensorDict) -> None:
        self._client.publish(name, weights)

    def pull(self, name: str, into: TensorDict) -> TensorDictBase:
        self._client.latest(name, out=into)
        return into


class TDServeOverGloo(_OverTransport):
    """tdserve as over a network."""

    label, transport = "tdserve, gloo", "gloo"


class TDServeInSharedMemory(_OverTransport):
    """tdserve on one machine."""

    label, transport = "tdserve, shm", "shm"
