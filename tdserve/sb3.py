"""The replay buffer of Stable-Baselines3, with its rows in a table of a server. Needs ``stable-baselines3``.

``DQN(..., replay_buffer_class=TDServeReplayBuffer, replay_buffer_kwargs={"address": ..., "name": ...})`` is all that a
program changes. Stable-Baselines3 is read at version 2.9.2.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.buffers import BaseBuffer, ReplayBuffer
from stable_baselines3.common.type_aliases import DictReplayBufferSamples, ReplayBufferSamples
from tensordict import TensorDict

from tdserve.base.errors import NotSupportedError
from tdserve.client.client import Client, connect

_MAX_UNDER_WAY = 32
"""Steps whose rows may be on their way while the environment goes on."""


class TDServeReplayBuffer(ReplayBuffer):
    """A ``ReplayBuffer``, or for dict observations a ``DictReplayBuffer``, whose transitions are rows of a table.

    Each step of each environment is one row, with the keys ``observations``, ``next_observations``, ``actions``,
    ``rewards``, ``dones`` and ``timeouts``. Several processes may give the same address and name: they share the rows.
    Samples are uniform. A process samples all rows that it has added. Threads: one at a time, as Stable-Baselines3's.

    Pickling (``save_replay_buffer``) keeps the address and the name, and the rows stay with the server.

    Args:
        buffer_size, observation_space, action_space, device, n_envs, handle_timeout_termination: As of
            ``stable_baselines3.common.buffers.ReplayBuffer``.
        optimize_memory_usage: Must be False.
        address: Of the server. None: the environment variable ``TDSERVE_ADDRESS``.
        name: Of the table, which is created unless it exists with this structure.
        transport: As of ``tdserve.connect``.
        table: Further arguments of ``Client.create_replay``, such as ``sampler=``.

    Raises:
        NotSupportedError: ``optimize_memory_usage`` is True. Nothing was created.
        StoreExistsError: There is a store of this name with another structure or other rules.
        ConnectError: There is no server.
    """

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        device: torch.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        *,
        address: str | None = None,
        name: str = "replay",
        transport: str = "auto",
        **table: Any,
    ) -> None:
        if optimize_memory_usage:
            reason = "rows of several processes do not follow one another, so each has its next observation"
            raise NotSupportedError(feature="optimize_memory_usage=True", reason=reason)
        # Not that of ReplayBuffer, which reserves the memory of all rows.
        BaseBuffer.__init__(self, buffer_size, observation_space, action_space, device, n_envs=n_envs)
        self.buffer_size = max(buffer_size // n_envs, 1)
        self._capacity = max(buffer_size, n_envs)  # whatever n_envs is: processes with other numbers share the table
        self.optimize_memory_usage = False
        self.handle_timeout_termination = handle_timeout_termination
        self._options: dict[str, Any] = {"address": address, "transport": transport}
        self._name = name
        self._table_options = table
        self._connect()

    def _connect(self) -> None:
        self._client: Client = connect(**self._options)
        self._table = self._client.create_replay(
            self._name, self._make_row(), self._capacity, exists_ok=True, **self._table_options
        )
        self._under_way: deque[Future[Any]] = deque()

    def _make_row(self) -> TensorDict:
        """Makes one row of zeros."""
        observation = _make_observation(self.observation_space, self.obs_shape)
        action = np.zeros(self.action_dim, self._maybe_cast_dtype(self.action_space.dtype))
        numbers = {key: np.float32(0.0) for key in ("rewards", "dones", "timeouts")}
        content = {"observations": observation, "next_observations": observation, "actions": action, **numbers}
        return _make_tensordict(content, [])

    def add(
        self,
        obs: np.ndarray | Mapping[str, np.ndarray],
        next_obs: np.ndarray | Mapping[str, np.ndarray],
        action: np.ndarray,
        reward: np.ndarray,
        done: np.ndarray,
        infos: list[dict[str, Any]],
    ) -> None:
        """Adds one step of every environment; the rows are on their way when it returns.

        Raises:
            TDServeError: Rows of this or an earlier step could not be stored, as raised by ``ReplayHandle.extend``.
        """
        timeouts = np.zeros(self.n_envs, np.float32)
        if self.handle_timeout_termination:
            timeouts[:] = [info.get("TimeLimit.truncated", False) for info in infos]
        rows = {
            "observations": self._copy_observation(obs),
            "next_observations": self._copy_observation(next_obs),
            "actions": np.array(action, self._maybe_cast_dtype(self.action_space.dtype)).reshape(self.n_envs, -1),
            "rewards": np.array(reward, np.float32),
            "dones": np.array(done, np.float32),
            "timeouts": timeouts,
        }
        batch = _make_tensordict(rows, [self.n_envs])
        self._under_way.append(self._table.extend(batch, return_early=True))
        while self._under_way and (len(self._under_way) > _MAX_UNDER_WAY or self._under_way[0].done()):
            self._under_way.popleft().result()
        self.pos = (self.pos + 1) % self.buffer_size
        self.full |= self.pos == 0

    def _copy_observation(self, observation: Any) -> Any:
        if isinstance(self.observation_space, spaces.Dict):
            return {
                key: np.array(observation[key], space.dtype).reshape(self.n_envs, *self.obs_shape[key])  # type: ignore[call-overload]
                for key, space in self.observation_space.items()
            }
        return np.array(observation, self.observation_space.dtype).reshape(self.n_envs, *self.obs_shape)

    def flush(self) -> None:
        """Waits until all rows that were added are stored. Errors as of ``add``."""
        while self._under_way:
            self._under_way.popleft().result()

    def size(self) -> int:
        """Returns the number of steps of ``n_envs`` rows in the table, whoever added them."""
        self.flush()
        return len(self._table) // self.n_envs

    def reset(self) -> None:
        """Removes all rows, also those of other processes."""
        self.flush()
        self._table.clear()
        super().reset()

    def sample(self, batch_size: int, env: Any = None) -> Any:
        """Draws rows; as ``ReplayBuffer.sample``, or ``DictReplayBuffer.sample`` for dict observations.

        Raises:
            TDServeError: As raised by ``ReplayHandle.sample``, or by ``add``.
        """
        self.flush()
        batch = self._table.sample(batch_size)
        done = batch["dones"] * (1 - batch["timeouts"])
        observations, next_observations = (
            self._to_observations(batch[key], env) for key in ("observations", "next_observations")
        )
        reward = self._normalize_reward(batch["rewards"].numpy().reshape(-1, 1), env)
        kind = DictReplayBufferSamples if isinstance(observations, dict) else ReplayBufferSamples
        actions, dones = batch["actions"].to(self.device), done.reshape(-1, 1).to(self.device)
        return kind(observations, actions, next_observations, dones, self.to_torch(reward, copy=False))

    def _to_observations(self, stored: Any, env: Any) -> Any:
        is_dict = isinstance(self.observation_space, spaces.Dict)
        found: Any = {key: stored[key].numpy() for key in self.obs_shape} if is_dict else stored.numpy()
        found = self._normalize_obs(found, env)
        if is_dict:
            return {key: self.to_torch(array, copy=False) for key, array in found.items()}
        return self.to_torch(found, copy=False)

    def close(self) -> None:
        """Stores what was added, and closes the connection. Errors as of ``add``."""
        self.flush()
        self._client.close()

    def __getstate__(self) -> dict[str, Any]:
        self.flush()
        return {key: value for key, value in vars(self).items() if key not in ("_client", "_table", "_under_way")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._connect()


def _make_tensordict(content: Mapping[str, Any], batch_size: list[int]) -> TensorDict:
    """Makes a tensordict that shares the memory of arrays: ``from_dict`` takes eight times as long."""
    tensors = {
        key: _make_tensordict(part, batch_size) if isinstance(part, dict) else torch.as_tensor(part)
        for key, part in content.items()
    }
    return TensorDict(tensors, batch_size)


def _make_observation(space: spaces.Space[Any], shape: Any) -> Any:
    """Makes an observation of zeros, as it is stored."""
    if isinstance(space, spaces.Dict):
        return {key: np.zeros(shape[key], each.dtype) for key, each in space.items()}
    return np.zeros(shape, space.dtype)
