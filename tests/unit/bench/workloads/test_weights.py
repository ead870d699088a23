from __future__ import annotations

import pytest

from tdserve.bench.runs import measure
from tdserve.bench.stage import Stage

pytestmark = [pytest.mark.integration, pytest.mark.full]

NEW = "publish of new tensors, the slowest of 20"


def test_weights_when_measured_then_both_trees_have_their_figures_and_no_store_is_left(stage: Stage) -> None:
    figures = list(measure(stage, "weights"))
    first, reads = ["first publish", "publish, recycled"], ["latest(out=)", "latest()"]
    assert [figure.name.partition(": ")[2] for figure in figures] == [
        *first,
        *reads,
        "latest(out=), 4 at once",
        "publish until seen elsewhere",
        *first,
        NEW,
        *reads,
        "publish until seen elsewhere",
        "publish until visible",
    ]
    assert [target.bound for figure in figures for target in figure.targets] == [0.85, 0.85, 0.9, 0.6, 0.25, 0.6, 5.0]
    assert not any(name.startswith("weights") for name in stage.client.stores())


@pytest.mark.full
def test_weights_when_measured_in_memory_then_are_mapped_too_and_judged_by_memcpy(memory_stage: Stage) -> None:
    figures = {figure.name: figure for figure in measure(memory_stage, "weights")}
    visible = figures.pop("1 MiB in 16: publish until visible")
    assert [target.bound for target in visible.targets] == [1.0]
    new = figures.pop(f"2 MiB in 200: {NEW}")
    assert [floor.name for floor in new.floors] == [target.floor or "their median" for target in new.targets]
    after_pause = figures.pop("4 MiB in 100: publish after a pause")
    floor = "memcpy, touched pages"
    assert [(target.bound, target.floor) for target in after_pause.targets] == [(1 / 1.7, floor), (3.0, floor)]
    big, many = ({name.partition(": ")[2]: figures[name] for name in names} for names in _halves(list(figures)))
    assert (
        list(big)
        == list(many)
        == [
            "first publish",
            "publish, recycled",
            "latest(out=)",
            "latest()",
            "latest(copy=False)",
            "publish until seen elsewhere",
        ]
    )
    bounds = {name: [(target.bound, target.floor) for target in figure.targets] for name, figure in big.items()}
    of_memcpy = [(0.7, "memcpy, touched pages")]
    assert bounds["publish, recycled"] == bounds["latest(out=)"] == of_memcpy
    assert bounds["latest(copy=False)"] == [(2.0, "")]
    assert bounds["publish until seen elsewhere"] == [(30.0, "")]
    assert sum(len(figure.targets) for figure in many.values()) == 1


def _halves(names: list[str]) -> tuple[list[str], list[str]]:
    return names[: len(names) // 2], names[len(names) // 2 :]
