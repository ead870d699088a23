from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.base.errors import NotSupportedError
from tdserve.examples.demo.demo_stores import compute_checksum, get_sizes


def test_sizes_of_cartpole() -> None:
    assert get_sizes("CartPole-v1") == (4, 2)


@pytest.mark.parametrize("env", ["NoSuchThing-v0", "Pendulum-v1", "FrozenLake-v1"])
def test_sizes_of_an_environment_that_the_demo_cannot_learn_names_it(env: str) -> None:
    with pytest.raises(NotSupportedError) as caught:
        get_sizes(env)
    assert env in caught.value.feature


def rows(first: int, num_rows: int) -> TensorDict:
    number = torch.arange(first, first + num_rows)
    return TensorDict({"a": number, "next": {"b": number.float().unsqueeze(1) / 2}}, [num_rows])


@pytest.mark.slow
def test_checksum_when_the_content_is_the_same_then_equal_however_it_was_written_and_after_a_restart(
    tmp_path: Path,
) -> None:
    with tdserve.Server(tmp_path) as server, server.client() as client:
        first, second = (client.create_replay(name, like=rows(0, 1)[0], capacity=100) for name in "xy")
        assert compute_checksum(first) == "crc32 00000000 over 0 rows"
        first.extend(rows(0, 50))
        second.extend(rows(0, 20))
        assert compute_checksum(first) != compute_checksum(second)
        second.extend(rows(20, 30))
        found = compute_checksum(first)
        assert found == compute_checksum(second)
        assert found.endswith("over 50 rows")
    with tdserve.Server(tmp_path) as server, server.client() as client:
        assert compute_checksum(client.replay("x")) == found
