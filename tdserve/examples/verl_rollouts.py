"""Rollouts of verl as entries of a keyed store: one process makes them, another trains on them. Needs ``verl``.

``python -m tdserve.examples.verl_rollouts`` runs the trainer, which starts the other. A batch of verl is a
``DataProto``: a tensordict, arrays of objects, and facts about the whole. It arrives as it was sent and is taken once;
nothing is pickled.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile

import numpy as np
import torch
from tensordict import TensorDict
from verl import DataProto

import tdserve

STORE = "rollouts"
NUM_BATCHES, NUM_PROMPTS = 3, 4
TIMEOUT_S = 120.0
"""Until a batch comes; a process that imports verl takes a while to start."""


def make_rollout(step: int) -> DataProto:
    """Makes a batch, in the place of a model; sequences of later batches are longer."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(100, (NUM_PROMPTS, 8 + step), generator=generator)
    texts = [" ".join(map(str, row)) for row in tokens.tolist()]
    turns = [[{"role": "assistant", "content": text}] for text in texts]
    return DataProto.from_dict(
        tensors={"responses": tokens, "rewards": torch.rand(NUM_PROMPTS, generator=generator)},
        non_tensors={"text": np.array(texts, dtype=object), "messages": np.array(turns, dtype=object)},
        meta_info={"global_steps": step, "temperature": 0.7, "eos": [1, 2]},
    )


def send(rollouts: tdserve.KeyedHandle, key: str, batch: DataProto) -> None:
    """Puts a batch, whole or not at all."""
    entry = TensorDict({"batch": batch.batch}, [])
    objects = {name: (array.shape, array.ravel().tolist()) for name, array in batch.non_tensor_batch.items()}
    entry.set_non_tensor("non_tensor_batch", objects)
    entry.set_non_tensor("meta_info", batch.meta_info)
    rollouts.put(key, entry)


def receive(rollouts: tdserve.KeyedHandle, key: str) -> DataProto:
    """Waits for a batch and takes it."""
    entry = rollouts.pop(key, timeout_s=TIMEOUT_S)
    objects = entry["non_tensor_batch"]
    arrays = {name: np.fromiter(items, object).reshape(shape) for name, (shape, items) in objects.items()}
    return DataProto(entry["batch"], arrays, entry["meta_info"])


def run_rollouts(address: str) -> None:
    """Sends batches."""
    with tdserve.connect(address) as client:
        rollouts = client.kv(STORE)
        for step in range(NUM_BATCHES):
            send(rollouts, f"step-{step}", make_rollout(step))


def run_trainer(address: str) -> list[DataProto]:
    """Takes all batches, which another process sends; returns them."""
    with tdserve.connect(address) as client:
        rollouts = client.create_kv(STORE)
        command = [sys.executable, "-m", "tdserve.examples.verl_rollouts", address]
        with subprocess.Popen(command):
            return [receive(rollouts, f"step-{step}") for step in range(NUM_BATCHES)]


def main() -> None:
    """Runs one of the two processes."""
    if len(sys.argv) > 1:
        run_rollouts(sys.argv[1])
        return
    with tempfile.TemporaryDirectory() as root, tdserve.Server(root) as server:
        for batch in run_trainer(server.address):
            print(f"step {batch.meta_info['global_steps']}: mean reward {batch.batch['rewards'].mean():.3f}")


if __name__ == "__main__":
    main()
