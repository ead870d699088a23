"""The verdict of a soak, from what was measured."""

from __future__ import annotations

import json

from tdserve.soak.rounds import SeriesPoint, SoakResult
from tdserve.soak.verdicts import find_verdict, judge_figures, make_document

MIB = 1 << 20


def make_result(**per_round: float) -> SoakResult:
    """Returns a result of 40 rounds in which control's memory, or the disk, grows by so much in each."""
    result = SoakResult(num_rounds=40)
    for number in range(40):
        is_calm, at_s = number >= 20, 90.0 * number
        memory = 100 * MIB + number * per_round.get("memory", 0.0)
        disk = 4 * MIB + number * per_round.get("disk", 0.0)
        result.series.setdefault(("control", "memory"), []).append(SeriesPoint(is_calm, at_s, memory))
        result.series.setdefault(("root", "disk"), []).append(SeriesPoint(is_calm, at_s, disk))
    return result


def test_verdict_when_nothing_grows_then_clean() -> None:
    result = make_result()
    lines = judge_figures(result)
    assert {(line.kills, line.role, line.verdict) for line in lines} == {
        ("all", "root", "flat"),
        ("clients", "root", "flat"),
        ("clients", "control", "flat"),
    }
    assert find_verdict(result, lines) == "clean"


def test_verdict_when_control_loses_a_megabyte_a_round_then_grows() -> None:
    result = make_result(memory=MIB)
    assert find_verdict(result, judge_figures(result)) == "grows"


def test_verdict_when_files_are_left_behind_then_grows_in_both_halves() -> None:
    result = make_result(disk=MIB)
    assert [line.verdict for line in judge_figures(result) if line.figure == "disk"] == ["grows", "grows"]


def test_verdict_when_content_is_wrong_then_damaged_whatever_else() -> None:
    result = make_result(memory=MIB)
    result.findings.faults.append("rows are lost")
    document = make_document(result, judge_figures(result))
    assert document["verdict"] == "damaged"
    assert json.loads(json.dumps(document, allow_nan=False))["faults"] == ["rows are lost"]
