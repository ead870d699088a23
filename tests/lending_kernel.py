"""Whether the kernel can refuse descriptors on UNIX sockets. If it cannot, a server lends nothing."""

from __future__ import annotations

import socket

import pytest

from tdserve.control.lending import refuse_descriptors


def _can_refuse() -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asked:
        try:
            refuse_descriptors(asked)
        except OSError:
            return False
    return True


needs_lending = pytest.mark.skipif(not _can_refuse(), reason="needs Linux 6.16, which refuses descriptors")
