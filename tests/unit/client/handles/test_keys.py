from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tdserve.base.errors import InvalidRequestError
from tdserve.client.handles.key_paths import check_path, to_path
from tests.errors import raises


@pytest.mark.parametrize(
    ("index", "path"),
    [
        ("a", ("a",)),
        (("a", "b"), ("a", "b")),
        (("a", ("b", "c")), ("a", "b", "c")),
        (np.str_("a"), ("a",)),
        (("a", 1), None),
        (("a", ("b", 1)), None),
        (("a", ()), None),
        ((), None),
        (0, None),
        (b"a", None),
    ],
)
def test_as_path_when_it_is_a_key_then_its_parts(index: Any, path: tuple[str, ...] | None) -> None:
    assert to_path(index) == path


def test_check_path_when_it_is_no_key_then_refused() -> None:
    assert check_path("a") == ("a",)
    with raises(InvalidRequestError, argument="new_key"):
        check_path(3, argument="new_key")
