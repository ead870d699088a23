"""The message with which a client opens a session."""

from __future__ import annotations

import os
import socket

from tdserve.base.config import PROTOCOL_VERSION
from tdserve.base.machine import read_boot_id
from tdserve.v1 import control_pb2


def make_hello(client_id: bytes, *, transport: str, gpu: str, why_one_port: str = "") -> control_pb2.Hello:
    """Makes the first message of a session.

    Args:
        client_id: Identifies the client object across its sessions.
        transport: Transport of the content.
        gpu: uuid of the client's GPU, for content by NCCL; "" for none.
        why_one_port: Why the client can use but the server's own port; "" if it has not found that.
    """
    return control_pb2.Hello(
        protocol_version=PROTOCOL_VERSION,
        client_id=client_id,
        transport=transport,
        boot_id=read_boot_id(),
        pid=os.getpid(),
        host=socket.gethostname(),
        takes_values=True,
        gpu=gpu,
        why_one_port=why_one_port,
    )
