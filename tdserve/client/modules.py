"""An ``nn.Module`` as the place where a version of weights goes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from tensordict import TensorDict
from torch import nn

from tdserve.client.reading import Content, Destination
from tdserve.errors import SpecMismatchError
from tdserve.spec.tree import Entry, Path, Spec, describe


class ModuleDestination(Destination):
    """Fills parameters and buffers in place: they stay the same objects, and nothing else of them changes.

    Args:
        module: With every parameter and buffer that comes, and no other.
        store: Name, for errors.
    """

    def __init__(self, module: nn.Module, *, store: str) -> None:
        super().__init__(TensorDict.from_module(module).data, store=store)

    def _check(self, spec: Spec) -> None:
        """Names the parameter or buffer as the module does."""
        came: Mapping[Path, Entry] = dict((*spec.tensors, *spec.values))
        mine: Mapping[Path, Entry] = dict(self._captured.spec.tensors)
        for path in sorted(came.keys() | mine.keys()):
            theirs, own = came.get(path), mine.get(path)
            if theirs != own:
                raise SpecMismatchError(
                    store=self._store,
                    key=".".join(path),
                    expected="no such parameter" if theirs is None else describe(theirs),
                    actual="no such parameter" if own is None else describe(own),
                )

    def finish(self, content: Content, *, was_direct: bool) -> None:
        """Copies what was not received in place, on whatever device it goes to."""
        if not was_direct:
            with torch.no_grad():
                for path, tensor in self._captured.tensors.items():
                    tensor.copy_(content.leaves[path])
