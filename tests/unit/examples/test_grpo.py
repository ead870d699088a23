from __future__ import annotations

import inspect
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import tdserve

pytest.importorskip("torchrl")

from tdserve.examples import grpo


def test_grpo_when_its_roles_run_then_the_policy_learns_and_no_rollout_is_left_or_trained_twice(tmp_path: Path) -> None:
    with tdserve.Server(tmp_path, port=0) as server, ThreadPoolExecutor() as threads:
        ranks = [threads.submit(grpo.train, server.address, rank) for rank in range(grpo.NUM_RANKS)]
        others = [threads.submit(role, server.address) for role in (grpo.answer, grpo.answer, grpo.judge)]
        assert min(rank.result(100.0) for rank in ranks) > 0.5, "it guesses one in ten at first"
        for other in others:
            other.result(20.0)
        with server.client() as client:
            info = client.replay("rollouts").info()
    num_rows = grpo.NUM_STEPS * grpo.NUM_RANKS * grpo.NUM_ROWS
    assert (info["inserts"], info["samples"], info["num_incomplete"]) == (num_rows, 2 * num_rows, 0)


def test_grpo_when_read_then_it_has_at_most_sixty_lines() -> None:
    assert len(inspect.getsource(grpo).splitlines()) <= 60
