"""tdserve/base/ids.py: which names a store may have."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from tdserve.base.errors import InvalidRequestError, RemoteProtocolError
from tdserve.base.ids import (
    CLIENT_ID_BYTES,
    MAX_NAME_BYTES,
    MAX_TEXT_BYTES,
    check_store_name,
    check_text,
    check_uid,
    make_client_id,
    make_uid,
)


@pytest.mark.parametrize(
    "name", ["a", "policy.v2", "füße", "with space", "a-b_c", "日本", "a\xa0b", "x" * MAX_NAME_BYTES, "a.."]
)
def test_name_when_one_plain_path_component_then_is_returned(name: str) -> None:
    assert check_store_name(name) == name


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("", "empty"),
        (".", "dot"),
        ("..", "dot"),
        (".hidden", "dot"),
        ("a/b", "slash"),
        ("/a", "slash"),
        ("../a", "dot"),
        ("a\\b", "backslash"),
        ("a\0b", "control"),
        ("a\nb", "control"),
        ("a\x7f", "control"),
        ("a\x80", "control"),
        ("a\x9b2J", "control"),
        ("a\x9fb", "control"),
        (" a", "white space"),
        ("a ", "white space"),
        ("x" * (MAX_NAME_BYTES + 1), f"{MAX_NAME_BYTES + 1} bytes"),
        ("ü" * 101, "202 bytes"),
        ("\ud800", "unicode"),
    ],
)
def test_name_when_it_cannot_be_a_folder_then_error_has_the_reason(name: str, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason) as caught:
        check_store_name(name)
    assert caught.value.argument == "store name"


@pytest.mark.parametrize("name", [None, 3, b"a", ("a",)])
def test_name_when_not_a_str_then_error_names_the_type(name: object) -> None:
    with pytest.raises(InvalidRequestError, match=type(name).__name__):
        check_store_name(name)  # type: ignore[arg-type]


def test_name_when_absurdly_long_then_message_stays_short() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_store_name("x" * 1_000_000)
    assert len(str(caught.value)) < 200


@pytest.mark.slow
@given(st.text(max_size=60))
def test_name_when_accepted_then_is_one_component_below_the_root(name: str) -> None:
    try:
        check_store_name(name)
    except InvalidRequestError:
        return
    path = Path("/root/stores") / name
    assert path.parent == Path("/root/stores")
    assert path.name == name


def test_client_id_when_made_twice_then_differs_and_has_its_size() -> None:
    first, second = make_client_id(), make_client_id()
    assert first != second
    assert len(first) == len(second) == CLIENT_ID_BYTES


def test_uid_when_made_twice_then_differs_and_is_a_store_name() -> None:
    first, second = make_uid(), make_uid()
    assert first != second
    assert check_store_name(first) == check_uid(first) == first


@pytest.mark.parametrize("uid", ["", "a" * 31, "a" * 33, "../" + "a" * 29, "a" * 31 + "/", "ü" * 32, "a" * 10_000_000])
def test_check_uid_when_it_is_none_then_refused_with_a_piece_of_it(uid: str) -> None:
    with pytest.raises(RemoteProtocolError, match="uid of a store") as caught:
        check_uid(uid)
    assert len(str(caught.value)) < 300


def test_text_when_too_long_then_refused_with_the_argument_and_a_piece_of_it() -> None:
    assert check_text("consumer", "x" * MAX_TEXT_BYTES) == "x" * MAX_TEXT_BYTES
    for text in ("x" * (MAX_TEXT_BYTES + 1), "ü" * MAX_TEXT_BYTES, "x" * 20_000_000):
        with pytest.raises(InvalidRequestError, match=f"{len(text)} characters") as caught:
            check_text("consumer", text)
        assert caught.value.argument == "consumer"
        assert len(str(caught.value)) < 300
    with pytest.raises(InvalidRequestError, match="unicode"):
        check_text("consumer", "a\ud800")
    assert check_text("settings", "x" * 300, max_bytes=300)
