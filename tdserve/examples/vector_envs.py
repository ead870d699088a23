"""Vector environments of Gymnasium with a writer for each: rows of one environment are one trajectory after the other.

``python -m tdserve.examples.vector_envs`` starts a server, unless ``--address`` names one. Slices of consecutive steps
are drawn while the environments continue.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import gymnasium as gym
import numpy as np

import tdserve

NUM_SLICES, SLICE_STEPS = 32, 8
"""Of each sample."""

WARMUP_STEPS, STEPS_PER_DRAW = 100, 4
"""Of all environments together, before the first sample and between two."""


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", metavar="HOST:PORT", help="a server; by default one is started")
    parser.add_argument("--env-id", default="CartPole-v1")
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--num-steps", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(arguments)


@contextmanager
def provide_server(address: str | None) -> Iterator[str]:
    """Yields the address of a server: the one that is named, or one that ends with the block."""
    if address is not None:
        yield address
        return
    with tempfile.TemporaryDirectory(prefix="tdserve-") as root, tdserve.Server(root, port=0).start() as server:
        yield server.address


def run(client: tdserve.Client, args: argparse.Namespace) -> np.ndarray:
    """Steps the environments and draws slices; returns observations of the last ones, ``[slices, steps, ...]``."""
    make_env = lambda: gym.make(args.env_id)  # noqa: E731
    envs = gym.vector.SyncVectorEnv([make_env] * args.num_envs, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)
    envs.action_space.seed(args.seed)
    obs, _ = envs.reset(seed=args.seed)
    action = envs.single_action_space.sample()
    row = {"obs": obs[0], "action": action, "reward": 0.0, "next": {"obs": obs[0], "terminated": False}}
    table = client.create_replay("steps", like=row, capacity=100_000, sampler=tdserve.Slices(SLICE_STEPS))
    with ExitStack() as stack:
        writers = [stack.enter_context(table.writer()) for _ in range(args.num_envs)]
        started_s = time.monotonic()
        for step in range(args.num_steps):
            actions = envs.action_space.sample()
            next_obs, rewards, terminated, truncated, infos = envs.step(actions)
            has_ended = terminated | truncated
            for at, writer in enumerate(writers):
                then = {"obs": infos["final_obs"][at] if has_ended[at] else next_obs[at], "terminated": terminated[at]}
                writer.append({"obs": obs[at], "action": actions[at], "reward": rewards[at], "next": then})
                if has_ended[at]:
                    writer.end_trajectory()
            obs = next_obs
            if step >= WARMUP_STEPS and step % STEPS_PER_DRAW == 0:
                slices = table.sample(NUM_SLICES * SLICE_STEPS)
        took_s = time.monotonic() - started_s
    envs.close()
    print(f"{args.num_steps * args.num_envs / took_s:.0f} frames/s of {args.num_envs} environments")
    return np.reshape(slices["obs"], (NUM_SLICES, SLICE_STEPS, -1))


def main(arguments: Sequence[str] | None = None) -> np.ndarray:
    """Runs the example; result as in ``run``."""
    args = parse_args(arguments)
    with provide_server(args.address) as address, tdserve.connect(address, numpy=True) as client:
        return run(client, args)


if __name__ == "__main__":
    main()
