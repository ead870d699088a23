from __future__ import annotations

from tdserve.base.torchrun_rank import TorchrunRank

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "node",
    "MASTER_PORT": "29500",
}


def test_torchrun_rank_when_torchrun_started_the_process_then_is_read() -> None:
    assert TorchrunRank.from_env(TORCHRUN) == TorchrunRank(5, 8, 1, 4, "node", 29500, 2, 1, 2)


def test_torchrun_rank_when_the_variables_are_anothers_then_none() -> None:
    assert TorchrunRank.from_env({name: TORCHRUN[name] for name in ("RANK", "WORLD_SIZE")}) is None
