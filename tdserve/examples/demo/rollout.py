"""Steps environments: exploration, n-step transitions, finished episodes. It uses neither tdserve nor the network."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from numpy.typing import NDArray
from tensordict import TensorDict

from tdserve.examples.demo.dqn import GAMMA, NUM_STEPS

Observations = NDArray[np.float32]
Actions = NDArray[np.int64]


class Transition(NamedTuple):
    """One row of training data: up to ``num_steps`` steps of one environment, joined.

    Attributes:
        observation, action: Observation and action of the first step.
        next_observation: What followed the last step.
        reward: The discounted sum of the rewards.
        discount: gamma**n after n steps. It is 0 where the episode terminated, but not where it was cut short.
    """

    observation: Observations
    action: int
    next_observation: Observations
    reward: float
    discount: float


class StepJoiner:
    """Joins the steps of one environment into transitions of up to ``num_steps`` steps; fewer at an episode's end."""

    def __init__(self, num_steps: int = NUM_STEPS, gamma: float = GAMMA) -> None:
        self._num_steps = num_steps
        self._gamma = gamma
        self._steps: deque[tuple[Observations, int, float]] = deque()

    def step(
        self, before: Observations, action: int, reward: float, *, after: Observations, terminated: bool, done: bool
    ) -> list[Transition]:
        """Takes one step and returns the transitions that it completes.

        Args:
            before: The observation that the action answered.
            action: The action.
            reward: The reward of this step.
            after: The observation that followed. At the end of an episode this is its last observation, not the first
                one of the next episode.
            terminated: Whether later rewards are zero. They are not where an episode was only cut short.
            done: Whether the episode ended in either way.
        """
        self._steps.append((before, action, reward))
        complete = []
        while self._steps and (done or len(self._steps) == self._num_steps):
            total = sum(reward * self._gamma**step for step, (_, _, reward) in enumerate(self._steps))
            discount = 0.0 if terminated else self._gamma ** len(self._steps)
            first, taken, _ = self._steps.popleft()
            complete.append(Transition(first, taken, after, total, discount))
        return complete


class Rollout:
    """Several copies of one environment in one process: one forward pass of the policy serves them all.

    Args:
        env: The gymnasium name of the environment.
        num_envs: The number of copies.
        rng: Decides starts and exploration.
    """

    def __init__(self, env: str, num_envs: int, rng: np.random.Generator) -> None:
        make = partial(gymnasium.make, env, disable_env_checker=True)
        # a step that ends an episode begins the next one, and returns the last observation apart
        self._envs = SyncVectorEnv([make] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)
        self._rng = rng
        self._num_actions = int(self._envs.single_action_space.n)  # type: ignore[attr-defined]  # stores.sizes checked it
        self._joined = [StepJoiner() for _ in range(num_envs)]
        self._returns = np.zeros(num_envs)
        self._observations: Observations = self._envs.reset(seed=int(rng.integers(2**31)))[0].astype(np.float32)

    def collect(
        self, num_steps: int, policy: Callable[[Observations], Actions], *, epsilon: float
    ) -> tuple[list[Transition], list[float]]:
        """Steps every environment ``num_steps`` times.

        Returns:
            The transitions that were completed, and the undiscounted returns of the episodes that ended.
        """
        transitions: list[Transition] = []
        returns: list[float] = []
        for _ in range(num_steps):
            is_random = self._rng.random(len(self._joined)) < epsilon
            random = self._rng.integers(self._num_actions, size=len(self._joined))
            actions = np.where(is_random, random, policy(self._observations))
            before = self._observations
            seen, rewards, terminated, truncated, info = self._envs.step(actions)
            self._observations = seen.astype(np.float32)
            self._returns += rewards
            for number, done in enumerate(terminated | truncated):
                after = info["final_obs"][number].astype(np.float32) if done else self._observations[number]
                step = before[number], int(actions[number]), float(rewards[number])
                transitions += self._joined[number].step(*step, after=after, terminated=terminated[number], done=done)
                if done:
                    returns.append(float(self._returns[number]))
                    self._returns[number] = 0.0
        return transitions, returns


def to_transition_rows(transitions: list[Transition], *, policy_version: int) -> TensorDict:
    """Returns the rows of the store of transitions."""
    columns = (torch.from_numpy(np.array(column)) for column in zip(*transitions, strict=True))
    observation, action, next_observation, reward, discount = columns
    following = {"observation": next_observation, "reward": reward.float(), "discount": discount.float()}
    version = torch.full_like(action, policy_version)
    rows = {"observation": observation, "action": action, "policy_version": version, "next": following}
    return TensorDict(rows, action.shape)


def to_episode_rows(returns: list[float], *, actor: int, policy_version: int, ended_s: float) -> TensorDict:
    """Returns the rows of the store of episodes; ``ended_s`` counts from the epoch."""
    num_rows = len(returns)
    return TensorDict(
        {
            "actor": torch.full((num_rows,), actor),
            "episode_return": torch.tensor(returns),
            "policy_version": torch.full((num_rows,), policy_version),
            "ended_s": torch.full((num_rows,), ended_s, dtype=torch.float64),
        },
        [num_rows],
    )
