"""TorchRL's replay buffer in another process, called by ``torch.distributed.rpc``."""

from __future__ import annotations

import importlib.util
import logging
import socket
from pathlib import Path
from typing import Any

from tensordict import TensorDict, TensorDictBase

from tdserve.bench.child import Child, Pipe
from tdserve.bench.peers.contender import Contender

LOOPBACK = "127.0.0.1"


class HeldObjects:
    """What the remote process holds; TorchRL's buffers are called through it."""

    def __init__(self) -> None:
        self._replays: dict[str, Any] = {}
        self._values: dict[str, TensorDict] = {}

    def create(self, name: str, capacity: int, folder: str) -> None:
        """Makes a buffer in memory-mapped files."""
        from torchrl.data import LazyMemmapStorage, TensorDictReplayBuffer

        logging.getLogger("torchrl").setLevel(logging.WARNING)
        self._replays[name] = TensorDictReplayBuffer(storage=LazyMemmapStorage(capacity, scratch_dir=folder))

    def extend(self, name: str, rows: TensorDict) -> None:
        """Writes rows."""
        self._replays[name].extend(rows)

    def sample(self, name: str, num_rows: int) -> TensorDictBase:
        """Draws rows."""
        found: TensorDictBase = self._replays[name].sample(num_rows)
        return found

    def put(self, name: str, value: TensorDict) -> None:
        """Keeps a tensordict."""
        self._values[name] = value

    def get(self, name: str) -> TensorDict:
        """Returns a tensordict."""
        return self._values[name]


class TorchRLOverRPC(Contender):
    """TorchRL's ``TensorDictReplayBuffer`` at the other end of an RPC."""

    label = "TorchRL, RPC"

    def __init__(self) -> None:
        self._server: Child | None = None
        self._has_joined = False

    @classmethod
    def find_missing(cls) -> str:
        return "" if importlib.util.find_spec("torchrl") else "pip install --no-deps torchrl==0.14.1"

    def open(self, folder: Path) -> None:
        from torch.distributed import rpc

        with socket.socket() as taken:
            taken.bind((LOOPBACK, 0))
            port = taken.getsockname()[1]
        self._folder = folder
        self._server = Child(_serve, port)
        _join("client", 0, port)
        self._has_joined = True
        self._remote = rpc.remote("buffers", HeldObjects).rpc_sync()

    def close(self) -> None:
        from torch.distributed import rpc

        if self._has_joined:
            rpc.shutdown(graceful=False)
        if self._server is not None:
            self._server.close()

    def create(self, name: str, row: TensorDict, capacity: int) -> None:
        self._remote.create(name, capacity, str(self._folder / name))

    def extend(self, name: str, rows: TensorDict) -> None:
        self._remote.extend(name, rows)

    def sample(self, name: str, num_rows: int) -> TensorDictBase:
        found: TensorDictBase = self._remote.sample(name, num_rows)
        return found

    def put(self, name: str, value: TensorDict) -> None:
        self._remote.put(name, value)

    def get(self, name: str) -> TensorDictBase:
        found: TensorDictBase = self._remote.get(name)
        return found


def _join(name: str, rank: int, port: int) -> None:
    from torch.distributed import rpc

    # as over a network: tensors on one machine would go through shared memory otherwise
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"tcp://{LOOPBACK}:{port}", _transports=["uv"], _channels=["basic"]
    )
    rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options)  # type: ignore[no-untyped-call]


def _serve(pipe: Pipe, port: int) -> None:
    _join("buffers", 1, port)
    pipe.recv()  # ends when the pipe is closed
