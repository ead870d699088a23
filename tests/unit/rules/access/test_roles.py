"""tdserve/rules/access/roles.py: the table is complete, and each request needs the role that the guide names."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tdserve.rules.access.roles import CALLS, REQUESTS, Role, find_need
from tdserve.v1 import control_pb2


def list_fields(message: Any, oneof: str) -> list[str]:
    """Returns the names of the fields of a oneof."""
    return [field.name for field in message.oneofs_by_name[oneof].fields]


def list_steps(kind: str, message: Any, oneof: str) -> list[Any]:
    """Returns an example of a request for each field of its oneof."""
    return [_make(message, step) for step in list_fields(message.DESCRIPTOR, oneof)]


def _make(message: Any, step: str) -> Any:
    made = message()
    field = message.DESCRIPTOR.fields_by_name[step]
    if field.message_type is not None:
        getattr(made, step).SetInParent()
    else:
        setattr(made, step, {field.CPPTYPE_BOOL: True, field.CPPTYPE_STRING: "x"}.get(field.cpp_type, 1))
    return made


def test_table_when_compared_with_the_protocol_then_has_every_message_of_a_client() -> None:
    assert set(REQUESTS) == set(list_fields(control_pb2.ClientMessage.DESCRIPTOR, "body"))


def test_table_when_compared_with_the_service_then_has_every_call() -> None:
    methods = control_pb2.DESCRIPTOR.services_by_name["ControlService"].methods
    assert set(CALLS) == {re.sub(r"(?<!^)(?=[A-Z])", "_", method.name).lower() for method in methods}


@pytest.mark.parametrize(
    ("kind", "message", "oneof"),
    [("catalog", control_pb2.CatalogRequest, "body"), ("move", control_pb2.MoveRequest, "step")],
)
def test_table_when_a_request_has_steps_then_has_every_one(kind: str, message: Any, oneof: str) -> None:
    assert set(REQUESTS[kind].steps) == set(list_fields(message.DESCRIPTOR, oneof))
    for asked in list_steps(kind, message, oneof):
        assert find_need(kind, asked).role in Role


def test_table_when_a_request_names_a_store_then_the_name_is_checked() -> None:
    """Whatever field of a request is the name of a store, its need has it."""
    for kind in REQUESTS:
        message: Any = type(getattr(control_pb2.ClientMessage(), kind))
        if not isinstance(message, type) or not hasattr(message, "DESCRIPTOR"):
            continue
        fields = {field.name for field in message.DESCRIPTOR.fields}
        for name in fields & {"store", "name"}:
            assert "a store" in find_need(kind, message(**{name: "a store"})).stores, kind


def test_need_when_the_kind_is_unknown_then_only_an_admin_may() -> None:
    assert find_need("from the future", None).role is Role.ADMIN
    assert find_need("move", control_pb2.MoveRequest()).role is Role.ADMIN
    assert find_need("catalog", control_pb2.CatalogRequest()).role is Role.ADMIN


READING = ("read", "latest", "get", "list")
WRITING = ("write", "extend", "publish", "change", "alter", "put", "remove", "end_filling")


@pytest.mark.parametrize(("kinds", "role"), [(READING, Role.READ), (WRITING, Role.WRITE)])
def test_need_when_a_request_reads_or_writes_then_role_and_store(kinds: tuple[str, ...], role: Role) -> None:
    for kind in kinds:
        message: Any = type(getattr(control_pb2.ClientMessage(), kind))
        assert find_need(kind, message(store="s")) == (role, ("s",), kind, False)


def test_need_when_stores_come_and_go_then_write_and_admin() -> None:
    asks: dict[str, tuple[Any, Role]] = {
        "create_store": (control_pb2.CreateStoreRequest(name="s"), Role.WRITE),
        "delete_store": (control_pb2.DeleteStoreRequest(name="s"), Role.ADMIN),
        "adopt": (control_pb2.AdoptRequest(name="s", path="/x"), Role.ADMIN),
        "move": (control_pb2.MoveRequest(store="s", seal=True), Role.ADMIN),
    }
    for kind, (asked, role) in asks.items():
        assert find_need(kind, asked) == (role, ("s",), kind, False)


def test_need_when_a_sample_leases_its_rows_then_write() -> None:
    assert find_need("sample", control_pb2.SampleRequest(store="s")).role is Role.READ
    assert find_need("sample", control_pb2.SampleRequest(store="s", is_lease=True)).role is Role.WRITE
    ranks = control_pb2.SampleRequest(store="s", share=control_pb2.RankShare(world_size=2))
    assert find_need("sample", ranks).role is Role.WRITE


def test_need_when_a_question_is_asked_over_a_session_then_as_by_a_call() -> None:
    asked = control_pb2.CatalogRequest(list_keys=control_pb2.ListKeysRequest(name="s"))
    assert (
        find_need("catalog", asked)
        == find_need("list_keys", asked.list_keys)
        == (Role.READ, ("s",), "list_keys", False)
    )
    assert find_need("catalog", control_pb2.CatalogRequest(list_stores={})).stores == ()


def test_need_when_a_write_creates_a_store_then_both_names_count() -> None:
    asked = control_pb2.WriteRequest(store="a", new_store=control_pb2.CreateStoreRequest(name="b"))
    assert set(find_need("write", asked).stores) == {"a", "b"}


@pytest.mark.parametrize(
    ("settings", "stores"),
    [('{"policy": "weights"}', ("s", "weights")), ("{}", ("s",)), ("[]", ("s",)), ("{", ("s",)), ("", ("s",))],
)
def test_need_when_a_table_follows_weights_then_their_name_counts(settings: str, stores: tuple[str, ...]) -> None:
    assert find_need("create_store", control_pb2.CreateStoreRequest(name="s", settings=settings)).stores == stores
