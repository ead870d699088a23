from __future__ import annotations

import os

from tdserve.base.config import PROTOCOL_VERSION
from tdserve.base.machine import read_boot_id
from tdserve.client.session.channels.hello import make_hello


def test_hello_when_made_then_identifies_client_process_and_machine() -> None:
    said = make_hello(b"i" * 16, transport="shm", gpu="uuid")
    assert (said.client_id, said.transport, said.gpu) == (b"i" * 16, "shm", "uuid")
    assert (said.protocol_version, said.pid, said.boot_id) == (PROTOCOL_VERSION, os.getpid(), read_boot_id())
    assert said.host
    assert said.takes_values
