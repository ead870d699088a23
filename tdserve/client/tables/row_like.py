"""The row that an environment, a collector or a spec of TorchRL is going to produce, before it has produced one.

They are known by their methods, as TorchRL 0.14 has them, so that this needs no TorchRL.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import is_tensor_collection

from tdserve.base.errors import InvalidRequestError

_TRAJECTORY_KEY = ("collector", "traj_ids")


def make_row_like(source: Any, policy: Any = None) -> Any:
    """Returns a row of zeros, or of the policy's first answer to zeros; see ``Client.row_like``."""
    if is_tensor_collection(source):
        return _take_first(source)
    if hasattr(source, "fake_tensordict"):
        return _make_environment_row(source, policy)
    if hasattr(source, "zero"):
        return _take_first(source.zero())
    policy = getattr(source, "policy", None) if policy is None else policy
    if hasattr(getattr(source, "env", None), "fake_tensordict"):
        row = _make_environment_row(source.env, policy)
    elif hasattr(source, "create_env_fn"):
        row = _make_new_environment_row(source.create_env_fn, policy)
    else:
        reason = f"{type(source).__name__} is no environment, collector or spec of TorchRL, and no tensordict"
        if hasattr(source, "action_space"):
            reason += "; torchrl.envs.GymWrapper(environment) makes one of Gymnasium's an environment of TorchRL"
        raise InvalidRequestError(argument="source", reason=reason)
    if getattr(source, "track_traj_ids", True):
        row[_TRAJECTORY_KEY] = torch.zeros((), dtype=torch.int64)
    return row


def _make_environment_row(environment: Any, policy: Any) -> Any:
    rows = environment.fake_tensordict()
    if policy is not None:
        with torch.no_grad():
            made = policy(rows.clone())
        rows = made if is_tensor_collection(made) else rows
    return _take_first(rows)


def _make_new_environment_row(create_env_fn: Any, policy: Any) -> Any:
    """Makes an environment of a collector that has its own in other processes, for as long as it is looked at."""
    create = create_env_fn[0] if isinstance(create_env_fn, (list, tuple)) else create_env_fn
    environment = create()
    try:
        return _make_environment_row(environment, policy)
    finally:
        environment.close(raise_if_closed=False)


def _take_first(rows: Any) -> Any:
    row = rows[(0,) * rows.batch_dims] if rows.batch_dims else rows
    return row.detach().cpu().clone()
