"""GRPO: processes that answer, judge and train share prompts, rollouts, late rewards and weights through one server."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from torchrl.data.llm import History

import tdserve

GROUP_SIZE, NUM_ROWS, NUM_RANKS, NUM_STEPS = 8, 32, 2, 20


def answer(address: str) -> None:
    """Answers each prompt several times, by the newest weights, until no more prompts come."""
    with tdserve.connect(address) as client:
        policy, rollouts = torch.nn.Embedding(9, 10), client.replay("rollouts")
        for prompt in client.queue("prompts").batches(1):
            weights: Any = client.latest("policy", into=policy)
            number = prompt["prompt"].repeat(GROUP_SIZE)
            said = policy(number % 9).softmax(-1).multinomial(1)[:, 0]
            texts = [[f"{number[0] % 9} + 1 = ?", str(reply)] for reply in said.tolist()]
            history = History(role=[["user", "assistant"]] * GROUP_SIZE, content=texts, batch_size=[GROUP_SIZE, 2])
            rows = {"prompt": number, "said": said, "history": history}  # their rewards come later
            rollouts.extend(TensorDict(rows, [GROUP_SIZE]), policy_version=weights.version)


def judge(address: str) -> None:
    """Writes the rewards of rollouts, which it reads as text, until no more come."""
    with tdserve.connect(address) as client:
        for rows in client.replay("rollouts").batches(GROUP_SIZE, consumer="judge", require="history"):
            rewards = torch.tensor([float(int(ask[0]) + 1 == int(reply)) for ask, reply in rows["history"].content])
            client.replay("rollouts").set_at_("reward", rewards, rows)


def train(address: str, rank: int, log: Any = lambda *_: None) -> None:
    """Trains on this rank's share of each step's groups and logs their mean reward. Rank 0 creates and publishes."""
    policy = torch.nn.Embedding(9, 10, _weight=torch.zeros(9, 10))
    share: dict[str, Any] = {"rank": rank, "world_size": NUM_RANKS, "balance": "history", "consumer": "trainers"}
    with tdserve.connect(address) as client, client.group("trainers", world_size=NUM_RANKS, rank=rank) as group:
        if rank == 0:
            zero, history = torch.tensor(0), History(role=["user", "assistant"], content=["", ""], batch_size=[2])
            row = {"prompt": zero, "said": zero, "reward": zero.float(), "history": history}
            client.create_replay("rollouts", like=TensorDict(row), capacity=4096, policy="policy")
            client.create_queue("prompts", like={"prompt": torch.tensor(0)}, max_size=4096)
        prompts, rollouts = client.queue("prompts"), client.replay("rollouts")
        for step in range(NUM_STEPS):
            if rank == 0:
                client.publish("policy", policy, dtype=torch.bfloat16)
            prompts.extend({"prompt": torch.arange(rank, NUM_RANKS * NUM_ROWS // GROUP_SIZE, NUM_RANKS) + 1000 * step})
            rows = rollouts.sample(NUM_ROWS, **share, group_by="prompt", group_size=GROUP_SIZE, max_lag=1)
            gains = torch.nn.functional.layer_norm(rows["reward"].reshape(-1, GROUP_SIZE), [GROUP_SIZE]).flatten()
            loss = torch.nn.functional.cross_entropy(policy(rows["prompt"] % 9), rows["said"], reduction="none") @ gains
            (gradient,) = torch.autograd.grad(loss / NUM_ROWS, policy.weight)
            log("reward", rows["reward"].mean().item(), step)
            policy.weight.data -= 20.0 * group.all_reduce(TensorDict({"mean": gradient}), "mean")["mean"]
        prompts.close()
        rollouts.close()
