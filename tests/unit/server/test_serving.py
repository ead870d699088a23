from __future__ import annotations

import os
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from tdserve.base.config import ServerConfig
from tdserve.server import control_process
from tdserve.server.serving import serve
from tdserve.store.roots.root import Root

LOOK_S = 4.0
"""How long the root is watched while a thread that writes in it is held up: without it a stop takes some two
seconds."""

STEP_S = 60.0


def test_serve_when_stopped_while_values_are_compacted_then_the_root_is_given_away_after_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ServerConfig(root=str(tmp_path / "root"), port=0, grace_s=0.1)
    begun, may_end, given_away, lifeline = Event(), Event(), Event(), os.pipe()
    give_away = Root.release
    roots: list[Root] = []
    found: list[str] = []

    def compact(root: Root, *_: Any) -> None:
        roots.append(root)
        begun.set()
        assert may_end.wait(STEP_S)
        found.append("held" if root.is_held else "given away")

    def stop() -> None:
        assert begun.wait(STEP_S)
        os.close(lifeline[1])
        given_away.wait(LOOK_S)
        may_end.set()

    def release(root: Root) -> None:
        give_away(root)
        given_away.set()

    monkeypatch.setattr(control_process, "compact_all", compact)
    monkeypatch.setattr(Root, "release", release)
    stopping = Thread(target=stop, name="test-stop")
    stopping.start()
    assert serve(config, None, lifeline_fd=lifeline[0]) == 0
    stopping.join()
    os.close(lifeline[0])
    assert found == ["held"]
    Root.acquire(config.root).release()
