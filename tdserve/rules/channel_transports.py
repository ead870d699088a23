"""The transports whose content moves over a channel between a client and its data worker, and the choice among them.

``tdserve.transport.session_channels`` has the other half of this table: it opens the channel of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class ChannelTransport:
    """The properties of one of them that decisions depend on.

    Attributes:
        num_descriptors: Descriptors that a session takes at its worker.
        is_reopened: Whether a lost channel is replaced by another.
        needs_device: Whether each end has a GPU of its own.
    """

    num_descriptors: int
    is_reopened: bool
    needs_device: bool


CHANNEL_TRANSPORTS: Mapping[str, ChannelTransport] = {
    "gloo": ChannelTransport(num_descriptors=2, is_reopened=True, needs_device=False),
    # One descriptor more for gloo; NCCL's need was not measured.
    "nccl": ChannelTransport(num_descriptors=8, is_reopened=False, needs_device=True),
}
