"""Stores and keys whose names end like the names of unfinished files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.server.checking.root_check import check_root

pytestmark = pytest.mark.integration


@pytest.mark.slow
def test_check_when_names_end_like_those_of_leftovers_then_nothing_of_them_goes(tmp_path: Path) -> None:
    content = TensorDict({"a.new": {"b.new": torch.ones(3)}, "c.new": torch.zeros(2)}, [])
    with tdserve.Server(tmp_path / "root") as server, server.client() as client:
        client.init_remote(content, "s.new")
        client.create_kv("k.new").put("x.new", torch.ones(3))
        client.checkpoint(tmp_path / "place")
        client.delete("s.new")
        client.restore(tmp_path / "place", names=["s.new"])
    (tmp_path / "root/stores/k.new/synced.memmap.new").write_bytes(b"cut")
    (finding,) = check_root(tmp_path / "root", repairs=True).findings
    assert finding.path == "stores/k.new/synced.memmap.new"
    with tdserve.Server(tmp_path / "root") as server, server.client() as client:
        assert (client.from_remote_init("s.new") == content).all()
        assert client.kv("k.new")["x.new"].tolist() == [1.0] * 3
