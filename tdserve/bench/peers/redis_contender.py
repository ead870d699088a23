"""Redis, through tensordict's ``TensorDictStore``."""

from __future__ import annotations

import importlib.util
import shutil
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from tdserve.base.errors import PeerLostError
from tdserve.bench.peers.contender import Contender

LOOPBACK = "127.0.0.1"
START_TIMEOUT_S = 20.0


class RedisStore(Contender):
    """A Redis server in memory. Where the next row goes, and how many there are, each client has to know by itself."""

    label = "Redis"

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None
        self._stores: dict[str, Any] = {}
        self._num_written: dict[str, int] = {}

    @classmethod
    def find_missing(cls) -> str:
        if shutil.which("redis-server") is None:
            return "a Redis server: apt install redis-server"
        return "" if importlib.util.find_spec("redis") else "pip install redis"

    def open(self, folder: Path) -> None:
        with socket.socket() as taken:
            taken.bind((LOOPBACK, 0))
            self._port = taken.getsockname()[1]
        command = ["redis-server", "--bind", LOOPBACK, "--port", str(self._port), "--dir", str(folder)]
        command += ["--save", "", "--appendonly", "no", "--proto-max-bulk-len", "4gb"]
        self._server = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
        end_s = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                socket.create_connection((LOOPBACK, self._port), timeout=1.0).close()
                return
            except OSError as error:
                if self._server.poll() is not None or time.monotonic() > end_s:
                    raise PeerLostError(peer="redis-server", reason="it does not answer") from error
            time.sleep(0.02)

    def close(self) -> None:
        for store in self._stores.values():
            store.close()
        if self._server is not None:
            self._server.terminate()
            self._server.wait()

    def create(self, name: str, row: TensorDict, capacity: int) -> None:
        self._stores[name] = self._make(row.clone().zero_().expand(capacity))
        self._num_written[name] = 0

    def extend(self, name: str, rows: TensorDict) -> None:
        store, num_rows = self._stores[name], len(rows)
        first = self._num_written[name] % len(store)
        head = min(num_rows, len(store) - first)
        store[first : first + head] = rows[:head]
        if head < num_rows:
            store[: num_rows - head] = rows[head:]
        self._num_written[name] += num_rows

    def sample(self, name: str, num_rows: int) -> TensorDictBase:
        store = self._stores[name]
        found: TensorDictBase = store[torch.randint(min(self._num_written[name], len(store)), (num_rows,))]
        return found

    def put(self, name: str, value: TensorDict) -> None:
        if name in self._stores:
            self._stores[name].update_(value)
        else:
            self._stores[name] = self._make(value)

    def get(self, name: str) -> TensorDictBase:
        found: TensorDictBase = self._stores[name].to_local()
        return found

    def _make(self, content: TensorDictBase) -> Any:
        from tensordict.store import TensorDictStore

        return TensorDictStore.from_tensordict(content.contiguous(), backend="redis", host=LOOPBACK, port=self._port)
