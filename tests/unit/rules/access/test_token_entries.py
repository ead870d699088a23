"""tdserve/rules/access/token_entries.py: the entries of a file of tokens."""

from __future__ import annotations

import math
from datetime import date, datetime, timezone
from typing import Any

import pytest

from tdserve.base.errors import InvalidRequestError
from tdserve.rules.access.grants import Grant, Limits
from tdserve.rules.access.roles import Role
from tdserve.rules.access.token_entries import MAX_TOKENS, TokenEntry, TokenTable, encode_hash, read_entries

SALT = b"0123456789abcdef"
TOKEN = b"learner.s3cret"
HASH = encode_hash(SALT, TOKEN)


def make_entry(**fields: Any) -> dict[str, Any]:
    """Returns an entry as in a file."""
    return {"name": "learner", "role": "write", "hash": HASH, **fields}


def read_grant(**fields: Any) -> Grant:
    """Returns the grant of an entry."""
    (entry,) = read_entries({"tokens": [make_entry(**fields)]})
    return entry.grant


def make_table(**fields: Any) -> TokenTable:
    """Returns a table with one entry."""
    return TokenTable(read_entries({"tokens": [make_entry(**fields)]}))


def test_entry_when_it_has_everything_then_read() -> None:
    limits = {"sessions": 2, "requests": 3, "held_bytes": "64M", "rate": 1.5}
    grant = read_grant(stores=["replay*", "w"], expires="2027-01-31T12:00:00Z", limits=limits)
    assert (grant.name, grant.role, grant.stores) == ("learner", Role.WRITE, ("replay*", "w"))
    assert grant.limits == Limits(2, 3, 64 << 20, 1.5)
    assert grant.expires_s == datetime(2027, 1, 31, 12, tzinfo=timezone.utc).timestamp()


def test_entry_when_it_has_only_what_it_must_then_all_stores_for_ever() -> None:
    grant = read_grant()
    assert (grant.stores, grant.limits, grant.expires_s) == (("*",), Limits(), math.inf)


@pytest.mark.parametrize(
    "expires", ["2027-01-31", date(2027, 1, 31), "2027-01-31T00:00:00", "2027-01-31T01:00:00+01:00"]
)
def test_expiry_when_a_date_then_its_midnight_in_utc(expires: Any) -> None:
    assert read_grant(expires=expires).expires_s == datetime(2027, 1, 31, tzinfo=timezone.utc).timestamp()


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        (None, "no list tokens"),
        ([], "no list tokens"),
        ({}, "no list tokens"),
        ({"tokens": {}}, "no list tokens"),
        ({"tokens": [], "token": 1}, "did you mean 'tokens'"),
        ({"tokens": [1]}, "token 0 is not a table"),
        ({"tokens": [{}]}, "the name ''"),
        ({"tokens": [make_entry(name="a b")]}, "the name 'a b'"),
        ({"tokens": [make_entry(name="a.b")]}, "the name 'a.b'"),
        ({"tokens": [make_entry(name=7)]}, "the name '7'"),
        ({"tokens": [make_entry(), make_entry()]}, "two tokens"),
        ({"tokens": [make_entry(roles="write")]}, "did you mean 'role'"),
        ({"tokens": [make_entry(role="root")]}, "read, write, admin"),
        ({"tokens": [make_entry(role=["write"])]}, "read, write, admin"),
        ({"tokens": [make_entry(hash="s3cret")]}, "has no hash"),
        ({"tokens": [make_entry(hash=None)]}, "has no hash"),
        ({"tokens": [make_entry(hash=HASH.upper())]}, "has no hash"),
        ({"tokens": [make_entry(stores="replay*")]}, "list of patterns"),
        ({"tokens": [make_entry(stores=["a", 1])]}, "list of patterns"),
        ({"tokens": [make_entry(stores=["a"] * 101)]}, "more than 100"),
        ({"tokens": [make_entry(expires="soon")]}, "expires"),
        ({"tokens": [make_entry(expires=7)]}, "expires"),
        ({"tokens": [make_entry(limits=[1])]}, "limits is not a table"),
        ({"tokens": [make_entry(limits={"session": 1})]}, "did you mean 'sessions'"),
        ({"tokens": [make_entry(limits={"sessions": 0})]}, "sessions"),
        ({"tokens": [make_entry(limits={"sessions": True})]}, "sessions"),
        ({"tokens": [make_entry(limits={"sessions": 1.5})]}, "sessions"),
        ({"tokens": [make_entry(limits={"rate": math.inf})]}, "rate"),
        ({"tokens": [make_entry(limits={"rate": math.nan})]}, "rate"),
        ({"tokens": [make_entry(limits={"held_bytes": "much"})]}, "held_bytes"),
        ({"tokens": [{}] * (MAX_TOKENS + 1)}, "are more than"),
    ],
)
def test_file_when_invalid_then_refused_by_name_and_without_a_hash(document: Any, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason) as caught:
        read_entries(document)
    assert "s3cret" not in str(caught.value)
    assert HASH not in str(caught.value)


@pytest.mark.parametrize(
    "token", [b"", b"learner", b"learner.", b"learner.s3cre", b"learner.s3crets", b"other.s3cret", b"s3cret", b"\xff."]
)
def test_find_when_the_token_is_wrong_then_none(token: bytes) -> None:
    assert make_table().find(token) is None


def test_find_when_the_token_is_right_then_its_grant() -> None:
    grant = make_table().find(TOKEN)
    assert grant is not None
    assert grant.name == "learner"


def test_find_when_the_salt_differs_then_none() -> None:
    assert make_table(hash=encode_hash(bytes(16), TOKEN).replace("00" * 16, SALT.hex())).find(TOKEN) is None


def test_find_when_a_token_has_no_name_then_found_among_the_others() -> None:
    (named,) = read_entries({"tokens": [make_entry()]})
    other = TokenEntry(Grant("(plain)", key=bytes.fromhex(encode_hash(SALT, b"plain").split(":")[2])), SALT)
    table = TokenTable([named], [other])
    found = [table.find(token) for token in (b"plain", TOKEN, b"plai")]
    assert [grant and grant.name for grant in found] == ["(plain)", "learner", None]


def test_find_name_when_a_token_is_wrong_then_the_entry_that_it_names() -> None:
    table = make_table()
    named = [table.find_named(token) for token in (b"learner.wrong", b"nobody.x", b"s3cret")]
    assert [grant and grant.name for grant in named] == ["learner", None, None]


def test_explain_end_when_the_entry_is_the_same_then_none() -> None:
    assert make_table().explain_end(read_grant(), 0.0) is None


def test_explain_end_when_it_has_expired_then_at_that_moment() -> None:
    grant = read_grant(expires="1970-01-02")
    table = make_table(expires="1970-01-02")
    assert [table.explain_end(grant, now_s) for now_s in (86_399.0, 86_400.0)] == [None, "it has expired"]


def test_explain_end_when_the_entry_is_gone_or_has_another_token_then_revoked() -> None:
    for table in (TokenTable(), make_table(name="another"), make_table(hash=encode_hash(SALT, b"learner.new"))):
        assert table.explain_end(read_grant(), 0.0) == "it was revoked"


def test_explain_end_when_the_entry_grants_something_else_then_the_session_ends_without_an_error() -> None:
    assert make_table(role="read").explain_end(read_grant(), 0.0) == ""
