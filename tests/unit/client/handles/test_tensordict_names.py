from __future__ import annotations

import pytest

from tdserve.client.handles.tensordict_names import (
    ASSIGNED,
    Kind,
    find_argument,
    find_kind,
    is_inplace_wanted,
    is_property,
)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("sum", Kind.READ),
        ("add_", Kind.REWRITE),
        ("load_state_dict", Kind.REWRITE),
        ("from_dict", Kind.CONSTRUCTOR),
        ("depth", Kind.STRUCTURE),
        ("is_cuda", Kind.STRUCTURE),
        ("detach_", Kind.UNCHANGED),
        ("share_memory_", Kind.REFUSED),
        ("_get_str", None),
        ("sumn", None),
    ],
)
def test_kind_when_asked_then_as_in_the_table(name: str, kind: Kind | None) -> None:
    assert find_kind(name) is kind


def test_property_when_asked_then_distinguished_from_methods() -> None:
    assert is_property("grad")
    assert not is_property("sum")


def test_inplace_when_said_in_any_way_then_found() -> None:
    assert is_inplace_wanted("apply", (abs,), {"inplace": True})
    assert is_inplace_wanted("flatten_keys", (".", True), {})
    assert not is_inplace_wanted("flatten_keys", (".", False), {})
    assert not is_inplace_wanted("apply", (abs,), {"inplace": None})
    assert not is_inplace_wanted("to_module", (), {"inplace": True})
    assert not is_inplace_wanted("sum", (), {"unknown": 1})
    assert is_inplace_wanted("to", (float,), {"inplace": True})  # its signature does not name it


def test_argument_when_given_in_any_way_then_found() -> None:
    out = object()
    assert find_argument("gather", "out", (0, 1, out), {}) is find_argument("gather", "out", (), {"out": out}) is out
    assert find_argument("gather", "out", (0, 1), {}) is None
    assert find_argument("gather", "out", (0, 1, 2, 3, 4, 5, 6), {}) is None


def test_property_when_it_can_be_assigned_then_tensordict_has_it() -> None:
    assert all(map(is_property, ASSIGNED))
    assert not is_property("no name of it")
