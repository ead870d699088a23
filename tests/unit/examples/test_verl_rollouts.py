from __future__ import annotations

import pytest

pytest.importorskip("verl")

from tdserve.examples.verl_rollouts import NUM_PROMPTS, make_rollout


def test_rollout_when_made_again_then_is_the_same_and_consistent() -> None:
    first, again, later = make_rollout(1), make_rollout(1), make_rollout(2)
    first.check_consistency()
    assert len(first) == NUM_PROMPTS
    assert bool((first.batch == again.batch).all())
    assert later.batch["responses"].shape[1] > first.batch["responses"].shape[1]
