"""Processes that import files, and stop or have little memory on the way."""

from __future__ import annotations

import signal
from typing import Any

import torch
from tensordict import TensorDict

import tdserve
from tdserve.imports import import_store
from tests.integration.h5_sender import limit_memory
from tests.integration.programs import Say


def import_and_wait(say: Say, address: str, transport: Any, kind: str, path: str, name: str) -> None:
    """Imports a file, and waits to be killed when its first piece is written."""

    def wait(num_written: int, num_rows: int) -> None:
        say(num_written, "of", num_rows)
        signal.pause()

    with tdserve.connect(address, transport=transport) as client:
        import_store(client, kind, path, name, on_progress=wait)


def import_with_little_memory(
    say: Say, address: str, transport: Any, kind: str, path: str, name: str, room_nbytes: int
) -> None:
    """Imports a file within limits."""
    with tdserve.connect(address, transport=transport) as client:
        client.init_remote(TensorDict({"x": torch.zeros(1 << 20)}, []), f"{name}-warm")
        client.delete(f"{name}-warm")
        limit_memory(room_nbytes)
        import_store(client, kind, path, name)
        say("imported")
