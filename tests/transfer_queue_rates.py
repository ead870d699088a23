"""Times TransferQueue's puts, gets and clears on its SimpleStorage and on tdserve, in turn, as a program sees them.

``python -m tests.transfer_queue_rates [ROUNDS]`` starts each storage ROUNDS times, twice by default, in a process of
its own, and prints for each case the least time of all rounds in milliseconds, with the ratio of ours to theirs: on a
busy machine medians show what else runs there.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from itertools import pairwise
from time import perf_counter

import ray
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from tensordict import NonTensorStack, TensorDict

from tdserve.transfer_queue import BACKEND

BACKENDS = ("SimpleStorage", BACKEND)
STEPS = ("put", "get", "clear")
NUM_ROWS = 256
FIELDS = tuple("abcdef")
NUM_WARM = 2
RESULT = "result "


def make_cases() -> dict[str, tuple[TensorDict, int]]:
    """Makes batches, and how often each is used."""
    lengths = torch.randint(256, 2048, (NUM_ROWS,), generator=torch.Generator().manual_seed(0)).tolist()
    ragged = torch.nested.as_nested_tensor([torch.arange(length) for length in lengths], layout=torch.jagged)
    small = {field: torch.zeros(NUM_ROWS, 8) for field in FIELDS[:3]}
    values = {
        "text": NonTensorStack(*[f"prompt {number} " * 20 for number in range(NUM_ROWS)]),
        "info": NonTensorStack(*[{"number": number, "reward": 0.5} for number in range(NUM_ROWS)]),
    }
    tokens = {field: torch.zeros(NUM_ROWS, 2048, dtype=torch.int64) for field in FIELDS}
    return {
        "1 row of 3 x 32 B": (TensorDict(small, [NUM_ROWS])[:1], 30),
        "256 rows of 3 x 32 B": (TensorDict(small, [NUM_ROWS]), 20),
        "256 rows of text and a dict": (TensorDict(values, [NUM_ROWS]), 20),
        "256 rows of 6 x 16 KB": (TensorDict(tokens, [NUM_ROWS]), 6),
        "256 rows of 6 x 2 to 16 KB, jagged": (TensorDict(dict.fromkeys(FIELDS, ragged), [NUM_ROWS]), 6),
    }


def time_backend(backend: str) -> dict[str, list[list[float]]]:
    """Times each step of each case on a storage, which this process starts; in milliseconds."""
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    tq.init(OmegaConf.create({"backend": {"storage_backend": backend}}))
    found: dict[str, list[list[float]]] = {}
    for case, (batch, num_times) in make_cases().items():
        timed: list[list[float]] = []
        for number in range(NUM_WARM + num_times):
            keys = [f"{number} {row}" for row in range(batch.batch_size[0])]
            moments = [perf_counter()]
            tq.kv_batch_put(keys=keys, partition_id="p", fields=batch)
            moments.append(perf_counter())
            tq.kv_batch_get(keys=keys, partition_id="p")
            moments.append(perf_counter())
            tq.kv_clear(keys, "p")
            moments.append(perf_counter())
            timed.append([1e3 * (end - begin) for begin, end in pairwise(moments)])
        found[case] = timed[NUM_WARM:]
    tq.close()
    ray.shutdown()
    return found


def main(num_rounds: int) -> None:
    """Times both storages in turn and prints the table."""
    timed: dict[str, dict[str, list[list[float]]]] = {backend: defaultdict(list) for backend in BACKENDS}
    for _ in range(num_rounds):
        for backend in BACKENDS:
            command = [sys.executable, "-m", "tests.transfer_queue_rates", backend]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            line = next(each for each in done.stdout.splitlines() if each.startswith(RESULT))
            for case, found in json.loads(line.removeprefix(RESULT)).items():
                timed[backend][case] += found
    print(f"| least, ms | {' | '.join(f'{step}: SimpleStorage, tdserve, ratio' for step in STEPS)} |")
    for case in timed[BACKEND]:
        cells = []
        for number in range(len(STEPS)):
            theirs, ours = (min(row[number] for row in timed[backend][case]) for backend in BACKENDS)
            cells.append(f"{theirs:.1f}, {ours:.1f}, {ours / theirs:.2f}")
        print(f"| {case} | {' | '.join(cells)} |")


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in BACKENDS:
        print(RESULT + json.dumps(time_backend(sys.argv[1])))
    else:
        main(int(sys.argv[1]) if sys.argv[1:] else 2)
