"""The part of a member in a call: the tensordict that it sends, or the place where it receives one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tdserve.base.errors import NotSupportedError
from tdserve.client.content.leaves import make_leaves, make_source
from tdserve.client.content.read_content import Content, Destination
from tdserve.client.content.received import make_views
from tdserve.client.content.value_blocks import decode_values, encode_values
from tdserve.client.groups.group_errors import name_group
from tdserve.messages.content import cut_values, write_layout
from tdserve.messages.layout import Message
from tdserve.structure.building.build import build
from tdserve.structure.captures.capture import Captured, capture
from tdserve.structure.tensors.torch_types import to_torch
from tdserve.structure.trees.tree import Spec, check_matches, show
from tdserve.transport.appended import BytesEnd, SinkBehind, SourceBehind
from tdserve.transport.pool import BufferPool
from tdserve.transport.sources_sinks import FlatBuffer, LeafBuffers, Sink, Source


def divide_messages(spec: Spec, values_nbytes: int) -> tuple[Message, ...]:
    """Divides content of a structure into messages: first its leaves, then its values."""
    return (*write_layout(spec).messages, *cut_values(values_nbytes))


def compute_fingerprint(spec: Spec) -> bytes:
    """Returns the fingerprint of a structure without devices, since each member has its own."""
    return spec.with_device(None).fingerprint


def check_device(captured: Captured, device: torch.device | None) -> None:
    """Raises NotSupportedError unless all tensors are on a device; None: on any."""
    for path, tensor in captured.tensors.items():
        if device is not None and tensor.device != device:
            feature = f"key {show(path)!r} on {tensor.device} in a group with backend 'nccl'"
            raise NotSupportedError(
                feature=feature, reason=f"its tensors must be on {device}; move them there with .to()"
            )


class GivenPart:
    """Content that a member sends.

    Args:
        td: TensorDict or tensorclass instance; must not change before the call is over.
        name: Name of the group, for errors.
        allow_pickle: As for the client.

    Attributes:
        spec: Its structure.
        fingerprint: Fingerprint of the structure.

    Raises:
        NotSupportedError, InvalidSpecError: It cannot be sent; the error names the key.
        TooLargeError: Its values are too many for one block.
    """

    def __init__(self, td: Any, *, name: str, allow_pickle: bool) -> None:
        self._name = name
        with name_group(name):
            self._captured = capture(td, store=name, allow_pickle=allow_pickle)
            self.spec = self._captured.spec
            self._values = encode_values(self.spec, self._captured.values, store=name, allow_pickle=allow_pickle)
        self.fingerprint = compute_fingerprint(self.spec)

    @property
    def values_nbytes(self) -> int:
        """Size of its block of values."""
        return len(self._values)

    @property
    def messages(self) -> tuple[Message, ...]:
        """The messages that it is divided into."""
        return divide_messages(self.spec, self.values_nbytes)

    def check(self, spec: Spec) -> None:
        """Raises SpecMismatchError unless it has this structure."""
        with name_group(self._name):
            check_matches(spec, self.spec, store=self._name)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Returns its tensors in the order in which they are sent."""
        return make_leaves(self._captured, write_layout(self.spec)).tensors

    def check_device(self, device: torch.device | None) -> None:
        """Raises NotSupportedError unless all its tensors are on the device; None: on any."""
        check_device(self._captured, device)

    def make_values_source(self) -> Source:
        """Returns a source of its values alone."""
        return BytesEnd(self._values)

    def make_source(self) -> Source:
        """Returns a source of all its bytes; copies those that are not contiguous, or not on the CPU."""
        return SourceBehind(make_source(self._captured, write_layout(self.spec)), BytesEnd(self._values))


class TakenPart:
    """The place where a member receives content.

    Args:
        out: A tensordict to fill in place; None: a new one is built.
        name: Name of the group, for errors.
        allow_pickle: As for the client.

    Attributes:
        fingerprint: Fingerprint of the structure that it accepts; b"": any.

    Raises:
        NotSupportedError: ``out`` cannot be written to.
    """

    def __init__(self, out: Any, *, name: str, allow_pickle: bool) -> None:
        self._out = out
        self._allow_pickle = allow_pickle
        self._name = name
        with name_group(name):
            self._destination = None if out is None else Destination(out, store=name)
            self._captured = None if out is None else capture(out, store=name, is_destination=True)
        self.fingerprint = b"" if self._captured is None else compute_fingerprint(self._captured.spec)
        self._values = torch.empty(0, dtype=torch.uint8)
        self._columns: Sequence[torch.Tensor] = ()
        self._was_direct = False
        self._on_device: torch.device | None = None

    def check_device(self, device: torch.device | None) -> None:
        """Raises NotSupportedError unless all tensors of ``out`` are on the device; None: on any."""
        if self._captured is not None:
            check_device(self._captured, device)

    def check(self, spec: Spec) -> None:
        """Raises SpecMismatchError unless content of this structure fits; nothing is written."""
        if self._destination is not None:
            with name_group(self._name):
                self._destination.check(spec)

    def make_sink(self, spec: Spec, values_nbytes: int, pool: BufferPool) -> Sink:
        """Returns a sink for content of a structure."""
        layout = write_layout(spec)
        places = None
        if self._destination is not None:
            self.check(spec)
            places = self._destination.find_places(layout)
        self._was_direct = places is not None
        self._values = pool.take(values_nbytes)
        sink: Sink
        if places is None:
            buffer = pool.take(layout.nbytes)
            self._columns = make_views(layout, buffer)
            sink = FlatBuffer(buffer)
        else:
            self._columns = places.tensors
            sink = LeafBuffers(places.tensors, contents=places.contents or ())
        return SinkBehind(sink, FlatBuffer(self._values))

    def make_tensors(self, device: torch.device, spec: Spec) -> list[torch.Tensor]:
        """Returns tensors on a device for content of a structure, in the order in which they are sent."""
        self._on_device = device
        slots = write_layout(spec).slots
        if self._captured is not None and not self._captured.spec.has_ragged:  # of a lazy stack it has copies
            self._was_direct = True
            self._columns = [self._captured.tensors[slot.path] for slot in slots]
        else:
            self._columns = [torch.empty(slot.shape, dtype=to_torch(slot.dtype), device=device) for slot in slots]
        return list(self._columns)

    def make_values_sink(self, values_nbytes: int, pool: BufferPool) -> Sink:
        """Returns a sink for values alone."""
        self._values = pool.take(values_nbytes)
        return FlatBuffer(self._values)

    def finish(self, spec: Spec) -> Any:
        """Returns the tensordict, once everything has been received.

        Raises:
            NotSupportedError: Its tensorclass is unknown here, or it has values that may not be unpickled.
        """
        leaves = {slot.path: column for slot, column in zip(write_layout(spec).slots, self._columns, strict=True)}
        block = self._values.numpy().tobytes()
        shown, values = decode_values(spec, block, allow_pickle=self._allow_pickle)
        content = Content(shown, leaves, values, 0)
        if self._destination is None and self._on_device is not None:
            return build(shown.with_device(str(self._on_device)), leaves, values)
        if self._destination is None:
            return content.build()
        self._destination.finish(content, was_direct=self._was_direct)
        return self._out
