from __future__ import annotations

from contextlib import closing

import pytest

from tdserve.bench.child import Child
from tdserve.bench.content import make_transitions
from tdserve.bench.mixed_writer import BATCH_ROWS, POOL_ROWS
from tdserve.bench.stage import Stage

pytestmark = pytest.mark.integration


def test_writer_when_told_to_write_then_says_how_many_batches_were_acknowledged(stage: Stage) -> None:
    replay = stage.client.create_replay("written", make_transitions(1)[0], POOL_ROWS)
    try:
        with closing(Child("tdserve.bench.mixed_writer", stage.address, "gloo", "written")) as writer:
            assert writer.receive() == {"ready": True}
            writer.send({"seconds": 0.1})
            answer = writer.receive()
        assert answer["elapsed_s"] >= 0.1
        assert replay.info()["inserts"] == BATCH_ROWS * (answer["num_batches"] + 1)  # and the one that warms up
    finally:
        stage.client.delete("written")
