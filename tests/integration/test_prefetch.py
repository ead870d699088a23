"""Samples under way never stand in the way of anything else that the same client does."""

from __future__ import annotations

import threading

import pytest
import torch
from tensordict import TensorDict

import tdserve

pytestmark = pytest.mark.integration

ROW = TensorDict({"observation": torch.zeros(84), "reward": torch.zeros(())}, [])


def test_publish_when_batches_wait_unused_then_it_is_not_held_up(client: tdserve.Client, name: str) -> None:
    replay = client.create_replay(f"prefetch-publish-{client.transport}", ROW, 1_000)
    replay.extend(ROW.expand(512).clone())
    weights = TensorDict({"weight": torch.randn(64, 512)}, [])  # too large to ride inline
    with replay.batches(256, prefetch=4, timeout_s=20) as batches:
        for number in range(10):
            assert next(batches).batch_size == (256,)
            assert client.publish(name, weights, timeout_s=20) == number + 1


def test_batches_when_opened_before_there_are_rows_then_they_come_with_them(client: tdserve.Client) -> None:
    for attempt in range(5):
        replay = client.create_replay(f"prefetch-early-{client.transport}-{attempt}", ROW, 1_000, min_size=300)
        with replay.batches(256, prefetch=4, timeout_s=20) as batches:
            first: list[TensorDict] = []
            reader = threading.Thread(target=lambda taken=first, it=batches: taken.append(next(it)))
            reader.start()
            replay.extend(ROW.expand(300).clone())
            reader.join(20)
            assert first[0].batch_size == (256,)
            assert all(next(batches).batch_size == (256,) for _ in range(8))
