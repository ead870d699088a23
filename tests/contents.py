"""The content of a write as a client without this package would put it into its request."""

from __future__ import annotations

from tdserve.client.content.leaves import make_leaves
from tdserve.messages.content import write_layout
from tdserve.structure.captures.capture import Captured
from tdserve.transport.sources_sinks import LeafBuffers
from tdserve.transport.stream import pack
from tdserve.v1 import control_pb2


def content_of(captured: Captured, *, fingerprint: bytes, is_inline: bool = True) -> control_pb2.Content:
    """Content without values: the bytes themselves, or the sizes of the data messages that bring them."""
    layout = write_layout(captured.spec)
    content = control_pb2.Content(fingerprint=fingerprint, nbytes=sum(layout.message_nbytes))
    if is_inline:
        content.inline = pack(layout.messages, LeafBuffers(make_leaves(captured, layout).tensors))
    else:
        content.message_nbytes.extend(layout.message_nbytes)
    return content
