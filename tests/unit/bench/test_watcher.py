from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from tdserve.base.errors import CorruptDataError, PeerLostError
from tdserve.bench import content
from tdserve.bench.stage import Stage
from tdserve.bench.watcher import Watcher

pytestmark = pytest.mark.integration


def test_watcher_when_a_version_is_published_then_has_it_and_tells_whether_it_is_the_right_one(stage: Stage) -> None:
    tree = content.make_weights(3, 12_000)
    content.stamp(tree, 7)
    with closing(Watcher(stage.address, stage.options.transport)) as watcher:
        watcher.watch("watched", None)
        version = stage.client.publish("watched", tree)
        assert watcher.wait() == version
        watcher.check(3, 12_000, 7)
        with pytest.raises(CorruptDataError, match="layer_00000"):
            watcher.check(3, 12_000, 8)
    stage.client.delete("watched")


def test_watcher_when_it_cannot_connect_then_says_so_and_leaves_no_process() -> None:
    before = children()
    with pytest.raises(PeerLostError, match="watcher"):
        Watcher("127.0.0.1:7707", "nccl")
    assert children() <= before


def children() -> set[str]:
    """Process ids of all children of this process, of whatever thread."""
    return {pid for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()}
