"""A rank of a job: it starts servers with the others, and writes to a table that all share.

``torchrun … -m tests.integration.cluster.torchrun_rank STORAGE`` prints a line of JSON for each rank.
"""

from __future__ import annotations

import json
import os
import sys

import torch
from tensordict import TensorDict

import tdserve
from tdserve.base.torchrun_rank import TorchrunRank
from tests.processes import START_TIMEOUT_S, wait_for

NUM_ROWS = 10


def run(storage: str, name: str) -> None:
    """Writes rows of this rank, and reads those of all of them."""
    rank = TorchrunRank.from_env()
    assert rank is not None
    with tdserve.torchrun.start_servers(storage) as servers, servers.client() as client:
        assert isinstance(client, tdserve.ClusterClient)
        numbers = torch.arange(NUM_ROWS) + NUM_ROWS * rank.rank
        rows = TensorDict({"number": numbers}, [NUM_ROWS])
        before = {*client.stores()}
        table = client.create_replay(name, rows[0], 1_000, shards="all", exists_ok=True)
        table.extend(rows)
        num_rows = NUM_ROWS * rank.world_size
        wait_for(lambda: len(table) == num_rows, "the rows of all ranks", timeout_s=START_TIMEOUT_S)
        facts = {
            "rank": rank.rank,
            "node": rank.node_rank,
            "address": servers.address,
            "before": sorted(before - {name}),
            "numbers": sorted(table[:]["number"].tolist()),
            "shards": sorted({int(row) // table.part_capacity for row in table.sample(200)["index"]}),
        }
        sys.stdout.write(json.dumps(facts) + "\n")


if __name__ == "__main__":
    run(sys.argv[1].format(machine=os.environ["MACHINE"]), sys.argv[2])
