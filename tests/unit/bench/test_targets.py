from __future__ import annotations

import pytest

from tdserve.bench.figures import Target
from tdserve.bench.floors import LOCAL_GATHER, OVER_GLOO, TORCHRL
from tdserve.bench.targets import find_targets

SAMPLED = [
    Target("of floor", 0.7, LOCAL_GATHER),
    Target("of floor", 1 / 1.3, TORCHRL),
    Target("of floor", 4.0, OVER_GLOO),
]


CPU_BOUNDS = [Target("below", 80.0, detail="control CPU"), Target("below", 200.0, detail="workers CPU")]


@pytest.mark.parametrize(
    ("transport", "workload", "name", "targets"),
    [
        ("gloo", "pixels", "sample 256, one by one", [Target("of floor", 0.7)]),
        ("shm", "pixels", "sample 256, one by one", SAMPLED),
        ("shm", "mixed", "4 processes extend 64 meanwhile", [Target("at least", 550e3)]),
        ("gloo", "weights", "4 MiB in 100: latest(out=)", [Target("of floor", 0.85)]),
        ("gloo", "weights", "64 MiB in 2000: latest(out=)", [Target("of floor", 0.6)]),
        ("gloo", "weights", "64 MiB in 2000: latest()", []),
        ("gloo", "clients", "extend 64, 8 clients", CPU_BOUNDS),
        (
            "shm",
            "weights",
            "64 MiB in 2000: publish of new tensors, the slowest of 20",
            [Target("of floor", 0.25)],
        ),
        ("gloo", "prioritized", "sample 256, 8 under way, and update", []),
    ],
)
def test_targets_when_looked_up_then_are_those_of_the_transport_and_of_the_figure(
    transport: str, workload: str, name: str, targets: list[Target]
) -> None:
    assert find_targets(transport, workload, name) == targets
