"""Several checkpoints that are written at the same time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.client.moves.checkpoint_writer import CheckpointProgress

pytestmark = pytest.mark.integration


def test_checkpoint_when_the_client_makes_another_meanwhile_then_has_what_was_written_before_its_moment(
    tmp_path: Path,
) -> None:
    with tdserve.Server(tmp_path / "root").start() as server, server.client() as client:
        for name in "xy":
            client.init_remote(TensorDict({"a": torch.zeros(1000, 8)}, [1000]), name)
            client[name].set_at_("a", torch.zeros(8), 3)  # so that it has files
        second = list[bool]()

        def make_another(progress: CheckpointProgress) -> None:
            if progress.store == "y" and not second:  # x was read
                second.append(True)
                client["x"].set_at_("a", torch.ones(1000, 8), slice(0, 1000))
                client.checkpoint(tmp_path / "second")

        client.checkpoint(tmp_path / "first", on_progress=make_another)
        assert second
        for place in ("first", "second"):
            client.restore(tmp_path / place, prefix=f"{place}-")
            assert client[f"{place}-x"]["a"].sum() == 8000
