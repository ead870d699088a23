"""A client that makes calls with a short timeout one after another, and prints how each has ended.

``python -m tests.integration.network_caller ADDRESS TRANSPORT TIMEOUT_S``; a line of JSON for each call, until it is
killed.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from typing import Any

import torch
from tensordict import TensorDict

import tdserve
from tdserve.base.config import ClientConfig, check_transport

NUM_FLOATS = 50_000
"""Numbers in a row. An extend or sample of eight rows is 1.6 MB: many packets, so that faults hit some in the
middle."""


def make_calls(client: tdserve.Client, timeout_s: float) -> dict[str, Any]:
    """Returns the calls by name, on stores that are created where they are missing."""
    row = TensorDict({"x": torch.ones(NUM_FLOATS)}, [])
    table = client.create_replay("network", row, capacity=64, exists_ok=True)
    entries = client.create_kv("network-entries", exists_ok=True)
    rows = row.expand(8).clone()
    table.extend(rows)
    entries.put("key", "value")
    return {
        "extend": lambda: table.extend(rows, timeout_s=timeout_s),
        "sample": lambda: table.sample(8, timeout_s=timeout_s),
        "get": lambda: entries.get("key", timeout_s=timeout_s),
        "publish": lambda: client.publish("network-weights", rows, timeout_s=timeout_s),
        "latest": lambda: client.latest("network-weights", timeout_s=timeout_s),
    }


def main() -> None:
    """Makes the calls in turn."""
    address, transport, timeout_s = sys.argv[1:]
    torch.set_num_threads(1)
    settings = ClientConfig.from_env()
    client = tdserve.connect(
        address, transport=check_transport(transport), token=settings.find_token(), tls=settings.find_tls()
    )
    calls = make_calls(client, float(timeout_s))
    for name in itertools.cycle(calls):
        begin_s, error = time.monotonic(), ""
        try:
            calls[name]()
        except tdserve.TDServeError as fault:
            error = f"{type(fault).__name__}: {fault}"
        sys.stdout.write(json.dumps({"call": name, "took_s": time.monotonic() - begin_s, "error": error}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
