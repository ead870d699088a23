"""Prefetched samples never delay other calls of the same client."""

from __future__ import annotations

import threading

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.base.config import MAIL_INLINE_BYTES
from tdserve.base.deadline import Deadline
from tdserve.client.session.channels.client_control_channel import ClientControlChannel
from tdserve.v1 import control_pb2
from tests.conformance.service_suite import assert_texts, texts
from tests.processes import wait_for

pytestmark = pytest.mark.integration

MANY = 2_000
"""Values of a kilobyte: they move in messages that the worker sends only while the client receives."""

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


@pytest.mark.slow
def test_batches_when_the_second_request_is_served_first_then_neither_waits_for_the_other(
    server: tdserve.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with server.client(transport="gloo", timeout_s=20.0) as client:
        replay = client.create_replay("prefetch-swapped", texts(1)[0], capacity=MANY)
        replay.extend(texts(MANY))
        session, held = client.session(Deadline.after(20.0)), list[control_pb2.ClientMessage]()
        wait_for(lambda: session.inline_bytes == MAIL_INLINE_BYTES, "the control channel, over which requests go then")
        send, num_sent = ClientControlChannel.send, 0

        def swap(control_channel: ClientControlChannel, message: control_pb2.ClientMessage) -> int:
            """Sends the first sample behind the second one."""
            nonlocal num_sent
            if not message.HasField("sample"):
                return send(control_channel, message)
            num_sent += 1
            if num_sent == 1:
                held.append(message)
                return 1
            number = send(control_channel, message)
            return send(control_channel, held.pop()) if number and held else number

        monkeypatch.setattr(ClientControlChannel, "send", swap)
        with replay.batches(MANY, prefetch=2) as batches:
            for _ in range(4):
                batch = next(batches)
                assert_texts(batch, batch["number"].tolist())
        assert num_sent > 2
        assert session.contents.current.number == 0
        client.delete(replay.name)
