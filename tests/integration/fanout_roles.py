"""Roles of children of ``ForkedClients``: they pull versions and pass them on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict

from tdserve.client.connecting import connect  # here, before the forks
from tdserve.client.relays.kept_version import KeptVersion

Say = Callable[..., None]

TIMEOUT_S = 60.0
NUM_LEAVES = 4


def weights(version: int, nbytes: int) -> TensorDict:
    """Leaves that differ between versions, and between places in a version."""
    count = nbytes // NUM_LEAVES // 4
    return TensorDict(
        {f"layer{at}": torch.arange(count, dtype=torch.int32) * (at + 1) + 1000 * version for at in range(NUM_LEAVES)},
        [],
    )


def pull(say: Say, address: str, name: str, nbytes: int, *, strikes: int = 0) -> None:
    """Gets every version that is told to it, by ``SIGUSR1``, and compares every byte; ends with ``SIGTERM``.

    Args:
        strikes: A signal that it sends itself when it has passed the first message of a version on.
    """
    signals = {signal.SIGUSR1, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    if strikes:
        _strike(strikes)
    with connect(address, transport="gloo", timeout_s=TIMEOUT_S) as client:
        say("connected")
        version = 0
        while signal.sigwait(signals) == signal.SIGUSR1:
            began = time.monotonic()
            found = client.latest(name, newer_than=version)
            assert found is not None
            took_s = time.monotonic() - began
            version = found.version
            expected = weights(version, nbytes)
            is_equal = all(torch.equal(found.data[key], expected[key]) for key in expected.keys())  # noqa: SIM118
            say("version", version, is_equal, f"{took_s:.2f}")


def _strike(number: int) -> None:
    kept: Any = KeptVersion
    wait = kept.wait

    def struck(self: KeptVersion, message: int, timeout_s: float) -> None:
        if message == 1:
            os.kill(os.getpid(), number)
        wait(self, message, timeout_s)

    kept.wait = struck
