from __future__ import annotations

import pytest

from tdserve.client.handles.tensordict_names import Kind, is_property, kind_of, wants_inplace


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
def test_kind_when_asked_then_as_the_table_says(name: str, kind: Kind | None) -> None:
    assert kind_of(name) is kind


def test_property_when_asked_then_told_from_methods() -> None:
    assert is_property("grad")
    assert not is_property("sum")


def test_inplace_when_said_in_any_way_then_found() -> None:
    assert wants_inplace("apply", (abs,), {"inplace": True})
    assert wants_inplace("flatten_keys", (".", True), {})
    assert not wants_inplace("flatten_keys", (".", False), {})
    assert not wants_inplace("apply", (abs,), {"inplace": None})
    assert not wants_inplace("to_module", (), {"inplace": True})
    assert not wants_inplace("sum", (), {"unknown": 1})
