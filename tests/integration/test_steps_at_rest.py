"""Iterators whose steps are shorter than the call wait for a store that is at rest, as in a checkpoint."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.client.tables.draws import taken_batches
from tdserve.client.weights import subscription
from tests.integration.rests import wait_through_rest

pytestmark = pytest.mark.integration

ROWS = TensorDict({"number": torch.arange(4)}, [4])


def test_batches_when_a_queue_rests_longer_than_a_step_then_they_wait(
    server: tdserve.Server, client: tdserve.Client, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(taken_batches, "POLL_S", 0.1)
    queue = client.create_queue(name, ROWS[0], 10)
    queue.extend(ROWS)
    with queue.batches(4) as batches:
        assert wait_through_rest(server, name, lambda: next(batches))["number"].tolist() == [0, 1, 2, 3]


def test_subscription_when_weights_rest_longer_than_a_step_then_it_waits(
    server: tdserve.Server, client: tdserve.Client, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscription, "STEP_S", 0.1)
    client.publish(name, TensorDict({"w": torch.ones(3)}, []))
    with client.subscribe(name) as versions:
        assert wait_through_rest(server, name, lambda: next(versions)).version == 1
