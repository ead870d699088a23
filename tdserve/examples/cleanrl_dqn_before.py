"""DQN in one file, in the way of CleanRL, with the replay buffer in the process.

``cleanrl_dqn`` is the same program with its buffer on a server; compare the two with ``diff``.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from stable_baselines3.common.buffers import ReplayBuffer
from torch import nn, optim
from torch.nn.functional import mse_loss


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--env-id", default="CartPole-v1")
    parser.add_argument("--total-timesteps", type=int, default=20_000)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--num-envs", type=int, default=1)
    parser.add_argument("--buffer-size", type=int, default=10_000)
    parser.add_argument("--gamma", type=float, default=0.99)
    parser.add_argument("--tau", type=float, default=1.0)
    parser.add_argument("--target-network-frequency", type=int, default=250)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--start-e", type=float, default=1.0)
    parser.add_argument("--end-e", type=float, default=0.05)
    parser.add_argument("--exploration-fraction", type=float, default=0.5)
    parser.add_argument("--learning-starts", type=int, default=1_000)
    parser.add_argument("--train-frequency", type=int, default=2)
    return parser.parse_args(arguments)


def make_network(envs: Any) -> nn.Sequential:
    """Makes a network with a value per action."""
    num_observations = int(np.prod(envs.single_observation_space.shape))
    return nn.Sequential(
        nn.Linear(num_observations, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, int(envs.single_action_space.n)),
    )


def compute_epsilon(args: argparse.Namespace, step: int) -> float:
    """Returns the share of random actions, which falls with the steps."""
    share = step / (args.exploration_fraction * args.total_timesteps)
    return float(max(args.start_e + share * (args.end_e - args.start_e), args.end_e))


def train(args: argparse.Namespace) -> None:
    """Runs the environments and learns from their transitions."""
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    make_env = lambda: gym.wrappers.RecordEpisodeStatistics(gym.make(args.env_id))  # noqa: E731
    envs = gym.vector.SyncVectorEnv([make_env] * args.num_envs, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)
    q_network = make_network(envs).to(device)
    optimizer = optim.Adam(q_network.parameters(), lr=args.learning_rate)
    target_network = make_network(envs).to(device)
    target_network.load_state_dict(q_network.state_dict())

    rb = ReplayBuffer(
        args.buffer_size,
        envs.single_observation_space,
        envs.single_action_space,
        device,
        n_envs=args.num_envs,
        handle_timeout_termination=False,
    )

    returns: list[float] = []
    num_updates, started_s = 0, time.monotonic()
    obs, _ = envs.reset(seed=args.seed)
    for step in range(args.total_timesteps):
        if random.random() < compute_epsilon(args, step):
            actions = np.array([envs.single_action_space.sample() for _ in range(envs.num_envs)])
        else:
            actions = q_network(torch.tensor(obs, device=device)).argmax(1).cpu().numpy()

        next_obs, rewards, terminations, truncations, infos = envs.step(actions)
        real_next_obs = next_obs.copy()
        for at in np.flatnonzero(terminations | truncations):
            real_next_obs[at] = infos["final_obs"][at]
            returns.append(float(infos["final_info"]["episode"]["r"][at]))
        rb.add(obs, real_next_obs, actions, rewards, terminations, [{}] * envs.num_envs)
        obs = next_obs

        if step > args.learning_starts and step % args.train_frequency == 0:
            data = rb.sample(args.batch_size)
            with torch.no_grad():
                target_max, _ = target_network(data.next_observations).max(1)
                td_target = data.rewards.flatten() + args.gamma * target_max * (1 - data.dones.flatten())
            old_val = q_network(data.observations).gather(1, data.actions).squeeze(1)
            loss = mse_loss(old_val, td_target)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            num_updates += 1

        if step % args.target_network_frequency == 0:
            for target, own in zip(target_network.parameters(), q_network.parameters(), strict=True):
                target.data.copy_(args.tau * own.data + (1.0 - args.tau) * target.data)

    took_s = time.monotonic() - started_s
    print(f"mean return of the last 20 episodes: {np.mean(returns[-20:]):.0f}")
    print(f"{args.total_timesteps * envs.num_envs / took_s:.0f} frames/s, {num_updates / took_s:.0f} updates/s")
    envs.close()


if __name__ == "__main__":
    train(parse_args())
