"""The calls that are shown of a job that was consumed twice."""

from __future__ import annotations

from pathlib import Path

from tdserve.soak.history import History, Recorder
from tdserve.soak.job_stories import describe_job


def test_story_when_a_job_is_consumed_and_left_then_all_its_calls_are_in_order_with_their_rows(tmp_path: Path) -> None:
    with Recorder(tmp_path / "produce-00001.jsonl") as recorder:
        recorder.write("call", jobs=[4])
        recorder.write("ok", answer=[6])
        recorder.write("call", jobs=[5, 6])
        recorder.write("ok", answer=[7, 8])
    with Recorder(tmp_path / "consume-00002.jsonl") as recorder:
        recorder.write("call", jobs=[5], index=[7], generation=[2])
        recorder.write("failed", error="WrongStateError: not held")
        recorder.write("call", jobs=[6, 5], index=[8, 9], generation=[2, 4])
    _, produced, refused, cut_short, left = describe_job(5, tmp_path, [(11, 6)]).splitlines()
    assert "produce-00001, call 1 of 2" in produced
    assert "jobs [5, 6], row 7: acknowledged after" in produced
    assert "consume-00002, call 0 of 2" in refused
    assert "row 7 of generation 2: failed after" in refused
    assert refused.endswith("WrongStateError: not held")
    assert "consume-00002, call 1 of 2" in cut_short
    assert cut_short.endswith("row 9 of generation 4: no answer came")
    assert left == "    in the end: row 11 of generation 6"


def test_history_when_it_is_read_then_calls_have_their_times(tmp_path: Path) -> None:
    path = tmp_path / "consume-00001.jsonl"
    with Recorder(path) as recorder:
        recorder.write("call", jobs=[1])
        recorder.write("ok", answer=None)
        recorder.write("call", jobs=[2])
    acknowledged, cut_short = History.read(path).calls
    assert 0.0 < acknowledged.begun_s <= acknowledged.ended_s <= cut_short.begun_s
    assert acknowledged.is_acknowledged
    assert cut_short.ended_s == 0.0
