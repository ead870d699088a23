"""The transports whose content moves over a channel between a client and its data worker, and the choice of one.

``tdserve.transport.session_channels`` has the other half of this table: how the channel of each is opened.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class ChannelTransport:
    """What is decided by of one of them.

    Attributes:
        num_descriptors: That a session takes at its worker.
        is_reopened: Whether another channel takes the place of one that is lost.
        needs_device: Whether each end has a GPU of its own.
    """

    num_descriptors: int
    is_reopened: bool
    needs_device: bool


CHANNEL_TRANSPORTS: Mapping[str, ChannelTransport] = {
    "gloo": ChannelTransport(num_descriptors=2, is_reopened=True, needs_device=False),
    # One descriptor more for gloo; what NCCL takes was not measured.
    "nccl": ChannelTransport(num_descriptors=8, is_reopened=False, needs_device=True),
}
