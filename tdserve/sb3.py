"""The replay buffer of Stable-Baselines3, with its rows in a table of a server. Needs ``stable-baselines3``.

``DQN(..., replay_buffer_class=TDServeReplayBuffer, replay_buffer_kwargs={"address": ..., "name": ...})`` is all that a
program changes. Stable-Baselines3 is read at version 2.9.2.
"""

from __future__ import annotations

import math
import os
import time
import weakref
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from threading import Thread
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.buffers import BaseBuffer, ReplayBuffer
from stable_baselines3.common.type_aliases import DictReplayBufferSamples, ReplayBufferSamples
from tensordict import TensorDict

from tdserve.base.errors import ClosedError, NotSupportedError, TDServeError, WrongStateError
from tdserve.client.client import Client
from tdserve.client.connecting import connect
from tdserve.client.session.calls.call_conditions import is_passing
from tdserve.client.session.finalizing import run_from_finalizer
from tdserve.client.session.process_exit import ExitFlush
from tdserve.client.tables.replay import ReplayHandle

_MAX_UNDER_WAY = 8
"""Extends that may be on their way while the environment continues."""

_MAX_WAITING = 32
"""Steps that wait to be sent together: an extend of one row costs nearly as much as one of 32."""

_MAX_WAITING_NBYTES = 1024 * 1024
"""Most content that waits; one step may always wait."""

MAX_WAITING_S = 0.05
"""A step does not wait longer for others, as long as steps are added or rows sampled."""

_LOOK_AGAIN_S = 1.0
"""Time between two looks at how many rows others have added: what waits is drawn in proportion to all."""

_MAX_AHEAD = 16
"""Most samples that are drawn together."""

_MAX_AHEAD_NBYTES = 1024 * 1024
"""Most content of them: to copy more takes as long as to draw it again."""

_OF_STORAGE = frozenset(("durability", "checksum", "max_object_bytes"))
"""Arguments of a table that have no part in how its rows are drawn."""

_MIN_ROWS_PER_WAITING = 64
"""Rows of a table for each that waits: where samples are drawn from both, a full table's oldest rows are drawn a little
longer than they should."""


class TDServeReplayBuffer(ReplayBuffer):
    """A ``ReplayBuffer``, or for dict observations a ``DictReplayBuffer``, whose transitions are rows of a table.

    Each step of each environment is one row, with the keys ``observations``, ``next_observations``, ``actions``,
    ``rewards``, ``dones`` and ``timeouts``. Several processes may give the same address and name: they share the rows.
    Samples are uniform. A process samples all rows that it has added, with those that are not sent yet. Others see them
    a little later: up to 32 steps, or those of 50 ms, are sent together, by the next ``add`` or ``sample``; and this
    process sees theirs up to 16 samples or 50 ms later, for which it draws rows at once. ``flush`` sends and stores
    all, as the end of the buffer or of the process does. Threads: one at a time, as Stable-Baselines3's.

    Pickling (``save_replay_buffer``) keeps the address and the name, and the rows stay with the server.

    Args:
        buffer_size, observation_space, action_space, device, n_envs, handle_timeout_termination: As in
            ``stable_baselines3.common.buffers.ReplayBuffer``.
        optimize_memory_usage: Must be False.
        address: Address of the server. None: the environment variable ``TDSERVE_ADDRESS``.
        name: Name of the table, which is created unless it exists with this structure.
        transport: As in ``tdserve.connect``.
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
        self._waits = bool(table.keys() & {"min_size", "limiter"})
        self._draws_waiting = table.keys() <= _OF_STORAGE
        self._connect()

    def _connect(self) -> None:
        self._client: Client = connect(**self._options)
        row = self._make_row()
        like = _make_tensordict(_make_arrays(row, 1, 1), 1, [1])[0]
        self._table = self._client.create_replay(
            self._name, like, self._capacity, exists_ok=True, **self._table_options
        )
        self._under_way: deque[Future[Any]] = deque()
        self._waiting = _Steps(row, self.n_envs, max_rows=self._capacity // _MIN_ROWS_PER_WAITING)
        self._ahead = _RowsAhead(self._table, sum(map(_count_bytes, row.values())))
        self._num_stored = 0  # rows of the table, as of the last look
        self._looked_s = -math.inf
        held = self._client, self._waiting, self._under_way, self._table
        weakref.finalize(self, _finish_later, os.getpid(), *held).atexit = False  # then _BUFFERS does it
        _BUFFERS.add(self)

    def _make_row(self) -> dict[str, Any]:
        """Makes one row, as nested arrays."""
        observation = _make_observation(self.observation_space, self.obs_shape)
        action = np.zeros(self.action_dim, self._maybe_cast_dtype(self.action_space.dtype))
        numbers = {key: np.zeros((), np.float32) for key in ("rewards", "dones", "timeouts")}
        return {"observations": observation, "next_observations": observation, "actions": action, **numbers}

    def add(
        self,
        obs: np.ndarray | Mapping[str, np.ndarray],
        next_obs: np.ndarray | Mapping[str, np.ndarray],
        action: np.ndarray,
        reward: np.ndarray,
        done: np.ndarray,
        infos: list[dict[str, Any]],
    ) -> None:
        """Adds one step of every environment; the rows are on their way soon after it returns.

        Raises:
            ClosedError: The buffer was closed. The step was not taken.
            ValueError: NumPy cannot broadcast a part of the step to its shape. The step was not taken.
            TDServeError: Rows of this or an earlier step could not be stored, as raised by ``ReplayHandle.extend``.
        """
        self._check_open()
        has_timeouts = self.handle_timeout_termination
        timeouts = np.array([has_timeouts and info.get("TimeLimit.truncated", False) for info in infos])
        self._waiting.add(
            {
                "observations": obs,
                "next_observations": next_obs,
                "actions": np.reshape(action, (self.n_envs, self.action_dim)),
                "rewards": reward,
                "dones": done,
                "timeouts": timeouts,
            }
        )
        if self._waiting.is_due:
            self._send()
        self.pos = (self.pos + 1) % self.buffer_size
        self.full |= self.pos == 0

    def _check_open(self) -> None:
        if self._client.is_closed:
            raise ClosedError(what=f"the buffer on table {self._name!r}")

    def _send(self) -> None:
        """Sends the steps that wait."""
        if self._waiting.num_steps:
            self._num_stored = min(self._num_stored + self._waiting.num_rows, self._capacity)
            self._under_way.append(self._table.extend(self._waiting.take(), return_early=True))
            self._ahead.drop()  # the rows that leave are drawn from the table now
        while self._under_way and (len(self._under_way) > _MAX_UNDER_WAY or self._under_way[0].done()):
            self._under_way.popleft().result()

    def flush(self, timeout_s: float | None = None) -> None:
        """Waits until all rows that were added are stored.

        Args:
            timeout_s: For each extend; None is the client's default.

        Raises:
            TDServeError: As raised by ``add``.
            TimeoutError: Rows were not stored in time; they are still on their way.
        """
        self._send()
        self._settle(timeout_s)

    def _settle(self, timeout_s: float | None = None) -> None:
        """Waits for what was sent."""
        while self._under_way:
            self._under_way.popleft().result(timeout_s)

    def size(self) -> int:
        """Returns the number of steps of ``n_envs`` rows in the table, also those that others added."""
        self.flush()
        return self._table.measure_length() // self.n_envs

    def reset(self) -> None:
        """Removes all rows, also those of other processes."""
        self.flush()
        self._table.clear()
        self._num_stored = 0
        self._ahead.drop()
        super().reset()

    def sample(self, batch_size: int, env: Any = None) -> Any:
        """Draws rows; as ``ReplayBuffer.sample``, or ``DictReplayBuffer.sample`` for dict observations.

        Raises:
            ClosedError: The buffer was closed.
            WrongStateError: There are no rows, and no limiter was chosen for which the sample would wait.
            TDServeError: As raised by ``ReplayHandle.sample``, or by ``add``.
        """
        self._check_open()
        batch = self._draw(batch_size) if self._draws_waiting else self._draw_stored(batch_size)
        observations = self._to_observations(batch["observations"], env)
        actions = self.to_torch(batch["actions"], copy=False)
        next_observations = self._to_observations(batch["next_observations"], env)
        dones = self.to_torch((batch["dones"] * (1 - batch["timeouts"])).reshape(-1, 1), copy=False)
        rewards = self.to_torch(self._normalize_reward(batch["rewards"].reshape(-1, 1), env), copy=False)
        kind = DictReplayBufferSamples if isinstance(observations, dict) else ReplayBufferSamples
        return kind(observations, actions, next_observations, dones, rewards)

    def _draw_stored(self, num_rows: int) -> Any:
        """Draws rows of the table, once all are there."""
        self.flush()
        if not (self._waits or self._table.counts().rows or len(self._table)):
            raise _make_empty_error(self._table)
        return self._table.sample(num_rows, numpy=True)

    def _draw(self, num_rows: int) -> Any:
        """Draws rows of the table and rows that wait to be sent, each with the same probability."""
        if self._waiting.is_due:
            self._send()
        self._settle()
        if not self._num_stored or time.monotonic() - self._looked_s > _LOOK_AGAIN_S:
            self._num_stored, self._looked_s = len(self._table), time.monotonic()
        num_waiting = self._waiting.num_rows
        if not num_waiting + self._num_stored:
            raise _make_empty_error(self._table)
        share = num_waiting / (num_waiting + self._num_stored)
        num_drawn = int(np.random.binomial(num_rows, share)) if num_waiting else 0
        drawn = self._waiting.draw(num_drawn) if num_drawn else {}
        if drawn and num_drawn == num_rows:
            return drawn
        try:
            stored = self._ahead.take(num_rows - num_drawn, num_rows)
        except WrongStateError:  # others have removed all rows since the last look
            self._num_stored = 0
            return self._draw(num_rows)
        return _concatenate_drawn(stored, drawn) if drawn else stored

    def _to_observations(self, stored: Any, env: Any) -> Any:
        found: Any = self._normalize_obs(stored, env)
        if isinstance(found, dict):
            return {key: self.to_torch(array, copy=False) for key, array in found.items()}
        return self.to_torch(found, copy=False)

    def close(self) -> None:
        """Stores what was added, and closes the connection. Idempotent. Errors as in ``add``; it is open then."""
        self.flush()
        self._client.close()

    def _begin_in_child(self) -> None:
        """Forgets, in a forked child, the steps that the parent stores, and what is drawn there too."""
        if self._waiting.num_steps:
            self._waiting.take()
        self._under_way.clear()
        self._ahead.drop()

    def __getstate__(self) -> dict[str, Any]:
        self.flush()
        left_out = ("_client", "_table", "_under_way", "_waiting", "_ahead")
        return {key: value for key, value in vars(self).items() if key not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._connect()


def _finish(buffer: TDServeReplayBuffer, end_s: float) -> None:
    """Stores what a buffer holds; at the exit of the process no caller can get an error."""
    with suppress(TDServeError, TimeoutError):
        buffer.flush(timeout_s=max(end_s - time.monotonic(), 0.0))


def _finish_later(pid: int, client: Client, steps: _Steps, under_way: deque[Future[Any]], table: ReplayHandle) -> None:
    """Stores, in another thread, the steps of a buffer that is gone, and closes its client; for finalizers. In a forked
    child of its process it stores what was added there, and leaves the client to the parent."""
    if os.getpid() != pid:
        if steps.num_steps or under_way:
            run_from_finalizer(partial(_store, steps, under_way, table))
        return
    close = Thread(target=client.close, name="tdserve-close-buffer", daemon=True)
    with suppress(TDServeError):  # the client was closed
        client.run_later(partial(_store, steps, under_way, table)).add_done_callback(lambda _: close.start())


def _store(waiting: _Steps, under_way: deque[Future[Any]], table: ReplayHandle) -> None:
    if waiting.num_steps:
        under_way.append(table.extend(waiting.take(), return_early=True))
    while under_way:
        with suppress(TDServeError):  # no caller can get it
            under_way.popleft().result()


_BUFFERS: ExitFlush[TDServeReplayBuffer] = ExitFlush(_finish, begin_in_child=TDServeReplayBuffer._begin_in_child)


class _Steps:
    """Steps that wait to be sent together.

    Args:
        row: One row, as nested arrays.
        n_envs: Rows of a step.
        max_rows: Most rows that wait; one step may always wait.
    """

    def __init__(self, row: Mapping[str, Any], n_envs: int, *, max_rows: int) -> None:
        self._row = row
        self._n_envs = n_envs
        step_nbytes = max(sum(map(_count_bytes, row.values())) * n_envs, 1)
        self._max_steps = max(min(_MAX_WAITING_NBYTES // step_nbytes, max_rows // n_envs, _MAX_WAITING), 1)
        self.num_steps = 0
        self._began_s = 0.0
        self._arrays: dict[str, Any] = {}

    def add(self, step: Mapping[str, Any]) -> None:
        """Adds a step."""
        if not self.num_steps:
            self._began_s = time.monotonic()
            self._arrays = _make_arrays(self._row, self._max_steps, self._n_envs)
        _put(self._arrays, step, self.num_steps)
        self.num_steps += 1

    @property
    def is_due(self) -> bool:
        """Whether steps wait, and no other should be waited for."""
        is_full = self.num_steps == self._max_steps
        return is_full or (self.num_steps > 0 and time.monotonic() - self._began_s > MAX_WAITING_S)

    @property
    def num_rows(self) -> int:
        """Number of rows that wait."""
        return self.num_steps * self._n_envs

    def draw(self, num_rows: int) -> dict[str, Any]:
        """Draws rows that wait, with repetition; returns nested arrays, which are copies."""
        return _choose(self._arrays, *divmod(np.random.randint(self.num_rows, size=num_rows), self._n_envs))

    def take(self) -> TensorDict:
        """Returns the rows of all steps, and begins with none."""
        taken = _make_tensordict(self._arrays, self.num_steps, [self.num_steps * self._n_envs])
        self.num_steps, self._arrays = 0, {}  # what was taken may be read until it is stored
        return taken


class _RowsAhead:
    """Rows of a table that were drawn for several samples: a thousand take little longer than a hundred.

    They are good for as long as steps wait, whose rows are drawn beside them.

    Args:
        table: The table.
        row_nbytes: Size of a row.
    """

    def __init__(self, table: ReplayHandle, row_nbytes: int) -> None:
        self._table = table
        self._row_nbytes = max(row_nbytes, 1)
        self._rows: dict[str, Any] = {}
        self._num_rows = self._num_taken = 0
        self._num_samples = 0  # that were served since rows were dropped
        self._num_expected = 1
        self._until_s = 0.0

    def take(self, num_rows: int, batch_size: int) -> dict[str, Any]:
        """Returns rows that were drawn, as nested arrays.

        Args:
            num_rows: Their number.
            batch_size: Rows of a whole sample.
        """
        if self._num_taken + num_rows > self._num_rows or time.monotonic() > self._until_s:
            self._draw(max(batch_size, 1))
        self._num_samples += 1
        start, self._num_taken = self._num_taken, self._num_taken + num_rows
        return _slice(self._rows, start, self._num_taken)

    def _sample(self, num_rows: int) -> dict[str, Any]:
        """Returns rows of the table. Raises WrongStateError if there is none: a sample would wait for one."""
        try:
            rows: dict[str, Any] = self._table.sample(num_rows, timeout_s=_LOOK_AGAIN_S, numpy=True)
        except TDServeError as error:  # also if the server is not there, or the table is at rest
            if not is_passing(error):
                raise
            if not len(self._table):
                raise _make_empty_error(self._table) from None
            rows = self._table.sample(num_rows, numpy=True)
        return rows

    def drop(self) -> None:
        """Forgets the rows. Next time as many samples are drawn as were served since the last time."""
        self._num_expected, self._num_samples = max(self._num_samples, 1), 0
        self._num_rows, self._rows = 0, {}

    def _draw(self, batch_size: int) -> None:
        if time.monotonic() > self._until_s:
            self.drop()
        most = min(_MAX_AHEAD, max(_MAX_AHEAD_NBYTES // (self._row_nbytes * batch_size), 1))
        num_rows = batch_size * min(max(self._num_expected, self._num_samples), most)
        self._rows, self._num_rows, self._num_taken = self._sample(num_rows), num_rows, 0
        self._until_s = time.monotonic() + MAX_WAITING_S


def _make_empty_error(table: ReplayHandle) -> WrongStateError:
    return WrongStateError(state=f"the table {table.name!r} has no rows", event="sample()")


def _slice(rows: Mapping[str, Any], start: int, stop: int) -> dict[str, Any]:
    return {
        key: _slice(part, start, stop) if isinstance(part, dict) else part[start:stop] for key, part in rows.items()
    }


def _count_bytes(content: Any) -> int:
    return sum(map(_count_bytes, content.values())) if isinstance(content, dict) else int(content.nbytes)


def _make_arrays(row: Mapping[str, Any], max_steps: int, n_envs: int) -> dict[str, Any]:
    """Makes arrays for steps of rows, ``[max_steps, n_envs, ...]``."""
    return {
        key: _make_arrays(part, max_steps, n_envs)
        if isinstance(part, dict)
        else np.empty((max_steps, n_envs, *part.shape), part.dtype)
        for key, part in row.items()
    }


def _put(arrays: Mapping[str, Any], step: Mapping[str, Any], number: int) -> None:
    """Copies a step to its place."""
    for key, array in arrays.items():
        if isinstance(array, dict):
            _put(array, step[key], number)
        else:
            place, content = array[number], step[key]
            is_flat = place.shape[-1:] == (1,) and np.shape(content) == place.shape[:-1]  # as for a discrete space
            place[...] = np.reshape(content, place.shape) if is_flat else content


def _choose(arrays: Mapping[str, Any], steps: Any, envs: Any) -> dict[str, Any]:
    """Returns copies of rows, by their steps and environments, as nested arrays."""
    return {
        key: _choose(part, steps, envs) if isinstance(part, dict) else part[steps, envs] for key, part in arrays.items()
    }


def _concatenate_drawn(stored: Mapping[str, Any], drawn: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _concatenate_drawn(stored[key], part) if isinstance(part, dict) else np.concatenate((stored[key], part))
        for key, part in drawn.items()
    }


def _make_tensordict(arrays: Mapping[str, Any], num_steps: int, batch_size: list[int]) -> TensorDict:
    """Makes a tensordict that shares the memory of the first steps; ``from_dict`` takes eight times as long."""
    tensors = {
        key: _make_tensordict(part, num_steps, batch_size)
        if isinstance(part, dict)
        else torch.from_numpy(part[:num_steps].reshape(*batch_size, *part.shape[2:]))
        for key, part in arrays.items()
    }
    return TensorDict(tensors, batch_size)


def _make_observation(space: spaces.Space[Any], shape: Any) -> Any:
    """Makes an observation of zeros, as it is stored."""
    if isinstance(space, spaces.Dict):
        return {key: np.zeros(shape[key], each.dtype) for key, each in space.items()}
    return np.zeros(shape, space.dtype)
