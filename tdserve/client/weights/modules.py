"""An ``nn.Module`` as the place where a version of weights goes."""

from __future__ import annotations

from collections.abc import Mapping

from tensordict import TensorDict
from torch import nn

from tdserve.base.errors import SpecMismatchError
from tdserve.client.content.leaves import Leaves
from tdserve.client.transfers.read import Content, Destination
from tdserve.messages.layout import Layout
from tdserve.structure.tree import Entry, Path, Spec, TensorLeaf, describe
from tdserve.structure.version_subset import FLOATING


class ModuleDestination(Destination):
    """Fills parameters and buffers in place: they stay the same objects, and nothing else of them changes.

    Floating-point numbers are converted to the dtype of the parameter, as ``load_state_dict`` does.

    Args:
        module: With every parameter and buffer that comes, and no other.
        store: Name, for errors.
    """

    def __init__(self, module: nn.Module, *, store: str) -> None:
        super().__init__(TensorDict.from_module(module), store=store)
        self._is_converted = False

    def _check(self, spec: Spec) -> None:
        """Names the parameter or buffer as the module does."""
        memo = self._captured.memo
        fits: tuple[Spec, bool] | None = memo.get("fits a module")
        if fits is None or fits[0] is not spec:  # to look at thousands of parameters takes milliseconds
            self._compare(spec)
            fits = memo["fits a module"] = spec, self._is_converted
        self._is_converted = fits[1]

    def _compare(self, spec: Spec) -> None:
        came: Mapping[Path, Entry] = dict((*spec.tensors, *spec.values))
        mine: Mapping[Path, Entry] = dict(self._captured.spec.tensors)
        self._is_converted = False
        for path in sorted(came.keys() | mine.keys()):
            theirs, own = came.get(path), mine.get(path)
            if theirs != own and _is_convertible(theirs, own):
                self._is_converted = True
            elif theirs != own:
                raise SpecMismatchError(
                    store=self._store,
                    key=".".join(path),
                    expected="no such parameter" if theirs is None else describe(theirs),
                    actual="no such parameter" if own is None else describe(own),
                )

    def places(self, layout: Layout) -> Leaves | None:
        """The parameters and buffers in the layout's order; None when they cannot be received into."""
        return None if self._is_converted else super().places(layout)

    def finish(self, content: Content, *, was_direct: bool) -> None:
        """Copies what was not received in place, on whatever device it goes to."""
        if not was_direct:
            for path, tensor in self._captured.tensors.items():
                tensor.data.copy_(content.leaves[path])  # as memory, which autograd does not count as a change


def _is_convertible(theirs: Entry | None, own: Entry | None) -> bool:
    if not isinstance(theirs, TensorLeaf) or not isinstance(own, TensorLeaf):
        return False
    return theirs.shape == own.shape and {theirs.dtype, own.dtype} <= set(FLOATING)
