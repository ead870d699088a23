"""The place of this process in a job, as ``torchrun`` and other launchers set it in the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class TorchrunRank:
    """The place of this process in a job that ``torchrun`` has started, from the variables that torchrun sets.

    Attributes:
        rank, world_size: In the job.
        local_rank, local_world_size: On this machine.
        master_addr, master_port: Where the job's key-value store is.
        restart_count: How often the job was restarted.
        node_rank, num_nodes: Number of this machine among those of the job, and how many there are.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int
    restart_count: int = 0
    node_rank: int = 0
    num_nodes: int = 1

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> TorchrunRank | None:
        """Returns the rank; None in a process that was not started by torchrun."""
        variables = os.environ if environ is None else environ
        if "TORCHELASTIC_RUN_ID" not in variables:  # other launchers set RANK too
            return None
        return cls(
            rank=int(variables["RANK"]),
            world_size=int(variables["WORLD_SIZE"]),
            local_rank=int(variables["LOCAL_RANK"]),
            local_world_size=int(variables["LOCAL_WORLD_SIZE"]),
            master_addr=variables["MASTER_ADDR"],
            master_port=int(variables["MASTER_PORT"]),
            restart_count=int(variables["TORCHELASTIC_RESTART_COUNT"]),
            node_rank=int(variables["GROUP_RANK"]),
            num_nodes=int(variables["GROUP_WORLD_SIZE"]),
        )


def find_rank() -> int | None:
    """Returns the rank of this process in its job, as ``torchrun`` and others set it; None if it has none."""
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdecimal() else None


def read_run_id() -> str:
    """Returns the name of the run that torchrun has started this process for; "" if there is none."""
    found = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return "" if found == "none" else found  # torchrun's default
