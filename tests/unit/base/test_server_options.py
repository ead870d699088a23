"""tdserve/base/server_options.py: the table has every option once."""

from __future__ import annotations

import dataclasses

import pytest

from tdserve.base.config import ServerConfig
from tdserve.base.server_options import SERVER_OPTIONS, parse_duration


def test_options_when_listed_then_are_the_fields_of_the_settings() -> None:
    names = [option.name for option in SERVER_OPTIONS]
    assert sorted(names) == sorted(each.name for each in dataclasses.fields(ServerConfig))


def test_options_when_listed_then_each_has_a_flag_of_its_own_and_only_the_root_has_none() -> None:
    flags = [option.flag for option in SERVER_OPTIONS]
    assert len(set(flags)) == len(flags)
    assert [option.name for option in SERVER_OPTIONS if not option.flag] == ["root"]
    assert all(option.help.endswith(".") for option in SERVER_OPTIONS)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90.0), ("0.5s", 0.5), (" 10min ", 600.0), ("2m", 120.0), ("1.5 h", 5400.0), ("1D", 86_400.0)],
)
def test_duration_when_it_has_a_unit_then_seconds(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "s", "10 weeks", "1h30m", "ten"])
def test_duration_when_it_is_none_then_refused(text: str) -> None:
    with pytest.raises((ValueError, KeyError)):
        parse_duration(text)
