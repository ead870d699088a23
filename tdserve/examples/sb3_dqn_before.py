"""DQN of Stable-Baselines3, with its own replay buffer.

``sb3_dqn`` is the same program with its buffer on a server; compare the two with ``diff``.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import gymnasium as gym
from stable_baselines3 import DQN
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor

TRAIN_FREQ, GRADIENT_STEPS = 256, 128


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--env-id", default="CartPole-v1")
    parser.add_argument("--total-timesteps", type=int, default=20_000)
    parser.add_argument("--learning-starts", type=int, default=1_000)
    parser.add_argument("--tensorboard-log", help="folder for TensorBoard; by default nothing is logged")
    return parser.parse_args(arguments)


def train(args: argparse.Namespace) -> None:
    """Learns, and shows how well and how fast."""
    model = DQN(
        "MlpPolicy",
        args.env_id,
        learning_rate=2.3e-3,
        buffer_size=100_000,
        learning_starts=args.learning_starts,
        batch_size=64,
        train_freq=TRAIN_FREQ,
        gradient_steps=GRADIENT_STEPS,
        target_update_interval=10,
        exploration_fraction=0.16,
        policy_kwargs={"net_arch": [64, 64]},
        seed=args.seed,
        tensorboard_log=args.tensorboard_log,
    )
    started_s = time.monotonic()
    model.learn(args.total_timesteps)
    took_s = time.monotonic() - started_s
    num_updates = (model.num_timesteps - args.learning_starts) // TRAIN_FREQ * GRADIENT_STEPS
    mean_return, _ = evaluate_policy(model, Monitor(gym.make(args.env_id)), n_eval_episodes=5)
    print(f"mean return of 5 episodes: {mean_return:.0f}")
    print(f"{model.num_timesteps / took_s:.0f} frames/s, {num_updates / took_s:.0f} updates/s")


if __name__ == "__main__":
    train(parse_args())
