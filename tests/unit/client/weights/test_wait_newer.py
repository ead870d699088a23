from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tests.errors import raises
from tests.processes import wait_for

TIMEOUT_S = 20.0
LARGE = 1 << 20
"""Numbers of a version that no message has room for."""


def publish(client: tdserve.Client, name: str, num_numbers: int = 3) -> int:
    version: int = client.publish(name, TensorDict({"w": torch.zeros(num_numbers)}, []))
    return version


def count_traffic(client: tdserve.Client) -> Any:
    """Returns the counts once two looks agree: counts of a transfer that has just ended may come late."""
    looks = [client.stats()["transports"]]

    def agree() -> bool:
        looks.append(client.stats()["transports"])
        return bool(looks[-1] == looks[-2])

    wait_for(agree, "counts that do not change")
    return looks[-1]


def test_wait_newer_when_a_version_is_newer_then_its_number_and_no_content(client: tdserve.Client, name: str) -> None:
    publish(client, name, LARGE)
    publish(client, name, LARGE)
    before = count_traffic(client)
    assert client.wait_newer(name, newer_than=1, timeout_s=TIMEOUT_S) == 2
    assert client.wait_newer(name, timeout_s=0) == 2
    assert count_traffic(client) == before
    found = client.latest(name)
    assert found is not None
    assert found.version == 2
    assert count_traffic(client) != before  # so the comparison above can fail


def test_wait_newer_when_it_waits_then_the_next_version_wakes_it(client: tdserve.Client, name: str) -> None:
    publish(client, name)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(client.wait_newer, name, newer_than=1, timeout_s=TIMEOUT_S)
        wait_for(lambda: client.describe(name).num_waiting, "a request")
        assert publish(client, name) == 2
        assert waiting.result(TIMEOUT_S) == 2


def test_wait_newer_when_nothing_is_newer_then_none_at_once_or_deadline(client: tdserve.Client, name: str) -> None:
    assert client.wait_newer(name, newer_than=0, timeout_s=0) is None
    with raises(tdserve.StoreNotFoundError, name=name):
        client.wait_newer(name, timeout_s=0)
    with raises(tdserve.DeadlineExceededError, name=name):
        client.wait_newer(name, timeout_s=0.05)
    publish(client, name)
    assert client.wait_newer(name, newer_than=1, timeout_s=0) is None
    with pytest.raises(tdserve.DeadlineExceededError, match="newer than 1"):
        client.wait_newer(name, newer_than=1, timeout_s=0.05)


def test_wait_newer_when_the_store_holds_no_weights_then_wrong_state(client: tdserve.Client, name: str) -> None:
    client.memmap(TensorDict({"w": torch.zeros(3)}, []), name)
    with pytest.raises(tdserve.WrongStateError, match=name):
        client.wait_newer(name, timeout_s=0)


def test_wait_newer_when_the_number_is_no_version_then_invalid_request(client: tdserve.Client, name: str) -> None:
    with raises(tdserve.InvalidRequestError, argument="newer_than"):
        client.wait_newer(name, newer_than="1")  # type: ignore[arg-type]
