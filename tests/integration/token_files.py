"""A file of tokens that a test changes while a server uses it, and requests that a test writes by hand."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tdserve
from tdserve.base.ids import make_client_id
from tdserve.client.session.requests.request_numbers import RequestNumbers
from tdserve.client.session.session import Session
from tdserve.control.connection import ControlConnection
from tdserve.rules.access.token_entries import SALT_BYTES, encode_hash

TIMEOUT_S = 30.0


class TokenFile:
    """The file, replaced as a whole by every change."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._entries: dict[str, dict[str, Any]] = {}
        self._write()

    def add(self, name: str, role: str, **fields: Any) -> str:
        """Adds a token; returns it."""
        token = f"{name}.{secrets.token_urlsafe(32)}"
        hash_ = encode_hash(secrets.token_bytes(SALT_BYTES), token.encode())
        self._entries[name] = {"name": name, "role": role, "hash": hash_, **fields}
        self._write()
        return token

    def change(self, name: str, **fields: Any) -> None:
        """Changes fields of an entry."""
        self._entries[name] |= fields
        self._write()

    def remove(self, name: str) -> None:
        """Revokes a token."""
        del self._entries[name]
        self._write()

    def restore(self) -> None:
        """Writes the entries again, whatever the file holds now."""
        self._write()

    def _write(self) -> None:
        beside = self.path.with_suffix(".new")
        beside.write_text(json.dumps({"tokens": list(self._entries.values())}))
        os.replace(beside, self.path)


@contextmanager
def open_wire(server: tdserve.Server, token: str, transport: str = "gloo") -> Iterator[Session]:
    """Opens a session whose requests a test writes by hand."""
    connection = ControlConnection(server.address, token=token)
    connection.wait_ready(TIMEOUT_S)
    session = Session(
        connection,
        client_id=make_client_id(),
        transport=transport,
        requests=RequestNumbers(),
        timeout_s=TIMEOUT_S,
    )
    try:
        yield session
    finally:
        session.close()
        connection.close()
