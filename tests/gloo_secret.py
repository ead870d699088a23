"""A secret for gloo groups of tests that are about something else."""

from __future__ import annotations

from tdserve.base.ids import SECRET_BYTES
from tdserve.transport.proving import ChannelCredential

SECRET = b"s" * SECRET_BYTES
CREDENTIAL = ChannelCredential(SECRET, "a test")
