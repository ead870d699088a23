"""The process of one client of a run.

``python -m tdserve.soak.working_client ADDRESS TRANSPORT NUMBER FIRST_SLOT NUM_SLOTS`` reads one JSON object per line:
``{"prefix": ..., "folder": ...}`` begins a round, and ``null`` ends it. The process prints ``ended`` after each round;
it leaves when its standard input closes.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

import tdserve
from tdserve.base.config import ClientConfig, check_transport
from tdserve.soak.activities import TIMEOUT_S, ClientWork
from tdserve.soak.round_stores import RoundStores


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one client. Token and TLS are those of the environment; returns 1 if a thread does not end."""
    address, transport, number, first_slot, num_slots = sys.argv[1:] if arguments is None else arguments
    torch.set_num_threads(1)
    settings = ClientConfig.from_env()
    client = tdserve.connect(
        address,
        transport=check_transport(transport),
        timeout_s=TIMEOUT_S,
        token=settings.find_token(),
        tls=settings.find_tls(),
    )
    work: ClientWork | None = None
    has_ended = True
    for line in itertools.chain(sys.stdin, ["null"]):
        if work is not None:
            has_ended &= work.end()
            work = None
            sys.stdout.write("ended\n")
            sys.stdout.flush()
        if (order := json.loads(line)) is not None:
            work = ClientWork(
                RoundStores(client, order["prefix"]),
                Path(order["folder"]),
                number=int(number),
                first_slot=int(first_slot),
                num_slots=int(num_slots),
            )
    client.close()
    return 0 if has_ended else 1


if __name__ == "__main__":
    os._exit(main())
