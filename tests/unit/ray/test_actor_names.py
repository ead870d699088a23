from __future__ import annotations

from typing import Any

import pytest

from tdserve.base.errors import InvalidRequestError

pytest.importorskip("ray")

from tdserve.ray.actor_names import check_name, make_actor_name, parse_actor_name


@pytest.mark.parametrize("name", ["tdserve", "a-b.c_1"])
def test_name_when_made_then_parsed_again(name: str) -> None:
    assert parse_actor_name(make_actor_name(check_name(name), 2, 3)) == (name, 2, 3)


@pytest.mark.parametrize("text", ["", "a", "a/1", "a/1/", "a/b/c", "/1/2", "a/1/2/3", "a/-1/2"])
def test_name_when_of_another_actor_then_none(text: str) -> None:
    assert parse_actor_name(text) is None


@pytest.mark.parametrize("name", ["", "a/b", "a b", "-a", "a" * 200, 5, None])
def test_name_when_it_cannot_stand_in_an_address_then_refused(name: Any) -> None:
    with pytest.raises(InvalidRequestError):
        check_name(name)
