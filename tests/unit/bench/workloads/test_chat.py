from __future__ import annotations

import pytest

from tdserve.bench.runs import measure
from tdserve.bench.stage import Stage

pytestmark = pytest.mark.integration

NAMES = [
    "extend 64 histories, 8 under way",
    "sample 64 histories, one by one",
    "sample 64 histories, 8 under way",
    "write 64 dialogues, one by one",
    "write 64 dialogues, 8 under way",
    "read 64 dialogues by number",
    "sample 64 dialogues, 8 under way",
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("which", "bounds", "floor"),
    [
        ("stage", [[38_000], [], [41_900], [40_000], [80_000], [40_000], [80_000]], "gloo stream"),
        (
            "memory_stage",
            [[100_000], [], [100_000], [60_000], [120_000], [60_000], [120_000]],
            "memcpy, touched pages",
        ),
    ],
)
def test_chat_when_measured_then_is_judged_as_the_transport_asks_and_no_store_is_left(
    request: pytest.FixtureRequest, which: str, bounds: list[list[float]], floor: str
) -> None:
    stage: Stage = request.getfixturevalue(which)
    figures = list(measure(stage, "chat"))
    assert [figure.name for figure in figures] == NAMES
    assert [[target.bound for target in figure.targets] for figure in figures] == bounds
    assert {each.name for figure in figures for each in figure.floors} == {floor}
    assert {"chat", "dialogues"}.isdisjoint(stage.client.stores())
