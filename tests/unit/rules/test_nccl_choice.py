from __future__ import annotations

from typing import Any

import pytest

from tdserve.rules.nccl_choice import why_not_nccl


@pytest.mark.parametrize(
    ("asked", "ends", "reason"),
    [
        ("auto", {"client_gpu": "a", "worker_gpu": "b"}, ""),
        ("nccl", {"client_gpu": "a", "worker_gpu": "b"}, ""),
        ("nccl", {"client_gpu": "a", "worker_gpu": "b", "is_one_machine": True}, ""),
        ("auto", {"client_gpu": "a", "worker_gpu": "b", "is_one_machine": True}, "one machine"),
        ("nccl", {"client_gpu": "a", "worker_gpu": "a"}, "both ends use one GPU, a"),
        ("auto", {"client_gpu": "a", "worker_gpu": "a", "is_one_machine": True}, "both ends use one GPU, a"),
        ("auto", {"client_gpu": "", "worker_gpu": "b"}, "the client has no GPU"),
        ("nccl", {"client_gpu": "a", "worker_gpu": ""}, "--device"),
        ("nccl", {"client_gpu": "a", "worker_gpu": "", "why_no_gpu": "there is no cuda:3"}, "there is no cuda:3"),
        ("gloo", {"client_gpu": "a", "worker_gpu": "b"}, "'gloo' was asked for"),
        ("shm", {"client_gpu": "a", "worker_gpu": "b"}, "'shm' was asked for"),
    ],
)
def test_nccl_when_the_ends_are_compared_then_used_or_told_why_not(
    asked: str, ends: dict[str, Any], reason: str
) -> None:
    found = why_not_nccl(asked, **ends)
    assert bool(found) == bool(reason)
    assert reason in found
