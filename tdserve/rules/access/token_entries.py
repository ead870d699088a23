"""The entries of a file of tokens. It holds salted digests, from which no token can be found: a token is 256 random
bits, so SHA-256 suffices, and no slow hash is needed on every call."""

from __future__ import annotations

import hashlib
import hmac
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import date, datetime, time, timezone
from difflib import get_close_matches
from typing import Any

from tdserve.base.errors import InvalidRequestError
from tdserve.base.server_options import parse_bytes
from tdserve.rules.access.grants import ALL_STORES, NO_LIMITS, Grant, Limits
from tdserve.rules.access.roles import ROLES

MAX_TOKENS = 10_000
"""Entries of one file; each takes about a kilobyte of memory."""

MAX_PATTERNS = 100
"""Patterns of one entry: each request compares its store with them."""

SALT_BYTES = 16

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_HASH = re.compile(r"sha256:([0-9a-f]{32}):([0-9a-f]{64})")

_FIELDS = ("name", "hash", "role", "stores", "expires", "limits")


@dataclass(frozen=True)
class TokenEntry:
    """One token.

    Attributes:
        grant: What it grants; its key is the digest.
        salt: Random bytes that are hashed in front of the token.
    """

    grant: Grant
    salt: bytes

    def is_of(self, token: bytes) -> bool:
        """Returns whether this is the token's entry; takes as long whichever part of a wrong token is right."""
        return hmac.compare_digest(compute_key(self.salt, token), self.grant.key)


_NOBODY = TokenEntry(Grant("", key=bytes(32)), bytes(SALT_BYTES))
"""Compared where no entry has the name in a token, so that the time does not reveal which names there are."""


class TokenTable:
    """The tokens of a server.

    Args:
        named: Entries whose tokens begin with their name.
        others: Entries of any other tokens; each is compared with every token.
    """

    def __init__(self, named: Iterable[TokenEntry] = (), others: Iterable[TokenEntry] = ()) -> None:
        self._others = tuple(others)
        self._named = {entry.grant.name: entry for entry in named}
        self._grants = {entry.grant.name: entry.grant for entry in (*self._named.values(), *self._others)}

    def __len__(self) -> int:
        return len(self._grants)

    def replace_others(self, others: Iterable[TokenEntry]) -> TokenTable:
        """Returns a table with the same named entries, and these others."""
        return TokenTable(self._named.values(), others)

    def list_revoked(self, later: TokenTable) -> list[TokenEntry]:
        """Returns the named entries whose tokens a later table has no more."""
        return [entry for name, entry in self._named.items() if later.get_key(name) != entry.grant.key]

    def get_key(self, name: str) -> bytes | None:
        """Returns the digest of the token with this name; None if there is none."""
        grant = self._grants.get(name)
        return None if grant is None else grant.key

    def find(self, token: bytes) -> Grant | None:
        """Returns what a token grants, even if it has expired; None if it is not in the table."""
        name = token.partition(b".")[0].decode("ascii", errors="replace")
        candidates = (self._named.get(name, _NOBODY), *self._others)
        matches = [entry.grant for entry in candidates if entry.is_of(token) and entry is not _NOBODY]
        return matches[0] if matches else None

    def find_named(self, token: bytes) -> Grant | None:
        """Returns what the entry grants that a token names, right or wrong, for logs; None if there is none."""
        entry = self._named.get(token.partition(b".")[0].decode("ascii", errors="replace"))
        return None if entry is None else entry.grant

    def explain_end(self, grant: Grant, now_s: float) -> str | None:
        """Returns why sessions with this grant end: it has expired, was revoked, or was changed (""); None if they do
        not."""
        if now_s >= grant.expires_s:
            return "it has expired"
        if self.get_key(grant.name) != grant.key:
            return "it was revoked"
        return None if self._grants[grant.name] == grant else ""


def compute_key(salt: bytes, token: bytes) -> bytes:
    """Returns the digest of a token."""
    return hashlib.sha256(salt + token).digest()


def encode_hash(salt: bytes, token: bytes) -> str:
    """Returns the ``hash`` of an entry."""
    return f"sha256:{salt.hex()}:{compute_key(salt, token).hex()}"


def read_entries(document: Any) -> list[TokenEntry]:
    """Returns the entries of a document, as read from JSON or TOML.

    Raises:
        InvalidRequestError: Names the entry and the field that is invalid, and never shows a hash.
    """
    if not isinstance(document, Mapping) or not isinstance(document.get("tokens"), list):
        raise _make_error("there is no list tokens")
    _check_fields("the file", document, ("tokens",))
    if len(document["tokens"]) > MAX_TOKENS:
        raise _make_error(f"{len(document['tokens'])} tokens are more than {MAX_TOKENS}")
    entries: dict[str, TokenEntry] = {}
    for number, fields in enumerate(document["tokens"]):
        entry = _read_entry(f"token {number}", fields)
        if entry.grant.name in entries:
            raise _make_error(f"two tokens have the name {entry.grant.name!r}")
        entries[entry.grant.name] = entry
    return list(entries.values())


def check_name(name: Any) -> str:
    """Returns the name of an entry.

    Raises:
        InvalidRequestError: It is not 1 to 64 letters, digits, ``_`` and ``-``.
    """
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise _make_error(f"the name {str(name)[:80]!r} is not 1 to 64 letters, digits, _ and -")
    return name


def _read_entry(what: str, fields: Any) -> TokenEntry:
    if not isinstance(fields, Mapping):
        raise _make_error(f"{what} is not a table")
    name = check_name(fields.get("name", ""))
    what = f"token {name!r}"
    _check_fields(what, fields, _FIELDS)
    found = _HASH.fullmatch(fields["hash"]) if isinstance(fields.get("hash"), str) else None
    if found is None:
        raise _make_error(f"{what} has no hash as `tdserve token new` prints it")
    role = fields.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise _make_error(f"{what}: its role must be one of {', '.join(ROLES)}")
    grant = Grant(
        name,
        ROLES[role],
        _read_patterns(what, fields.get("stores", list(ALL_STORES))),
        _read_limits(what, fields.get("limits", {})),
        _read_expiry(what, fields["expires"]) if "expires" in fields else math.inf,
        bytes.fromhex(found[2]),
    )
    return TokenEntry(grant, bytes.fromhex(found[1]))


def _read_patterns(what: str, given: Any) -> tuple[str, ...]:
    if not isinstance(given, list) or not all(isinstance(each, str) and each for each in given):
        raise _make_error(f'{what}: stores is not a list of patterns, such as ["replay*"]')
    if len(given) > MAX_PATTERNS:
        raise _make_error(f"{what}: {len(given)} patterns are more than {MAX_PATTERNS}")
    return tuple(given)


def _read_expiry(what: str, given: Any) -> float:
    """Returns a moment, seconds since the epoch. A date begins at midnight; without a time zone it is UTC."""
    if isinstance(given, str):
        with_offset = (
            given.removesuffix("Z") + "+00:00" if given.endswith("Z") else given
        )  # Python 3.10 does not parse Z
        try:
            given = datetime.fromisoformat(with_offset)
        except ValueError:
            given = None
    if isinstance(given, date) and not isinstance(given, datetime):
        given = datetime.combine(given, time())
    if not isinstance(given, datetime):
        raise _make_error(f"{what}: expires is not a date such as 2027-01-31, or 2027-01-31T12:00:00Z")
    return (given if given.tzinfo is not None else given.replace(tzinfo=timezone.utc)).timestamp()


def _read_limits(what: str, given: Any) -> Limits:
    if not isinstance(given, Mapping):
        raise _make_error(f"{what}: limits is not a table")
    _check_fields(f"the limits of {what}", given, Limits._fields)
    found = {name: _read_limit(what, name, value) for name, value in given.items()}
    return Limits(**found) if found else NO_LIMITS


def _read_limit(what: str, name: str, value: Any) -> Any:
    if name == "held_bytes" and isinstance(value, str):
        try:
            value = parse_bytes(value)
        except ValueError:
            value = None
    is_number = isinstance(value, int) or (name == "rate" and isinstance(value, float))
    if not is_number or isinstance(value, bool) or not 0 < value < math.inf:
        raise _make_error(f"{what}: the limit {name} is not a number above 0")
    return value


def _check_fields(what: str, given: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for name in given:
        if name not in known:
            near = get_close_matches(str(name), known, n=1)
            remedy = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
            raise _make_error(f"{what} has an unknown field {str(name)[:80]!r}; {remedy}")


def _make_error(reason: str) -> InvalidRequestError:
    return InvalidRequestError(argument="tokens_file", reason=reason)
