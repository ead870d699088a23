from __future__ import annotations

import inspect
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import tdserve

pytest.importorskip("torchrl")

from torchrl.record.loggers import get_logger

from tdserve.examples import grpo


@pytest.mark.slow
def test_grpo_when_its_roles_run_then_the_policy_learns_and_no_rollout_is_left_or_trained_twice(tmp_path: Path) -> None:
    loggers = [get_logger("csv", str(tmp_path / "log"), f"rank {rank}") for rank in range(grpo.NUM_RANKS)]
    with tdserve.Server(tmp_path / "root", port=0) as server, ThreadPoolExecutor() as threads:
        ranks = [
            threads.submit(grpo.train, server.address, rank, logger.log_scalar) for rank, logger in enumerate(loggers)
        ]
        others = [threads.submit(role, server.address) for role in (grpo.answer, grpo.answer, grpo.judge)]
        for rank in ranks:
            rank.result(100.0)
        for other in others:
            other.result(20.0)
        with server.client() as client:
            info = client.replay("rollouts").info()
    for logger in loggers:
        logger.close()
    logged = [*(tmp_path / "log").rglob("reward.csv")]
    assert len(logged) == grpo.NUM_RANKS
    for path in logged:
        steps, rewards = zip(*(map(float, line.split(",")) for line in path.read_text().splitlines()), strict=True)
        assert steps == tuple(range(grpo.NUM_STEPS))
        assert rewards[-1] > 0.5, "it guesses one in ten at first"
    num_rows = grpo.NUM_STEPS * grpo.NUM_RANKS * grpo.NUM_ROWS
    assert (info["inserts"], info["samples"], info["num_incomplete"]) == (num_rows, 2 * num_rows, 0)


def test_grpo_when_read_then_it_has_at_most_sixty_lines() -> None:
    assert len(inspect.getsource(grpo).splitlines()) <= 60
