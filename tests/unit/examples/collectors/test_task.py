from __future__ import annotations

import pytest
import torch

from tdserve.examples.collectors.task import NUM_ACTIONS, Names, collect, loss, make_policy


def test_names_when_two_runs_share_a_server_then_none_is_shared() -> None:
    assert not set(Names.of("one")) & set(Names.of("two"))
    assert len(set(Names.of("one"))) == 3


def test_collect_when_done_then_every_row_has_collector_and_version() -> None:
    rows = collect(make_policy(), 5, torch.device("cpu"), collector=3, version=7)
    assert rows.batch_size == (5,)
    assert (rows["collector"].tolist(), rows["version"].tolist()) == ([3] * 5, [7] * 5)


@pytest.mark.slow
def test_loss_when_followed_then_the_policy_is_paid_more() -> None:
    torch.manual_seed(0)
    policy = make_policy()
    optimizer = torch.optim.Adam(policy.parameters(), 1e-2)
    before = collect(policy, 2000, torch.device("cpu"))["reward"].mean().item()
    for _ in range(200):
        optimizer.zero_grad()
        loss(policy, collect(policy, 256, torch.device("cpu"))).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    after = collect(policy, 2000, torch.device("cpu"))["reward"].mean().item()
    assert before < 2 / NUM_ACTIONS
    assert after > 0.8
