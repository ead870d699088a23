"""DQN of TorchRL, with its replay buffer in memory-mapped files of its own.

``torchrl_dqn`` is the same program with its buffer on a server; compare the two with ``diff``.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import torch
from tensordict.nn import TensorDictSequential
from torchrl.collectors import Collector
from torchrl.data import LazyMemmapStorage, TensorDictReplayBuffer
from torchrl.envs import GymEnv, StepCounter, TransformedEnv
from torchrl.modules import MLP, EGreedyModule, QValueActor
from torchrl.objectives import DQNLoss, SoftUpdate
from torchrl.record.loggers import get_logger


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--env-id", default="CartPole-v1")
    parser.add_argument("--total-frames", type=int, default=20_000)
    parser.add_argument("--frames-per-batch", type=int, default=100)
    parser.add_argument("--updates-per-batch", type=int, default=10)
    parser.add_argument("--buffer-size", type=int, default=100_000)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--logger", default="", help="tensorboard, wandb, csv or another of TorchRL's; none by default")
    parser.add_argument("--log-dir", default="runs", help="folder of the logger")
    return parser.parse_args(arguments)


def train(args: argparse.Namespace) -> None:
    """Collects steps and learns from them in turn."""
    torch.manual_seed(args.seed)
    env = TransformedEnv(GymEnv(args.env_id), StepCounter())
    env.set_seed(args.seed)
    network = MLP(in_features=env.observation_spec["observation"].shape[-1], out_features=2, num_cells=[120, 84])
    policy = QValueActor(network, in_keys=["observation"], spec=env.action_spec)
    explored = EGreedyModule(env.action_spec, annealing_num_steps=args.total_frames // 2, eps_end=0.05)
    loss_module = DQNLoss(policy, action_space=env.action_spec, delay_value=True)
    loss_module.make_value_estimator(gamma=0.99)
    target_updater = SoftUpdate(loss_module, eps=0.98)
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=1e-3)
    collector = Collector(
        env,
        TensorDictSequential(policy, explored),
        frames_per_batch=args.frames_per_batch,
        total_frames=args.total_frames,
        auto_register_policy_transforms=True,
    )
    buffer = TensorDictReplayBuffer(
        storage=LazyMemmapStorage(args.buffer_size),
        batch_size=args.batch_size,
    )

    logger = get_logger(args.logger, args.log_dir, "torchrl_dqn")
    lengths: list[float] = []
    num_frames, num_updates, started_s = 0, 0, time.monotonic()
    for frames in collector:
        buffer.extend(frames.reshape(-1))
        explored.step(frames.numel())
        num_frames += frames.numel()
        lengths += frames["next", "step_count"][frames["next", "done"]].tolist()
        if len(buffer) < 10 * args.frames_per_batch:
            continue
        for _ in range(args.updates_per_batch):
            loss = loss_module(buffer.sample())["loss"]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            target_updater.step()
            num_updates += 1
        if logger is not None:
            logger.log_scalar("train/loss", loss.item(), num_frames)
            logger.log_scalar("train/episode_length", sum(lengths[-20:]) / len(lengths[-20:]), num_frames)
    took_s = time.monotonic() - started_s
    print(f"mean length of the last 20 episodes: {sum(lengths[-20:]) / len(lengths[-20:]):.0f}")
    print(f"{args.total_frames / took_s:.0f} frames/s, {num_updates / took_s:.0f} updates/s")
    collector.shutdown()
    if logger is not None:
        logger.close()


if __name__ == "__main__":
    train(parse_args())
