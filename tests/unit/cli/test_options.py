"""tdserve/cli/options.py: the token file."""

from __future__ import annotations

from pathlib import Path

import pytest

from tdserve.cli.options import read_token
from tdserve.errors import InvalidRequestError


def test_token_when_file_ends_with_a_line_feed_then_it_is_no_part_of_it(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    assert read_token(tmp_path / "token") == "secret"


@pytest.mark.parametrize(("content", "reason"), [(b"", "empty"), (b" \n", "empty"), (b"\xff\xfe", "cannot read")])
def test_token_when_file_holds_none_then_error_names_the_file(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "token").write_bytes(content)
    with pytest.raises(InvalidRequestError, match=reason) as caught:
        read_token(tmp_path / "token")
    assert str(tmp_path / "token") in caught.value.reason


def test_token_when_file_is_missing_then_error_names_it(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="missing"):
        read_token(tmp_path / "missing")
