"""Servers beside the ranks of a job of torchrun that has two machines: two of its agents, each with a disk."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import tdserve
from tests.integration.cluster.names import next_name
from tests.integration.marked import MarkedProgram
from tests.processes import quiet_port

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

NUM_RANKS = {"a": 2, "b": 1}
"""Of each machine."""

TIMEOUT_S = 100.0


def run_job(folder: Path, storage: Path, monkeypatch: pytest.MonkeyPatch, *, master: str) -> list[dict[str, Any]]:
    """Runs a job to its end; returns what its ranks printed, by rank.

    Args:
        folder: For what it prints.
        storage: Has a disk for each machine.
        master: The machine whose agent comes first.
    """
    port, name = quiet_port(), next_name()
    with ExitStack() as stack:
        agents = []
        for machine, num_ranks in NUM_RANKS.items():
            monkeypatch.setenv("MACHINE", machine)
            (folder / machine).mkdir(parents=True)
            node_rank = 0 if machine == master else 1
            where = ["--nnodes=2", f"--nproc-per-node={num_ranks}", f"--node-rank={node_rank}"]
            where += ["--master-addr=127.0.0.1", f"--master-port={port}"]
            program = ["-m", "tests.lent.program", "tests.integration.cluster.torchrun_rank"]
            command = ["-m", "torch.distributed.run", *where, *program, f"{storage}/{{machine}}", name]
            agents.append(MarkedProgram(folder / machine, *command))
            stack.callback(agents[-1].kill)
        for agent in agents:
            assert agent.process.wait(TIMEOUT_S) == 0, agent.printed
            agent.wait_gone()
    printed = [line for agent in agents for line in agent.printed.splitlines() if line.startswith("{")]
    return sorted(map(json.loads, printed), key=lambda facts: facts["rank"])


@pytest.mark.full
def test_job_when_each_machine_has_a_server_then_all_ranks_share_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = run_job(tmp_path / "job", tmp_path, monkeypatch, master="a")
    assert [(each["rank"], each["node"]) for each in ranks] == [(0, 0), (1, 0), (2, 1)]
    assert len({each["address"] for each in ranks}) == 1
    assert len(ranks[0]["address"].split(",")) == 2
    for each in ranks:
        assert each["numbers"] == list(range(10 * len(ranks)))
        assert each["shards"] == [0, 1]
    assert [(tmp_path / machine / f"server-{number}").is_dir() for number, machine in enumerate("ab")] == [True, True]


@pytest.mark.full
def test_job_when_run_again_with_machines_in_another_order_then_each_server_goes_on_with_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, master in enumerate("ab"):
        ranks = run_job(tmp_path / f"job{number}", tmp_path, monkeypatch, master=master)
        assert [len(each["before"]) for each in ranks] == [number] * len(ranks)
    assert [each.name for machine in "ab" for each in (tmp_path / machine).iterdir()] == ["server-0", "server-1"]


def test_start_when_torchrun_has_not_started_the_process_then_refused(tmp_path: Path) -> None:
    with pytest.raises(tdserve.WrongStateError, match="torchrun has not started"):
        tdserve.torchrun.start_servers(tmp_path)
    assert list(tmp_path.iterdir()) == []
