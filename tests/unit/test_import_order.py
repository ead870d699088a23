"""The scanner of the orders that packages promise, on promises kept, broken, incomplete, or made in other words."""

from __future__ import annotations

import pytest

from tests import house
from tests.import_order import order_faults

MODULES = {"t.p.a": "import t.p.b.x", "t.p.b": "", "t.p.b.x": "from t.p import c", "t.p.c": "", "t.p.d": "import t.p.a"}
"""``a`` imports a module of the room ``b``, which imports ``c``; and ``d`` imports ``a``."""


def find_faults(docstring: str) -> list[str]:
    """Returns what the scanner finds in a package with this docstring."""
    sources = {"t.p": f"{docstring!r}", **MODULES}
    return order_faults(
        [house.parse(name, text, is_package=name in ("t.p", "t.p.b")) for name, text in sources.items()]
    )


@pytest.mark.parametrize(
    "docstring",
    [
        "A package.",
        "Its rooms, of which each imports only those before it: ``c``, ``b`` (more), ``a``; ``d``.",
        "Read from the top; each imports only\nthose after it:\n\n1. ``d``, then ``a``.\n2. ``b``, ``c``\n\nSee ``d``.",
        "Of these each imports only those before it: ``c``, ``d``.",
        "See ``c``. Of these each imports only those after it: ``a``, ``c``, see ``b.x``.\n\nLater ``b``.\n\n``d``",
        "It must be set before that is imported. Importing it does nothing. It comes after it.",
    ],
)
def test_order_when_it_is_kept_or_not_promised_then_nothing_is_found(docstring: str) -> None:
    assert find_faults(docstring) == []


@pytest.mark.parametrize(
    ("docstring", "finding"),
    [
        ("Each imports only those: each imports only those before it: ``a``, ``c``, ``b``.", "t.p.a:1: a imports b,"),
        (
            "Of these each imports only those after it:\n\n1. ``c``\n2. ``b``",
            "t.p.b.x:1: b imports c, which is not after",
        ),
        ("Of these each imports only those before it: ``d`` and ``a``", "t.p.d:1: d imports a, which is not before it"),
        ("Of these each imports only those before it.\n\n``c``, ``b``.", "t.p: promises an order, and names none"),
        (
            "Of these each imports only those before it: ``b``, ``a``.\n\nSee ``c``.",
            "b.x:1: b imports c, which the promise of t.p omits",
        ),
        ("Its rooms import one another downwards: ``c``, ``b``.", "t.p: say 'each imports only those before it'"),
        ("Its rooms, each of which imports only rooms before it.", "t.p: say 'each imports only those before it'"),
    ],
)
def test_order_when_an_import_breaks_it_or_other_words_promise_it_then_it_is_found(
    docstring: str, finding: str
) -> None:
    faults = find_faults(docstring)
    assert len(faults) == 1
    assert finding in faults[0]
