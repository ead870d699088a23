from __future__ import annotations

from contextlib import closing

import pytest

from tdserve.bench.child import Child
from tdserve.bench.stage import Stage
from tdserve.bench.workload_data import make_transitions
from tdserve.bench.workloads.mixed import BATCH_ROWS, POOL_ROWS, write_rows

pytestmark = pytest.mark.integration


@pytest.mark.slow
def test_writer_when_ordered_to_write_then_reports_the_number_of_acknowledged_batches(stage: Stage) -> None:
    replay = stage.client.create_replay("written", make_transitions(1).rows[0], POOL_ROWS)
    try:
        with closing(Child(write_rows, stage.address, "gloo", "written")) as writer:
            writer.recv()
            num_batches, elapsed_s = writer.ask(0.1)
        assert elapsed_s >= 0.1
        assert replay.info()["inserts"] == BATCH_ROWS * (num_batches + 1)  # and the one that warms up
    finally:
        stage.client.delete("written")
