from __future__ import annotations

from pathlib import Path

import pytest

from tdserve.base.errors import NotSupportedError
from tdserve.bench.bench_options import BenchOptions
from tdserve.bench.stage import open_stage

pytestmark = pytest.mark.integration


def children() -> set[str]:
    """Process ids of all children of this process, whichever thread started them."""
    return {pid for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()}


@pytest.mark.slow
def test_stage_when_the_work_on_it_fails_then_no_process_and_no_file_is_left(tmp_path: Path) -> None:
    before = children()

    def work() -> None:
        with open_stage(BenchOptions(quick=True, parent=tmp_path)) as stage:
            assert stage.client.stores() == []
            assert stage.transport == "gloo"
            assert children() - before
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()
    assert children() <= before
    assert list(tmp_path.iterdir()) == []


def test_stage_when_the_transport_does_not_exist_yet_then_not_supported_and_leaves_nothing(tmp_path: Path) -> None:
    before = children()
    with pytest.raises(NotSupportedError), open_stage(BenchOptions(transport="nccl", parent=tmp_path)):
        pass
    assert children() <= before
    assert list(tmp_path.iterdir()) == []
