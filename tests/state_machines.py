"""Tests of hypothesis' state machines: a share of their examples in every run, all of them with ``-m full``."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine

SHARE = 0.4
"""Examples of each run. They are the same in every run, so more of them find something only after a change."""


def make_tests(
    machine: type[RuleBasedStateMachine], *, num_examples: int = 100, num_steps: int = 50
) -> tuple[Any, Any]:
    """Returns the test of every run, and the one with all examples."""

    def choose(share: float) -> settings:
        return settings(max_examples=round(share * num_examples), stateful_step_count=num_steps, deadline=None)

    short: Any = machine.TestCase
    short.settings = choose(SHARE)
    return short, pytest.mark.full(type("WithAllExamples", (short,), {"settings": choose(1.0)}))
