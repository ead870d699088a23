"""N-step transitions, made of one-step ones by the writer: nothing is sent twice, and nothing is unpickled."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tdserve.base.arguments import to_key_path
from tdserve.base.errors import InvalidRequestError
from tdserve.base.integers import check_integer
from tdserve.structure.captures.rows import copy_leaves
from tdserve.structure.trees.tree import Path, Spec, TensorLeaf, quote

Key = str | tuple[str, ...]

_ENDS = ("done", "terminated", "truncated")
_FLOATS = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True)
class NStep:
    """Conversion of the one-step transitions of a trajectory into n-step ones, row for row.

    With ``m = min(n, steps to the trajectory's end)``, row ``t`` gets

    * the reward ``sum(gamma**k * reward[t + k] for k in range(m))``, summed in float64, in this order;
    * from row ``t + m - 1``: everything under ``next`` (except the reward, if it is there) and the done flags.

    Everything else stays as it is, and the rows keep their keys. If the rows have the following keys, these are written
    too, named as by torchrl's MultiStep: at the root ``"steps_to_next_obs"`` (m, not of 8 bits) and ``"gamma"``
    (``gamma**m``, floating point: the factor for the value of the next observation), and beside the reward
    ``"original_reward"``, of its form.

    A trajectory ends where a done flag is set, and at ``writer.end_trajectory()``. Its last n-1 rows have shorter
    horizons, and so have the last rows of an open trajectory when the writer is closed.

    Args:
        n: Steps, at least 1. With 1, rewards and next entries stay as they are.
        gamma: Discount, 0 to 1.
        reward_key: By default ``("next", "reward")`` if the rows have it, else ``"reward"``. Any shape, floating point.
        done_key: One element. By default all of ``done``, ``terminated`` and ``truncated`` under ``next``, or if all
            are missing, at the root; any of them ends the trajectory. If given, only this one does; those of the three
            beside it move along.
        next_key: The part that moves: a node or a leaf; by default ``"next"``.

    Raises:
        InvalidRequestError: ``n`` or ``gamma`` is out of range.
    """

    n: int
    gamma: float
    reward_key: Key | None = None
    done_key: Key | None = None
    next_key: Key | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", check_integer("n", self.n, 1))
        if isinstance(self.gamma, bool) or not isinstance(self.gamma, (int, float)) or not 0 <= self.gamma <= 1:
            raise InvalidRequestError(argument="gamma", reason=f"{self.gamma!r} is not a number from 0 to 1")

    def make_window(self, spec: Spec) -> NStepWindow:
        """Makes the window that converts the rows of one stream.

        Args:
            spec: Structure of one row.

        Raises:
            InvalidRequestError: The rows lack a key, or its entry is unsuitable; the error names the argument for
                another key.
        """
        tensors = dict(spec.tensors)
        following = to_key_path("next_key", self.next_key) or ("next",)
        if not any(path[: len(following)] == following for path in tensors):
            raise _make_nstep_error("next_key", f"the rows have no tensors at {quote(following)}")
        reward = to_key_path("reward_key", self.reward_key) or _find_first(
            tensors, ((*following, "reward"), ("reward",))
        )
        _check_reward(tensors.get(reward), reward)
        done = to_key_path("done_key", self.done_key)
        ends = (done,) if done else _find_default_ends(tensors, following)
        for path in ends:
            _check_end(tensors.get(path), path)
        original = (*reward[:-1], "original_reward")
        beside = {(*path[:-1], name) for path in ends for name in _ENDS} | set(ends)

        def is_moving(path: Path) -> bool:
            return path not in (reward, original) and (path[: len(following)] == following or path in beside)

        number = {path: number for number, path in enumerate(tensors)}
        return NStepWindow(
            self.n,
            float(self.gamma),
            _Places(
                reward=number[reward],
                ends=tuple(number[path] for path in ends),
                moving=tuple(number[path] for path in tensors if is_moving(path)),
                moving_values=tuple(place for place, (path, _) in enumerate(spec.values) if is_moving(path)),
                original=number.get(original) if tensors.get(original) == tensors[reward] else None,
                steps=_find_number(tensors, ("steps_to_next_obs",), (*_FLOATS, "int16", "int32", "int64")),
                gamma=_find_number(tensors, ("gamma",), _FLOATS),
            ),
            is_scalar=math.prod(tensors[reward].shape) == 1,
        )


class _Places(NamedTuple):
    """Positions in a row of the leaves that change."""

    reward: int
    ends: tuple[int, ...]
    moving: tuple[int, ...]
    moving_values: tuple[int, ...]
    original: int | None
    steps: int | None
    gamma: int | None


class _Open:
    """A row whose horizon is not complete."""

    def __init__(self, leaves: list[torch.Tensor], values: list[Any], reward: Any) -> None:
        self.leaves = leaves
        self.values = values
        self.sum = reward


class NStepWindow:
    """The last rows of a trajectory, whose horizon is not complete. Threads: not safe.

    Rows are changed in place, once, when they are complete. Until then they must not be read, moved or freed.

    Attributes:
        n: Steps.
    """

    def __init__(self, n: int, gamma: float, places: _Places, *, is_scalar: bool) -> None:
        self.n = n
        self._weights = [gamma**step for step in range(n + 1)]
        self._places = places
        self._is_scalar = is_scalar
        self._open: deque[_Open] = deque()

    @property
    def num_open(self) -> int:
        """Rows whose horizon is not complete; less than n."""
        return len(self._open)

    def push(self, leaves: list[torch.Tensor], values: list[Any]) -> tuple[int, bool]:
        """Adds the next row of the trajectory.

        Args:
            leaves: Its tensors, in the order of ``spec.tensors``.
            values: Its non-tensor leaves, in the order of ``spec.values``.

        Returns:
            How many of the oldest rows are complete now, and whether the row ends the trajectory.
        """
        reward: Any = leaves[self._places.reward]
        reward = reward.item() if self._is_scalar else reward.double()
        rows = self._open
        for row, weight in zip(rows, self._weights[len(rows) : 0 : -1], strict=True):
            row.sum = row.sum + weight * reward
        rows.append(_Open(leaves, values, reward))
        if any(leaves[place].item() for place in self._places.ends):
            return self.end(), True
        if len(rows) < self.n:
            return 0, False
        self._complete(rows[0], rows[-1], self.n)
        rows.popleft()
        return 1, False

    def end(self) -> int:
        """Ends the trajectory with the last row: completes all rows with what there is.

        Returns:
            The number of rows that this completes.
        """
        rows = self._open
        num_rows = len(rows)
        for number, row in enumerate(rows):
            self._complete(row, rows[-1], num_rows - number)
        rows.clear()
        return num_rows

    def _complete(self, row: _Open, last: _Open, num_steps: int) -> None:
        places, leaves = self._places, row.leaves
        if places.steps is not None:
            leaves[places.steps].copy_(torch.tensor(num_steps, device="cpu"))
        if places.gamma is not None:
            leaves[places.gamma].copy_(_to_exact(self._weights[num_steps]))
        if places.original is not None:
            leaves[places.original].copy_(leaves[places.reward])
        if num_steps == 1:
            return
        # Not fill_, which refuses sums that a narrow type represents as infinity.
        leaves[places.reward].copy_(_to_exact(row.sum) if self._is_scalar else row.sum)
        copy_leaves([leaves[place] for place in places.moving], [last.leaves[place] for place in places.moving])
        for place in places.moving_values:
            row.values[place] = last.values[place]


def _to_exact(number: float) -> torch.Tensor:
    return torch.tensor(number, dtype=torch.float64, device="cpu")


def _find_first(tensors: dict[Path, TensorLeaf], paths: tuple[Path, ...]) -> Path:
    return next((path for path in paths if path in tensors), paths[-1])


def _find_number(tensors: dict[Path, TensorLeaf], path: Path, dtypes: tuple[str, ...]) -> int | None:
    return list(tensors).index(path) if path in tensors and tensors[path].dtype in dtypes else None


def _find_default_ends(tensors: dict[Path, TensorLeaf], following: Path) -> tuple[Path, ...]:
    for above in (following, ()):
        found = tuple((*above, name) for name in _ENDS if (*above, name) in tensors)
        if found:
            return found
    return ()


def _check_reward(leaf: TensorLeaf | None, path: Path) -> None:
    if leaf is None:
        raise _make_nstep_error("reward_key", f"the rows have no tensor at {quote(path)}")
    if leaf.dtype not in _FLOATS:
        raise _make_nstep_error(
            "reward_key", f"the rewards at {quote(path)} are {leaf.dtype}, which rounds discounted sums"
        )


def _check_end(leaf: TensorLeaf | None, path: Path) -> None:
    if leaf is None:
        raise _make_nstep_error("done_key", f"the rows have no tensor at {quote(path)}")
    if math.prod(leaf.shape) != 1:
        raise _make_nstep_error("done_key", f"{quote(path)} has {math.prod(leaf.shape)} elements, and a row one end")


def _make_nstep_error(argument: str, reason: str) -> InvalidRequestError:
    return InvalidRequestError(argument="n_step", reason=f"{reason}; pass {argument}= to NStep")
