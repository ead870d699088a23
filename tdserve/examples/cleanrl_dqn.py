"""DQN in one file, in the way of CleanRL, with the replay buffer on the server that ``TDSERVE_ADDRESS`` names.

``cleanrl_dqn_before`` is the same program with its buffer in the process; compare the two with ``diff``.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import nn, optim
from torch.nn.functional import mse_loss

from tdserve.sb3 import TDServeReplayBuffer


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
    parser.add_argument("--log-dir", help="folder for TensorBoard; by default nothing is logged, with --track `runs`")
    parser.add_argument("--track", action="store_true", help="log to Weights & Biases too")
    parser.add_argument("--wandb-project-name", default="tdserve")
    return parser.parse_args(arguments)


def fix_randomness(seed: int) -> None:
    """Seeds every generator that is used here."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


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


def open_writer(args: argparse.Namespace) -> Any:
    """Opens TensorBoard's writer, which W&B follows with ``--track``, or one that writes nothing."""
    if not (args.log_dir or args.track):
        return SimpleNamespace(add_scalar=lambda *_: None, close=lambda: None)
    from torch.utils.tensorboard import SummaryWriter

    run_name = f"{args.env_id}__cleanrl_dqn__{args.seed}__{int(time.time())}"
    if args.track:
        import wandb

        wandb.init(project=args.wandb_project_name, sync_tensorboard=True, config=vars(args), name=run_name)
    return SummaryWriter(f"{args.log_dir or 'runs'}/{run_name}")


def compute_epsilon(args: argparse.Namespace, step: int) -> float:
    """Returns the share of random actions, which falls with the steps."""
    share = step / (args.exploration_fraction * args.total_timesteps)
    return float(max(args.start_e + share * (args.end_e - args.start_e), args.end_e))


def compute_loss(q_network: nn.Module, target_network: nn.Module, data: Any, *, gamma: float) -> tuple[Any, Any]:
    """Returns the loss on a batch, and the values of the actions taken."""
    with torch.no_grad():
        target_max, _ = target_network(data.next_observations).max(1)
        td_target = data.rewards.flatten() + gamma * target_max * (1 - data.dones.flatten())
    old_val = q_network(data.observations).gather(1, data.actions).squeeze(1)
    return mse_loss(old_val, td_target), old_val


def follow(target_network: nn.Module, q_network: nn.Module, *, tau: float) -> None:
    """Moves the target towards the network."""
    for target, own in zip(target_network.parameters(), q_network.parameters(), strict=True):
        target.data.copy_(tau * own.data + (1.0 - tau) * target.data)


def train(args: argparse.Namespace) -> None:
    """Runs the environments and learns from their transitions."""
    fix_randomness(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    make_env = lambda: gym.wrappers.RecordEpisodeStatistics(gym.make(args.env_id))  # noqa: E731
    envs = gym.vector.SyncVectorEnv([make_env] * args.num_envs, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)
    q_network = make_network(envs).to(device)
    optimizer = optim.Adam(q_network.parameters(), lr=args.learning_rate)
    target_network = make_network(envs).to(device)
    target_network.load_state_dict(q_network.state_dict())

    rb = TDServeReplayBuffer(
        args.buffer_size,
        envs.single_observation_space,
        envs.single_action_space,
        device,
        n_envs=args.num_envs,
        handle_timeout_termination=False,
        name="cleanrl",
    )

    writer = open_writer(args)
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
            writer.add_scalar("charts/episodic_return", returns[-1], step)
        rb.add(obs, real_next_obs, actions, rewards, terminations, [{}] * envs.num_envs)
        obs = next_obs

        if step > args.learning_starts and step % args.train_frequency == 0:
            data = rb.sample(args.batch_size)
            loss, old_val = compute_loss(q_network, target_network, data, gamma=args.gamma)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            num_updates += 1
            if step % 100 == 0:
                writer.add_scalar("losses/td_loss", loss.item(), step)
                writer.add_scalar("losses/q_values", old_val.mean().item(), step)
                writer.add_scalar("charts/SPS", step / (time.monotonic() - started_s), step)

        if step % args.target_network_frequency == 0:
            follow(target_network, q_network, tau=args.tau)

    took_s = time.monotonic() - started_s
    print(f"mean return of the last 20 episodes: {np.mean(returns[-20:]):.0f}")
    print(f"{args.total_timesteps * envs.num_envs / took_s:.0f} frames/s, {num_updates / took_s:.0f} updates/s")
    envs.close()
    writer.close()


if __name__ == "__main__":
    train(parse_args())
