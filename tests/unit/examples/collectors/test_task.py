from __future__ import annotations

import torch

from tdserve.examples.collectors.task import NUM_ACTIONS, Names, collect, loss, make_policy, row


def test_names_when_two_runs_share_a_server_then_none_is_shared() -> None:
    assert not set(Names.of("one")) & set(Names.of("two"))
    assert len(set(Names.of("one"))) == 3


def test_collect_when_done_then_rows_have_the_declared_structure() -> None:
    rows = collect(make_policy(), 5, torch.device("cpu"))
    like = row()
    assert rows.batch_size == (5,)
    for key, leaf in rows.items():
        assert (leaf.shape[1:], leaf.dtype) == (like[key].shape, like[key].dtype)


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
