"""The guide says of kinds and operations what the suite asserts, and the list of names names tests that there are."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.conformance.kind_groups import GROUPS, SHOWN, group_of, table
from tests.conformance.kinds import KINDS
from tests.conformance.operations import OPERATIONS
from tests.conformance.refused import NOTES, REFUSED

REPOSITORY = Path(__file__).parents[2]
LIST = Path(__file__).with_name("README.md")


def test_guide_when_compared_with_the_suite_then_has_its_table() -> None:
    assert table() in (REPOSITORY / "tdserve/guide/stores.md").read_text(), (
        "python -m tests.conformance.kind_groups prints it"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_kind_when_it_is_in_the_suite_then_has_a_row(kind: str) -> None:
    assert group_of(kind)


def test_groups_when_shown_then_each_once() -> None:
    assert sorted(number % len(GROUPS) for number in SHOWN) == list(range(len(GROUPS)))


def test_refusals_when_listed_then_of_kinds_operations_and_notes_that_there_are() -> None:
    for kind, refused in REFUSED.items():
        assert kind in KINDS or group_of(kind).endswith("torchrl")
        assert refused.keys() <= OPERATIONS.keys()
        assert set(refused.values()) <= NOTES.keys()


def named_tests() -> list[str]:
    """Every ``file::test`` that the list of names names."""
    return sorted(set(re.findall(r"`([\w/]+\.py::\w+)`", LIST.read_text())))


@pytest.mark.parametrize("named", named_tests())
def test_list_when_it_names_a_test_then_there_is_one(named: str) -> None:
    file, _, name = named.partition("::")
    tree = ast.parse((REPOSITORY / "tests" / file).read_text())
    assert any(isinstance(node, ast.FunctionDef) and node.name == name for node in ast.walk(tree))


def test_list_when_read_then_every_row_names_a_test() -> None:
    rows = [line for line in LIST.read_text().splitlines() if line.startswith("| `")]
    assert len(rows) > 60
    assert [row for row in rows if ".py::" not in row] == []
