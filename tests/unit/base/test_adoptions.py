from __future__ import annotations

import pytest

from tdserve.base.adoptions import parse_adoptions, parse_folders, split_adoption
from tdserve.base.errors import InvalidRequestError


def test_split_adoption_when_well_formed_then_path_name_and_whether_read_only() -> None:
    assert split_adoption("/a=b/c=name") == ("/a=b/c", "name", False)
    assert split_adoption("/a=name:ro") == ("/a", "name", True)


@pytest.mark.parametrize(
    ("text", "argument"), [("/a", "adopt"), ("a=x", "adopt"), ("/a,b=x", "adopt"), ("/a=.x", "store name")]
)
def test_split_adoption_when_it_is_none_then_error(text: str, argument: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        split_adoption(text)
    assert caught.value.argument == argument


def test_parse_when_several_are_given_then_each_is_absolute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/usr")
    assert parse_folders("/a:lib:") == ("/a", "/usr/lib")
    assert parse_adoptions("/a=x,lib=y:ro,") == ("/a=x", "/usr/lib=y:ro")
    assert parse_folders("") == parse_adoptions("") == ()
