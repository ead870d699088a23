"""The tokens that the server accepts now: those of its files, read again when the file changes."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Callable

from tdserve.base.config import ServerConfig, read_token
from tdserve.base.errors import InvalidRequestError, UnauthenticatedError
from tdserve.base.token_file import parse_document, read_content, read_state
from tdserve.rules.access.grants import Grant
from tdserve.rules.access.token_entries import SALT_BYTES, TokenEntry, TokenTable, compute_key, read_entries

LOOK_INTERVAL_S = 0.4
"""Pause between two looks at the file, and at what has expired: sessions end within a second of either."""

MAX_REMEMBERED = 1_000
"""Tokens whose holders are told that they were revoked, by the last change of the file."""

PLAIN_NAME = "(token-file)"
OWN_NAME = "(server)"
"""Names that no entry of a file can have."""

_log = logging.getLogger("tdserve.server")

_BEARER = b"Bearer "


class TokenRegister:
    """Finds what a token grants. Threads: the event loop's; the file is read in others.

    Args:
        path: The file of tokens; None if there is none.
        plain: A token that grants everything; None if there is none.

    Raises:
        InvalidRequestError: The file cannot be read, or an entry is invalid.
    """

    def __init__(self, path: str | None, plain: str | None = None) -> None:
        self._path = path
        self._plain = plain
        self._others: list[TokenEntry] = []
        if plain is not None:
            self._add(PLAIN_NAME, plain)
        self._seen = None if path is None else read_state(path)
        self._revoked = TokenTable()
        self._table = self._read()
        self._warn_if_empty()

    @classmethod
    def open(cls, config: ServerConfig) -> TokenRegister | None:
        """Returns the register of a server; None if it asks for no token. Raises InvalidRequestError."""
        if config.token_file is None and config.tokens_file is None:
            return None
        plain = None if config.token_file is None else read_token(config.token_file, "token_file")
        return cls(config.tokens_file, plain)

    def make_own_token(self) -> str:
        """Returns the token of the server's own processes: the plain one if there is one, so that logins to the
        observer's pages outlast this process, and otherwise a new one."""
        if self._plain is not None:
            return self._plain
        token = secrets.token_urlsafe(32)
        self._add(OWN_NAME, token)
        self._table = self._table.replace_others(self._others)
        return token

    def _add(self, name: str, token: str) -> None:
        salt = secrets.token_bytes(SALT_BYTES)
        self._others.append(TokenEntry(Grant(name, key=compute_key(salt, token.encode())), salt))

    def authenticate(self, authorization: bytes) -> Grant:
        """Returns what the token in an ``authorization`` grants.

        Raises:
            UnauthenticatedError: There is none, it is wrong, or it has expired. Its address is empty.
        """
        token = _find_token(authorization)
        if not token:
            raise UnauthenticatedError(reason=UnauthenticatedError.NONE_GIVEN)
        grant = self._table.find(token)
        if grant is None:
            was_valid = self._revoked.find(token) is not None
            raise UnauthenticatedError(reason="it was revoked" if was_valid else "")
        if time.time() >= grant.expires_s:
            raise UnauthenticatedError(reason="it has expired")
        return grant

    def find_named(self, authorization: bytes) -> Grant | None:
        """Returns what the entry grants, or granted before it was revoked, of which a token claims to be, for logs."""
        token = _find_token(authorization)
        return self._table.find_named(token) or self._revoked.find_named(token)

    def explain_end(self, grant: Grant) -> str | None:
        """Returns why sessions with this grant end; as ``TokenTable.explain_end``."""
        return self._table.explain_end(grant, time.time())

    async def watch(self, on_look: Callable[[], None]) -> None:
        """Looks at the file again and again, until it is cancelled; an invalid file changes nothing, and is logged
        once.

        Args:
            on_look: Called after each look.
        """
        while True:
            await asyncio.sleep(LOOK_INTERVAL_S)
            await self._look()
            on_look()

    async def _look(self) -> None:
        if self._path is None:
            return
        state = await asyncio.to_thread(read_state, self._path)
        if state == self._seen:
            return
        self._seen = state
        name = os.path.basename(self._path)
        try:
            before, self._table = self._table, await asyncio.to_thread(self._read)
            self._revoked = TokenTable(before.list_revoked(self._table)[:MAX_REMEMBERED])
            _log.info("read %s again: it has %d tokens", name, len(self._table) - len(self._others))
            self._warn_if_empty()
        except InvalidRequestError as error:
            _log.error("%s was changed, and its earlier tokens stay valid: %s", name, error.fields["reason"])
        except Exception:  # noqa: BLE001 (or the file, and what has expired, would not be looked at any more)
            _log.exception("%s was changed, and its earlier tokens stay valid", name)

    def _warn_if_empty(self) -> None:
        if self._path is not None and len(self._table) == len(self._others):
            who = "no client" if self._plain is None else "no client without the token of --token-file"
            _log.warning("%s has no tokens: %s can connect", os.path.basename(self._path), who)

    def _read(self) -> TokenTable:
        named = [] if self._path is None else read_entries(parse_document(read_content(self._path), self._path))
        return TokenTable(named, self._others)


def _find_token(authorization: bytes) -> bytes:
    return authorization[len(_BEARER) :] if authorization.startswith(_BEARER) else b""
