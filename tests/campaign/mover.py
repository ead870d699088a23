"""A process of a campaign that moves stores between the servers all the time, and may be killed in the middle.

``python -m tests.campaign.mover ADDRESS HISTORY SEED``; it goes on until its standard input closes, and records each
move in the history.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from threading import Event, Thread

import tdserve
from tdserve.client.cluster.cluster_client import ClusterClient
from tdserve.soak.round_stores import list_movable

TIMEOUT_S = 60.0


def _await_end(is_over: Event) -> None:
    sys.stdin.read()
    is_over.set()


def main() -> int:
    """Moves stores until the campaign ends."""
    address, history, seed = sys.argv[1:]
    is_over, chance = Event(), random.Random(int(seed))
    Thread(target=_await_end, args=(is_over,), daemon=True).start()
    with tdserve.connect(address, transport="gloo") as client, Path(history).open("a") as recorded:
        assert isinstance(client, ClusterClient), f"{address!r} names one server"
        num_servers = len(client.members)
        while not is_over.is_set():
            name, server = chance.choice(list_movable()), chance.randrange(num_servers)
            try:
                before = client.find_server(name)
                now = client.rebalance(name, server, timeout_s=TIMEOUT_S)
                outcome = "" if before == now else "moved"
            except tdserve.TDServeError as error:  # such as a server that was killed, or has another part
                outcome = f"{type(error).__name__}: {error}"
            recorded.write(json.dumps({"store": name, "server": server, "outcome": outcome}) + "\n")
            recorded.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
