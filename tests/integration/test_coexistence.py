"""tdserve beside the user's own ``torch.distributed``: neither notices the other."""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import Any

import pytest
import torch.distributed as dist

import tdserve
from tests.integration.data_parallel import NUM_STEPS, WORLD_SIZE
from tests.processes import Program

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

TRANSPORTS = ("gloo", "shm")
"""Of the two ranks."""


def run_job(address: str) -> list[dict[str, Any]]:
    """Runs a job; returns what its ranks have seen."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    with ExitStack() as running:
        programs = []
        for rank in range(WORLD_SIZE):
            command = ("tests.integration.data_parallel", rank, store.port, address, TRANSPORTS[rank])
            programs.append(running.enter_context(Program(*command, module="tests.lent.program")))
        return [json.loads(program.line(timeout_s=100.0)) for program in programs]


@pytest.fixture(scope="module")
def alone() -> list[dict[str, Any]]:
    """A job without tdserve."""
    return run_job("")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The same job with it."""
    with tdserve.Server(tmp_path_factory.mktemp("root")) as server:
        return run_job(server.address)


@pytest.mark.full
def test_training_when_every_rank_uses_tdserve_then_its_result_is_the_same_bit_for_bit(
    ranks: list[dict[str, Any]], alone: list[dict[str, Any]]
) -> None:
    assert [seen["training"] for seen in ranks] == [seen["training"] for seen in alone]
    assert ranks[0]["training"]["loss"] < 1.0, "it learned nothing"


@pytest.mark.slow
def test_default_group_when_every_rank_uses_tdserve_then_stays_the_only_one(ranks: list[dict[str, Any]]) -> None:
    for seen in ranks:
        assert seen["training"]["is_same_group"]
        assert seen["training"]["num_groups"] == 1


def test_environment_when_every_rank_uses_tdserve_then_stays_the_same(ranks: list[dict[str, Any]]) -> None:
    for seen in ranks:
        assert seen["first"]["is_same_environment"]
        assert seen["training"]["is_same_environment"]


def test_tdserve_when_there_is_no_process_group_before_and_after_then_works(ranks: list[dict[str, Any]]) -> None:
    for seen, transport in zip(ranks, TRANSPORTS, strict=True):
        assert not seen["first"]["is_initialized"]
        assert not seen["is_initialized_after"]
        assert seen["transport"] == transport
        assert NUM_STEPS / 10 < seen["num_pulled"] <= NUM_STEPS + 2, "a rank hardly ever got the other's weights"
