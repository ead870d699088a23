from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("verl")

import tdserve
from tdserve.examples import verl_rollouts
from tdserve.examples.verl_rollouts import NUM_BATCHES, STORE, make_rollout

pytestmark = pytest.mark.integration


def describe(batch: Any) -> list[Any]:
    """Describes a batch of verl so that equal content, dtypes and shapes compare equal."""
    tensors = {name: (tensor.dtype, tensor.tolist()) for name, tensor in batch.batch.items()}
    arrays = {name: (array.dtype, array.shape, array.tolist()) for name, array in batch.non_tensor_batch.items()}
    return [batch.batch.batch_size, tensors, arrays, batch.meta_info]


def test_batches_when_sent_by_another_process_then_are_equal_and_taken_once(server: tdserve.Server) -> None:
    received = verl_rollouts.run_trainer(server.address)
    assert [describe(batch) for batch in received] == [describe(make_rollout(step)) for step in range(NUM_BATCHES)]
    with server.client() as client:
        assert len(client.kv(STORE)) == 0
        client.delete(STORE)


@pytest.mark.full
def test_example_when_run_as_a_program_then_prints_each_batch() -> None:
    command = [sys.executable, "-m", "tdserve.examples.verl_rollouts"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("mean reward") == NUM_BATCHES
