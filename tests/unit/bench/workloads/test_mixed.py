from __future__ import annotations

import pytest

from tdserve.bench.runs import measure
from tdserve.bench.stage import Stage

pytestmark = pytest.mark.integration


@pytest.mark.full
def test_mixed_when_measured_then_both_rates_of_the_same_seconds_have_targets_and_no_store_is_left(
    stage: Stage,
) -> None:
    sampled, written = measure(stage, "mixed")
    assert sampled.name == "sample 256 while 4 processes write"
    assert written.name == "4 processes extend 64 meanwhile"
    assert [[target.bound for target in each.targets] for each in (sampled, written)] == [[104e3], [550e3]]
    assert sampled.median > 0
    assert written.median > 0
    assert "mixed" not in stage.client.stores()
