"""A collector: acts with the newest weights on a device of its own, and sends what happened."""

from __future__ import annotations

import sys
import time

import torch
from tensordict import TensorDict

import tdserve
from tdserve.examples.collectors.task import PATIENCE_S, Names, collect, make_policy, make_report
from tdserve.examples.demo.processes import end_with_parent

NUM_ROWS = 256
"""Rows of one message."""


class Collector:
    """Collects rows.

    Args:
        client: An open client, the caller's.
        names: Stores of the run; waited for until the learner has made them.
        index: Number of this collector, from 0; marks its rows.
        device: Where the policy computes.
    """

    def __init__(self, client: tdserve.Client, names: Names, *, index: int, device: torch.device) -> None:
        self._client = client
        self._names = names
        self._index = index
        self._device = device
        self._policy = make_policy().to(device)
        # shares the policy's memory: what is received into it is what the policy computes with
        self._parameters = TensorDict.from_module(self._policy).data
        self._rows = client.replay(names.rows, timeout_s=PATIENCE_S)
        self._version = 0
        self._num_rows = 0
        self._num_versions = 0

    def follow(self) -> bool:
        """Takes the newest weights if they are newer, and skips what came between. Returns whether to continue.

        Only the first are waited for: it rather collects with older ones than not at all.
        """
        timeout_s = 0 if self._version else PATIENCE_S
        newest = self._client.latest(
            self._names.policy, newer_than=self._version, timeout_s=timeout_s, out=self._parameters
        )
        if newest is None:
            return True
        self._version = newest.version
        self._num_versions += 1
        return not newest.metadata["is_last"]

    def extend(self) -> None:
        """Collects some rows and sends them."""
        self._rows.extend(collect(self._policy, NUM_ROWS, self._device, collector=self._index, version=self._version))
        self._num_rows += NUM_ROWS

    def run(self) -> None:
        """Reports that it has started, collects until the last weights have come, and reports what it did."""
        started_s = time.monotonic()
        self._report(0.0)
        while self.follow():
            self.extend()
        self._report(time.monotonic() - started_s)

    def _report(self, seconds: float) -> None:
        counts = {"num_rows": self._num_rows, "num_versions": self._num_versions}
        report = make_report(self._index, **counts, seconds=seconds, device=str(self._device))
        self._client.queue(self._names.reports, timeout_s=PATIENCE_S).extend(report)


def choose_device(index: int) -> torch.device:
    """Returns the device of a collector on this machine: a GPU of its own while there are enough."""
    return torch.device("cuda", index % torch.cuda.device_count()) if torch.cuda.is_available() else torch.device("cpu")


def collect_all(address: str, run: str, *, index: int, local_index: int | None = None) -> None:
    """Runs a collector from its beginning to its end.

    Args:
        address: Address of the server.
        run: Name of the run.
        index: Number of the collector in the run.
        local_index: Its number on this machine, where that is another one.
    """
    torch.set_num_threads(1)
    with tdserve.connect(address, timeout_s=PATIENCE_S) as client:
        device = choose_device(index if local_index is None else local_index)
        Collector(client, Names.of(run), index=index, device=device).run()


if __name__ == "__main__":
    end_with_parent()
    address, run, index = sys.argv[1:]
    collect_all(address, run, index=int(index))
