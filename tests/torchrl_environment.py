"""An environment of TorchRL for tests with real collectors. Its observations tell which process made a row, and how."""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it deprecates its own classes when it is imported
    from torchrl.data import Composite, Unbounded
    from torchrl.envs import EnvBase


class TellingEnvironment(EnvBase):  # type: ignore[misc, unused-ignore]  # torchrl has no types
    """Shows the action that was taken last, the number of its steps, and the process in which it runs; never ends."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_spec = Composite(
            observation=Unbounded((1,)), step=Unbounded((1,)), process=Unbounded((1,), dtype=torch.int64)
        )
        self.action_spec = Unbounded((1,))
        self.reward_spec = Unbounded((1,))

    def _reset(self, td: TensorDictBase | None, **_: Any) -> TensorDictBase:
        seen = {"observation": torch.zeros(1), "step": torch.zeros(1), "process": torch.tensor([os.getpid()])}
        return TensorDict(seen, [])

    def _step(self, td: TensorDictBase) -> TensorDictBase:
        done = torch.zeros(1, dtype=torch.bool)
        seen = {"observation": td["action"], "step": td["step"] + 1, "process": torch.tensor([os.getpid()])}
        return TensorDict({**seen, "reward": td["action"], "done": done, "terminated": done}, [])

    def _set_seed(self, seed: int | None) -> None:
        pass
