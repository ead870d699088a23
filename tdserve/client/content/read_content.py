"""What reads bring, and the caller's place for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tdserve.base.errors import (
    LocalProtocolError,
    TDServeError,
)
from tdserve.client.content.columns import Received
from tdserve.client.content.devices import to_device
from tdserve.client.content.leaves import Leaves, leaves_of
from tdserve.client.content.padding import Pad, pad_ragged
from tdserve.messages.layout import Layout
from tdserve.structure.build import build, fill
from tdserve.structure.capture import capture
from tdserve.structure.fake_tensors import META, is_blank
from tdserve.structure.state import restore_state
from tdserve.structure.tree import Path, Spec, check_matches
from tdserve.v1 import control_pb2


@dataclass(frozen=True)
class Content:
    """What a read brought.

    Attributes:
        spec: Its structure.
        leaves: Its tensors by path.
        values: Its non-tensor values by path.
        version: Content version of the store.
        accepted: What the server said of it.
        received: The columns that came, where it was received or copied by rows.
        fault: Why its values could not be decoded, for a caller who needs the rest nevertheless.
        stored: The store's whole structure, where it is another than the caller knew.
        is_blank: Whether the store was made of meta tensors, and nobody has written it yet.
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
        """All that was received, what the service has added too."""
        if self.received is None:
            raise LocalProtocolError(reason="nothing was received with these leaves")
        return self.received

    def build(self, device: torch.device | str | int | None = None, pad: Pad = None) -> Any:
        """The tensordict (or tensorclass instance); its leaves are views of one buffer, moved if a device is named;
        meta tensors of a store that holds nothing yet, if none is.

        ``pad`` as of ``pad_ragged``.
        """
        if device is None and self.is_blank:
            device = META
        spec, leaves, values = pad_ragged(on_cpu(self.spec), self.leaves, self.values, pad)
        if device is None or not spec.has_state:
            return to_device(build(spec, leaves, values), device)
        # a parameter that is moved is no parameter, but the result of a computation
        return restore_state(to_device(build(spec.without_state, leaves, values), device), spec.root)

    def of(self, stored: Spec) -> Content:
        """The same content, of a store of this structure."""
        return self if stored.root.device != META else replace(self, is_blank=is_blank(stored, self.version))


def on_cpu(spec: Spec) -> Spec:
    """The structure of content that lies on the CPU, wherever its tensors were when they were stored."""
    device = spec.root.device
    return spec.on_cpu if device is None or device == "cpu" else spec.with_device("cpu")


def only(td: Any, keys: Sequence[Path], spec: Spec) -> Any:
    """What was read of some keys, without what came along because it is stored with them; no keys are all of them."""
    if not any(key[:depth] in spec.packed for key in keys for depth in range(len(key))):
        return td
    return td.select(*keys, *(("masks", *key) for key in keys), strict=False)


class Destination:
    """The caller's ``out=``: received into directly where its leaves are contiguous and on the CPU, else copied into.

    Args:
        out: A tensordict of the same structure.
        store: Name, for errors.
    """

    def __init__(self, out: Any, *, store: str) -> None:
        self.out = out
        self._store = store
        self._captured = capture(out, store=store, is_destination=True)
        self._fitting: Spec | None = None
        self._placed: tuple[Layout, Leaves | None] | None = None

    def check(self, spec: Spec) -> None:
        """Raises SpecMismatchError unless content of this structure fits; nothing was written."""
        if spec is self._fitting:
            return
        if spec.has_ragged:
            self._captured = capture(self.out, store=self._store, is_destination=True, like=spec)
            self._placed = None
        self._check(spec)
        self._fitting = spec

    def _check(self, spec: Spec) -> None:
        memo = self._captured.memo
        if memo.get("fits") is not spec:  # of thousands of leaves another look takes half a millisecond
            check_matches(spec, self._captured.spec, store=self._store)
            memo["fits"] = spec

    def places(self, layout: Layout) -> Leaves | None:
        """The leaves in the layout's order; None when they cannot be received into."""
        if self._captured.spec.has_ragged:
            return None  # of a lazy stack a capture has copies
        if self._placed is None or self._placed[0] is not layout:
            leaves = leaves_of(self._captured, layout)
            self._placed = layout, None if leaves.contents is None else leaves
        return self._placed[1]

    def places_for(self, spec: Spec, layout: Layout) -> tuple[Leaves | None, TDServeError | None]:
        """The leaves for content of this structure, as of ``places``, or what says why it does not fit: for who must
        take the content off the channel before raising that."""
        try:
            self.check(spec)
            return self.places(layout), None
        except TDServeError as error:
            return None, error

    def finish(self, content: Content, *, was_direct: bool) -> None:
        """Copies what was not received in place."""
        if not was_direct or content.values:
            fill(self.out, content.spec, content.leaves, content.values)
