"""tdserve/rules/access/grants.py: what a token grants."""

from __future__ import annotations

import pytest

from tdserve.base.errors import PermissionDeniedError
from tdserve.rules.access.grants import FULL_GRANT, Grant, Limits
from tdserve.rules.access.roles import Role
from tdserve.v1 import control_pb2

READ = control_pb2.ReadRequest(store="replay-1")
EXTEND = control_pb2.ExtendRequest(store="replay-1")
DELETE = control_pb2.DeleteStoreRequest(name="replay-1")


@pytest.mark.parametrize(
    ("role", "denied"), [(Role.READ, ["extend", "delete_store"]), (Role.WRITE, ["delete_store"]), (Role.ADMIN, [])]
)
def test_check_when_the_role_is_too_low_then_denied_with_the_role_that_is_needed(role: Role, denied: list[str]) -> None:
    grant = Grant("t", role, ("replay*",))
    for kind, asked, needed in (("read", READ, ""), ("extend", EXTEND, "write"), ("delete_store", DELETE, "admin")):
        if kind not in denied:
            grant.check(kind, asked)
            continue
        with pytest.raises(PermissionDeniedError) as caught:
            grant.check(kind, asked)
        expected = {"role": role.label, "call": kind, "store": "replay-1", "needed": needed, "scope": ""}
        assert caught.value.fields == expected


@pytest.mark.parametrize(
    ("stores", "text"),
    [
        (("*",), r"'change' \(update_priority, .* on store 's' needs"),
        (("other",), r"'change' \(update_priority, .* refused"),
    ],
)
def test_check_when_a_request_has_another_name_than_its_methods_then_the_error_lists_them(
    stores: tuple[str, ...], text: str
) -> None:
    with pytest.raises(PermissionDeniedError, match=text):
        Grant("t", Role.READ, stores).check("change", control_pb2.ChangeRequest(store="s"))


@pytest.mark.parametrize("role", list(Role))
def test_check_when_the_store_is_not_included_then_denied_whatever_the_role(role: Role) -> None:
    with pytest.raises(PermissionDeniedError, match="includes no store 'replay-1'") as caught:
        Grant("t", role, ("other*", "replay")).check("delete_store", DELETE)
    assert caught.value.needed == ""
    assert not caught.value.retryable


@pytest.mark.parametrize(
    ("patterns", "name", "has"),
    [
        (("a*", "b"), "abc", True),
        (("a*", "b"), "b", True),
        (("a*", "b"), "bc", False),
        (("A*",), "abc", False),
        (("replay-[0-9]",), "replay-7", True),
        (("?",), "ab", False),
        ((), "a", False),
    ],
)
def test_has_store_when_asked_then_as_the_patterns_match(patterns: tuple[str, ...], name: str, has: bool) -> None:
    assert Grant("t", Role.READ, patterns).has_store(name) is has


@pytest.mark.parametrize(("stores", "is_granted"), [(("*",), True), (("replay*", "?*"), False)])
def test_check_when_a_request_is_about_all_stores_then_only_an_admin_of_all(
    stores: tuple[str, ...], is_granted: bool
) -> None:
    asked = control_pb2.CheckpointRequest(freeze=1)
    if is_granted:
        Grant("t", Role.ADMIN, stores).check("checkpoint", asked)
        return
    with pytest.raises(PermissionDeniedError, match="role 'admin' of all stores, and this one has 'admin' of some"):
        Grant("t", Role.ADMIN, stores).check("checkpoint", asked)


def test_full_grant_when_asked_for_anything_then_given() -> None:
    FULL_GRANT.check("delete_store", DELETE)
    FULL_GRANT.check("from the future", None)
    assert FULL_GRANT.is_full
    assert FULL_GRANT.is_server_wide


@pytest.mark.parametrize(
    "grant",
    [Grant("t", Role.WRITE), Grant("t", Role.ADMIN, ("a*",)), Grant("t", Role.ADMIN, limits=Limits(sessions=1))],
)
def test_grant_when_anything_is_limited_then_not_full(grant: Grant) -> None:
    assert not grant.is_full


def test_repr_when_shown_then_without_the_key() -> None:
    assert "secret" not in repr(Grant("t", key=b"secret"))
