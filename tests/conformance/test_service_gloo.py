"""The service over gloo takes its exam; and a user's own process group goes on beside it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tdserve
from tests.conformance.service_suite import ServiceSuite
from tests.conformance.suite import Connect

REPOSITORY = Path(__file__).parents[2]

RANK = """
import sys
import torch
import torch.distributed as dist
from tensordict import TensorDict
import tdserve

rank, meeting, address = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)

def total(value):
    found = torch.full((300_000,), float(value))
    dist.all_reduce(found)
    return found.unique().tolist()

assert total(rank + 1) == [3.0]
content = TensorDict({"a": torch.arange(2_000_000)}, [2_000_000])
with tdserve.connect(address, transport="gloo") as client:
    if rank == 0:
        client.init_remote(content, "between-ranks")
    assert total(rank + 10) == [21.0]
    assert bool((client.from_remote_init("between-ranks") == content).all())
    assert total(rank + 100) == [201.0]
assert dist.get_world_size() == 2
assert dist.get_backend() == "gloo"
dist.barrier()
dist.destroy_process_group()
print("whole")
"""


class TestGlooService(ServiceSuite):
    @pytest.fixture
    def connect(self, server: tdserve.Server) -> Connect:
        return lambda: server.client(transport="gloo")

    @pytest.fixture
    def transport(self) -> str:
        return "gloo"

    def test_client_when_used_then_the_users_world_is_untouched(self, connect: Connect, name: str) -> None:
        before = dict(os.environ)
        with connect() as client:
            client.publish(name, torch.nn.Linear(1000, 100))
            client.latest(name)
        assert not torch.distributed.is_initialized()
        assert dict(os.environ) == before

    @pytest.mark.slow
    def test_client_when_the_user_has_a_process_group_then_both_work(
        self, server: tdserve.Server, tmp_path: Path
    ) -> None:
        ranks = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tests.lent.program",
                    "-c",
                    RANK,
                    str(rank),
                    str(tmp_path / "meeting"),
                    server.address,
                ],
                cwd=REPOSITORY,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            for process in ranks:
                out, err = process.communicate(timeout=60.0)
                assert (out, process.returncode) == ("whole\n", 0), err
        finally:
            for process in ranks:
                process.kill()
                process.communicate()
