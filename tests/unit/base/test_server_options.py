"""tdserve/base/server_options.py: the table has every option once."""

from __future__ import annotations

import dataclasses

from tdserve.base.config import ServerConfig
from tdserve.base.server_options import SERVER_OPTIONS


def test_options_when_listed_then_are_the_fields_of_the_settings() -> None:
    names = [option.name for option in SERVER_OPTIONS]
    assert sorted(names) == sorted(each.name for each in dataclasses.fields(ServerConfig))


def test_options_when_listed_then_each_has_a_flag_of_its_own_and_only_the_root_has_none() -> None:
    flags = [option.flag for option in SERVER_OPTIONS]
    assert len(set(flags)) == len(flags)
    assert [option.name for option in SERVER_OPTIONS if not option.flag] == ["root"]
    assert all(option.help.endswith(".") for option in SERVER_OPTIONS)
