from __future__ import annotations

import click
import pytest

from tdserve.cli.stores.ls import KINDS, ls
from tdserve.messages.store_kinds import KIND_NUMBERS, QUEUE


def test_kinds_when_listed_then_those_of_all_stores_but_the_records_of_shared_ones() -> None:
    assert {*KINDS} == {*KIND_NUMBERS, QUEUE} - {"placement"}


def test_kind_when_unknown_in_a_list_then_the_error_names_it_and_those_that_there_are() -> None:
    with pytest.raises(click.BadParameter, match=r"'table' is not one of 'tensordict', .*'kv'"):
        ls.make_context("ls", ["--kind", "kv,table"])


def test_kind_when_completed_then_after_the_last_comma() -> None:
    (option,) = (each for each in ls.params if each.name == "kinds")
    found = option.shell_complete(click.Context(ls), "queue,k")
    assert [each.value for each in found] == ["queue,keyed", "queue,kv"]
