"""A module that is filled with a version of weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn

from tdserve.base.errors import NotSupportedError, SpecMismatchError
from tdserve.client.content.leaves import Leaves
from tdserve.client.content.read_content import Content, Destination
from tdserve.client.weights.module_misfits import SHARDED, make_meta_error, make_misfit_error, make_sharded_error
from tdserve.messages.layout import Layout
from tdserve.structure.captures.capture import Captured, capture_module
from tdserve.structure.tensordicts.module_state import (
    find_stateful,
    join_extra_state,
    leave_out_extra_state,
    split_extra_state,
)
from tdserve.structure.tensors.plain_tensors import write_in_place
from tdserve.structure.trees.tree import Entry, Path, Spec, TensorLeaf
from tdserve.structure.trees.version_subset import FLOATING


class VersionDestination(Destination):
    """An ``out=`` that is filled with a version, without the extra state of its modules if it has none itself; what
    refuses the version of a sharded trainer names what reads it."""

    def _check(self, spec: Spec) -> None:
        if (SHARDED, "index") in spec.values_by_path and (SHARDED, "index") not in self._captured.spec.values_by_path:
            raise make_sharded_error("an out= without it", store=self._store)
        super()._check(self._leave_out(spec))

    def find_places(self, layout: Layout) -> Leaves | None:
        """Returns the leaves in the layout's order; None if they cannot be received into, or are not all of it."""
        is_whole = self._fitting is not None and self._leave_out(self._fitting) is self._fitting
        return super().find_places(layout) if is_whole else None

    def finish(self, content: Content, *, was_direct: bool) -> None:
        """Copies what was not received in place, and belongs here."""
        super().finish(replace(content, spec=self._leave_out(content.spec)), was_direct=was_direct)

    def _leave_out(self, spec: Spec) -> Spec:
        return leave_out_extra_state(spec, self._captured.spec)


class ModuleDestination(Destination):
    """Parameters and buffers of a module, filled in place: they stay the same objects, and only their content changes.

    Floating-point numbers are converted to the dtype of the parameter, as ``load_state_dict`` does. Modules that have
    extra state are given theirs last, if the version has it.

    Args:
        module: Has every parameter, buffer and extra state of the version, and no other parameters and buffers.
        store: Name, for errors.
    """

    def __init__(self, module: nn.Module, *, store: str) -> None:
        super().__init__(module, store=store)
        self._is_converted = False
        self._stateful = find_stateful(module)
        self._given: dict[Path, nn.Module] = {}

    def _capture(self, like: Spec | None = None) -> Captured:
        try:
            return capture_module(self.out, store=self._store, is_destination=True)
        except NotSupportedError as error:
            raise make_meta_error(self.out, store=self._store) or error from None

    def _check(self, spec: Spec) -> None:
        """Raises an error that names the parameter or buffer as the module does."""
        memo = self._captured.memo
        fits: tuple[Spec, bool] | None = memo.get("fits a module")
        if fits is None or fits[0] is not spec or self._stateful:  # checking thousands of parameters takes milliseconds
            self._compare(spec)
            fits = memo["fits a module"] = spec, self._is_converted
        self._is_converted = fits[1]

    def _compare(self, spec: Spec) -> None:
        whole: Mapping[Path, Entry] = dict((*spec.tensors, *spec.values))
        states = {path: prefix for path in whole if (prefix := split_extra_state(path)) in self._stateful}
        came = {path: entry for path, entry in whole.items() if path not in states}
        mine: Mapping[Path, Entry] = dict(self._captured.spec.tensors)
        self._is_converted = False
        flat = next((path for path in came if len(path) == 1 and path not in mine and _unflatten(path) in mine), None)
        if flat is not None:
            expected = f"nested keys such as {_unflatten(flat)}, as the module itself has when it is published"
            actual = "a flat key; TensorDict(state_dict).unflatten_keys('.') nests them"
            raise SpecMismatchError(store=self._store, key=flat[0], expected=expected, actual=actual)
        for path in sorted(came.keys() | mine.keys()):
            theirs, own = came.get(path), mine.get(path)
            if theirs != own and _is_convertible(theirs, own):
                self._is_converted = True
            elif theirs != own:
                raise make_misfit_error(self.out, path, came, mine, store=self._store)
        self._given = {prefix: self._stateful[prefix] for prefix in states.values()}

    def find_places(self, layout: Layout) -> Leaves | None:
        """Returns the parameters and buffers in the layout's order; None if they cannot be received into."""
        return None if self._is_converted or self._stateful else super().find_places(layout)

    def finish(self, content: Content, *, was_direct: bool) -> None:
        """Copies what was not received in place, to whatever device it is on."""
        if was_direct:
            self.mark_changed()
            return
        with torch.no_grad():
            for path, tensor in self._captured.tensors.items():
                write_in_place(tensor, content.leaves[path])
        for prefix, module in self._given.items():
            module.set_extra_state(join_extra_state(prefix, {**content.leaves, **content.values}))


def _is_convertible(theirs: Entry | None, own: Entry | None) -> bool:
    if not isinstance(theirs, TensorLeaf) or not isinstance(own, TensorLeaf):
        return False
    return theirs.shape == own.shape and {theirs.dtype, own.dtype} <= set(FLOATING)


def _unflatten(path: Path) -> Path:
    return tuple(path[0].split("."))
