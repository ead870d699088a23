"""Names and numbers that identify things: store names, client ids, request ids. Imports nothing but errors."""

from __future__ import annotations

import re
import secrets

from tdserve.base.errors import InvalidRequestError, RemoteProtocolError

MAX_NAME_BYTES = 200
"""A store's name is a folder's name; ext4 and tmpfs allow 255 bytes, and we append suffixes while files move."""

CLIENT_ID_BYTES = 16

UID_CHARACTERS = 32

REQUEST_BYTES = 8
"""Length of a request's number in records, where it follows the id of its client."""

SECRET_BYTES = 32
"""Length of the secret that only the ends of a gloo group know: too long to guess."""

MAX_TEXT_BYTES = 255
"""Longest other name that a client makes the server keep: of a host, a consumer or a device."""

_FORBIDDEN = re.compile(r"[\x00-\x1f\x7f-\x9f/\\]")  # C0 and C1: terminals obey both


def check_client_id(client_id: bytes) -> bytes:
    """Returns a client's id if it is valid; raises InvalidRequestError otherwise."""
    if len(client_id) != CLIENT_ID_BYTES:
        reason = f"it has {len(client_id)} bytes, not {CLIENT_ID_BYTES}"
        raise InvalidRequestError(argument="client_id", reason=reason)
    return client_id


def check_store_name(name: str) -> str:
    """Returns ``name`` if it is a valid name of a store.

    Names are one path component: not empty, at most 200 bytes in UTF-8, no slash, backslash or control character, no
    leading dot (so neither ``.`` nor ``..``), no surrounding white space.

    Raises:
        InvalidRequestError: With the reason. Nothing was created.
    """
    if not isinstance(name, str):
        raise InvalidRequestError(argument="store name", reason=f"a {type(name).__name__} was given, not a str")
    reason = _find_name_fault(name)
    if reason:
        raise InvalidRequestError(argument="store name", reason=f"{name[:80]!r} {reason}")
    return name


def check_text(argument: str, text: str, *, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """Returns ``text`` if it is valid and short enough for the server to keep.

    Raises:
        InvalidRequestError: It is too long, or not valid unicode.
    """
    if len(text) > max_bytes or len(text.encode(errors="replace")) > max_bytes:
        reason = f"{text[:40]!r}... has {len(text)} characters; at most {max_bytes} bytes in UTF-8 are allowed"
        raise InvalidRequestError(argument=argument, reason=reason)
    try:
        text.encode()
    except UnicodeEncodeError as fault:
        raise InvalidRequestError(argument=argument, reason=f"{text[:40]!r} is not valid unicode") from fault
    return text


def _find_name_fault(name: str) -> str | None:
    try:
        nbytes = len(name.encode())
    except UnicodeEncodeError:
        return "is not valid unicode"
    if not name:
        return "is empty"
    if nbytes > MAX_NAME_BYTES:
        return f"has {nbytes} bytes, at most {MAX_NAME_BYTES} are allowed"
    if name.startswith("."):
        return "starts with a dot"
    if name != name.strip():
        return "starts or ends with white space"
    if _FORBIDDEN.search(name):
        return "has a slash, a backslash or a control character"
    return None


def make_secret() -> bytes:
    """Returns a new secret for the gloo groups of one session, hop or epoch."""
    return secrets.token_bytes(SECRET_BYTES)


def make_client_id() -> bytes:
    """Returns 16 random bytes that name one client object, across its reconnects."""
    return secrets.token_bytes(CLIENT_ID_BYTES)


def make_uid() -> str:
    """Returns a random name (32 hexadecimal digits) for a server or one incarnation of a store."""
    return secrets.token_hex(UID_CHARACTERS // 2)


def check_uid(uid: str) -> str:
    """Returns the uid of a store that a client has sent, which names folders. Raises RemoteProtocolError if it is
    invalid."""
    if len(uid) != UID_CHARACTERS or not (uid.isascii() and uid.isalnum()):
        raise RemoteProtocolError(expected="the uid of a store", received=repr(uid[:80]))
    return uid
