from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from tdserve.base.errors import CorruptDataError, NotSupportedError
from tdserve.bench import workload_data
from tdserve.bench.child import Child
from tdserve.bench.stage import Stage
from tdserve.bench.workloads.weight_trees import follow_versions

pytestmark = pytest.mark.integration


@pytest.mark.slow
def test_follower_when_a_version_is_published_then_has_it_and_checks_its_content(stage: Stage) -> None:
    tree = workload_data.make_weights(3, 12_000)
    workload_data.stamp(tree, 7)
    with closing(Child(follow_versions, stage.address, stage.transport)) as follower:
        follower.recv()
        follower.send(("watch", "watched", None))
        stage.client.publish("watched", tree)
        follower.recv()
        follower.ask(("check", (3, 12_000), 7))
        with pytest.raises(CorruptDataError, match="layer_00000"):
            follower.ask(("check", (3, 12_000), 8))
    stage.client.delete("watched")


def test_follower_when_it_cannot_connect_then_raises_the_reason_and_leaves_no_process() -> None:
    with closing(Child(follow_versions, "127.0.0.1:7707", "nccl")) as follower, pytest.raises(NotSupportedError):
        follower.recv()
    assert not Path(f"/proc/{follower.pid}").exists()
