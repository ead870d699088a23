"""The toy channel transport of ``test_toy_transport``: its entry in either table, and how a server gets them."""

from __future__ import annotations

from tdserve.rules.channel_transports import ChannelTransport, SessionEnds
from tdserve.transport.gloo import GlooChannel
from tdserve.transport.session_channels import ChannelEnd

REGISTRATION = """
from tdserve.rules.channel_transports import CHANNEL_TRANSPORTS
from tdserve.transport.session_channels import OPENERS
from tests.integration.toy_transport import TOY, open_toy

CHANNEL_TRANSPORTS["toy"] = TOY
OPENERS["toy"] = open_toy
"""


class ToyChannel(GlooChannel):
    """A gloo pair by another name."""

    transport = "toy"


def open_toy(end: ChannelEnd) -> ToyChannel:
    """Opens one end."""
    return ToyChannel(
        end.kv_store, end.rank, host=end.host, credential=end.credential, peer=end.peer, timeout_s=end.timeout_s
    )


def _why_not(ends: SessionEnds, is_asked_for: bool) -> str:
    return "" if ends.is_one_machine and is_asked_for else "it is a toy for one machine"


TOY = ChannelTransport(num_descriptors=1, is_reopened=True, needs_device=False, why_not=_why_not)
