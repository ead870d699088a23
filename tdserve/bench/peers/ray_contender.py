"""Ray: TorchRL's replay buffer in an actor, and weights in the object store."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from tensordict import TensorDict, TensorDictBase

from tdserve.bench.peers.contender import Contender
from tdserve.bench.peers.torchrl_contender import HeldObjects, TorchRLOverRPC


class RayActor(Contender):
    """One node of Ray on this machine."""

    label = "Ray"

    def __init__(self) -> None:
        self._has_begun = False

    @classmethod
    def find_missing(cls) -> str:
        missing = [] if importlib.util.find_spec("ray") else ["pip install ray"]
        return "; ".join(filter(None, [*missing, TorchRLOverRPC.find_missing()]))

    def open(self, folder: Path) -> None:
        import ray

        self._folder = folder
        self._ray: Any = ray
        ray.init(num_cpus=2, include_dashboard=False, logging_level="warning", log_to_driver=False)
        self._has_begun = True
        self._actor: Any = ray.remote(HeldObjects).options(num_cpus=1).remote()
        self._ray.get(self._actor.put.remote("", None))

    def close(self) -> None:
        if self._has_begun:
            self._ray.shutdown()

    def create(self, name: str, row: TensorDict, capacity: int) -> None:
        self._ask(self._actor.create, name, capacity, str(self._folder / name))

    def extend(self, name: str, rows: TensorDict) -> None:
        self._ask(self._actor.extend, name, rows)

    def sample(self, name: str, num_rows: int) -> TensorDictBase:
        found: TensorDictBase = self._ask(self._actor.sample, name, num_rows)
        return found

    def put(self, name: str, value: TensorDict) -> None:
        reference = self._ray.put(value)
        self._ask(self._actor.put, name, [reference])  # in a list, so that the actor keeps the reference itself

    def get(self, name: str) -> TensorDictBase:
        (reference,) = self._ask(self._actor.get, name)
        found: TensorDictBase = self._ray.get(reference)
        return found

    def _ask(self, method: Any, *arguments: object) -> Any:
        return self._ray.get(method.remote(*arguments))
