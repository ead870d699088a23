"""The result of a read, and the caller's ``out=`` for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.autograd.graph import increment_version

from tdserve.base.errors import (
    LocalProtocolError,
    SpecMismatchError,
    TDServeError,
)
from tdserve.client.content.devices import to_device
from tdserve.client.content.leaves import Leaves, make_leaves
from tdserve.client.content.padding import Pad, pad_ragged
from tdserve.client.content.received import Received
from tdserve.messages.layout import Layout
from tdserve.structure.building.build import build, fill
from tdserve.structure.captures.capture import Captured, capture
from tdserve.structure.captures.fake_tensors import META, is_blank
from tdserve.structure.tensordicts.state import restore_state
from tdserve.structure.trees.tree import Path, Spec, check_matches, show
from tdserve.v1 import control_pb2


@dataclass(frozen=True)
class Content:
    """The result of a read.

    Attributes:
        spec: Its structure.
        leaves: Its tensors by path.
        values: Its non-tensor values by path.
        version: Content version of the store.
        accepted: The server's message about it.
        received: The columns, if they were received or copied by rows.
        fault: Why its values could not be decoded, for a caller that needs the rest nevertheless.
        stored: The store's whole structure, if it differs from what the caller knew.
        is_blank: Whether the store was made of meta tensors and has never been written.
    """

    spec: Spec
    leaves: dict[Path, torch.Tensor]
    values: dict[Path, Any]
    version: int
    accepted: control_pb2.Accepted = field(default_factory=control_pb2.Accepted)
    received: Received | None = None
    fault: TDServeError | None = None
    stored: Spec | None = None
    is_blank: bool = False

    @property
    def columns(self) -> Received:
        """All received columns, including those that the service has added."""
        if self.received is None:
            raise LocalProtocolError(reason="nothing was received with these leaves")
        return self.received

    def build(self, device: torch.device | str | int | None = None, pad: Pad = None) -> Any:
        """Builds the tensordict (or tensorclass instance).

        Its leaves are views of one buffer; they are moved if a device is named. If the store is blank and no device is
        named, they are meta tensors. ``pad`` as in ``pad_ragged``.
        """
        if device is None and self.is_blank:
            device = META
        spec, leaves, values = pad_ragged(on_cpu(self.spec), self.leaves, self.values, pad)
        if device is None or not spec.has_state:
            return to_device(build(spec, leaves, values), device)
        # A parameter that is moved is no parameter any more, but the result of a computation.
        return restore_state(to_device(build(spec.without_state, leaves, values), device), spec.root)

    def with_spec(self, stored: Spec) -> Content:
        """Returns the same content for a store of this structure."""
        return self if stored.root.device != META else replace(self, is_blank=is_blank(stored, self.version))


def on_cpu(spec: Spec) -> Spec:
    """Returns the structure of content on the CPU, on whatever device its tensors were stored."""
    device = spec.root.device
    return spec.on_cpu if device is None or device == "cpu" else spec.with_device("cpu")


def drop_extra(td: Any, keys: Sequence[Path], spec: Spec) -> Any:
    """Removes what was read only because it is stored together with the given keys; no keys are all of them."""
    if not any(key[:depth] in spec.packed for key in keys for depth in range(len(key))):
        return td
    return td.select(*keys, *(("masks", *key) for key in keys), strict=False)


class Destination:
    """The caller's ``out=``.

    If its leaves are contiguous and on the CPU, they are received into directly; else copied into.

    Args:
        out: A tensordict of the same structure.
        store: Name, for errors.
    """

    def __init__(self, out: Any, *, store: str) -> None:
        self.out = out
        self._store = store
        self._captured = self._capture()
        self._fitting: Spec | None = None
        self._placed: tuple[Layout, Leaves | None] | None = None

    def _capture(self, like: Spec | None = None) -> Captured:
        return capture(self.out, store=self._store, is_destination=True, like=like)

    def check(self, spec: Spec) -> None:
        """Raises SpecMismatchError unless content of this structure fits; nothing is written."""
        if spec is self._fitting:
            return
        if spec.has_ragged or self._captured.spec.has_ragged:
            self._captured = self._capture(spec)
            self._placed = None
        self._check(spec)
        self._fitting = spec

    def _check(self, spec: Spec) -> None:
        for path in self._captured.spec.packed_nodes.keys() - spec.packed:
            actual = "a lazy stack of rows that differ, in out=; give a stack of equal rows, or read without out="
            key = show(path) if path else ""
            raise SpecMismatchError(store=self._store, key=key, expected="rows of one structure", actual=actual)
        memo = self._captured.memo
        if memo.get("fits") is not spec:  # a second check of thousands of leaves takes half a millisecond
            check_matches(spec, self._captured.spec, store=self._store, is_destination=True)
            memo["fits"] = spec

    def find_places(self, layout: Layout) -> Leaves | None:
        """Returns the leaves in the layout's order; None if they cannot be received into."""
        if self._captured.spec.has_ragged:
            return None  # the capture of a lazy stack has copies
        if self._placed is None or self._placed[0] is not layout:
            leaves = make_leaves(self._captured, layout)
            self._placed = layout, None if leaves.contents is None else leaves
        return self._placed[1]

    def match_places(self, spec: Spec, layout: Layout) -> tuple[Leaves | None, TDServeError | None]:
        """Returns the leaves as ``find_places`` does, or the error that explains why the content does not fit.

        The caller must receive the content from the channel before it raises that error.
        """
        try:
            self.check(spec)
            return self.find_places(layout), None
        except TDServeError as error:
            return None, error

    def mark_changed(self) -> None:
        """Tells autograd that content was received in place: a graph that needs what was there before fails then, as
        after any other change in place."""
        increment_version(list(self._captured.tensors.values()))

    def finish(self, content: Content, *, was_direct: bool) -> None:
        """Copies what was not received in place."""
        if was_direct:
            self.mark_changed()
        if not was_direct or content.values:
            fill(self.out, content.spec, content.leaves, content.values)
