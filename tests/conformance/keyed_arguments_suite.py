"""The tests of what keyed stores take as keys and versions, and what they refuse, over every transport."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch

import tdserve
from tests.conformance.keyed_suite import KeyedSuite
from tests.errors import raises

KEYS = ("a", "b", "c", "d", "e", "f")
"""Enough keys for each of three servers that share a store to have some."""

FORMS: dict[str, Callable[[Iterable[str]], Any]] = {
    "tuple": tuple,
    "dict": dict.fromkeys,
    "dict_keys": lambda keys: dict.fromkeys(keys).keys(),
    "generator": lambda keys: (key for key in keys),
}
"""Containers of several keys. A set has no order: it is tried where order does not matter."""

NO_KEYS: list[Any] = ["", "x" * 501, "\ud800", 3, b"a", None]
"""What no entry can have as a key."""


class KeyedArgumentsSuite(KeyedSuite):
    """The requirements of arguments. A subclass gives ``connect``."""

    @pytest.mark.parametrize("form", FORMS)
    def test_keys_when_given_as_any_iterable_then_as_a_list(self, client: tdserve.Client, name: str, form: str) -> None:
        kv, keys = client.create_kv(name), FORMS[form]
        versions = kv.put(keys(KEYS), [*range(6)])
        assert kv.get(keys(KEYS)) == [*range(6)]
        assert kv.versions(keys(KEYS)) == versions
        assert kv.get_with_versions(keys(KEYS)) == ([*range(6)], versions)
        assert kv.pop(keys(KEYS[:3])) == [0, 1, 2]
        assert kv.delete(keys(KEYS[3:]), versions[3:]) == 3
        assert len(kv) == 0

    def test_delete_when_the_keys_are_a_set_then_all_of_them(self, client: tdserve.Client, name: str) -> None:
        kv: Any = client.create_kv(name)
        kv.put(KEYS, [*range(6)])
        assert kv.delete({*KEYS[1:]}) == 5
        assert kv.keys() == ["a"]

    @pytest.mark.parametrize("num_versions", [0, 1, 4, 8])
    def test_change_when_versions_are_not_as_many_as_keys_then_refused_and_nothing_changed(
        self, client: tdserve.Client, name: str, num_versions: int
    ) -> None:
        kv = client.create_kv(name)
        given = [*kv.put(KEYS, [1] * 6), 0, 0][:num_versions]
        for change in (lambda: kv.delete(KEYS, given), lambda: kv.put(KEYS, [2] * 6, given)):
            with pytest.raises(tdserve.InvalidRequestError, match=f"if_version: {num_versions} versions for 6 keys"):
                change()
        assert kv.get(KEYS) == [1] * 6

    @pytest.mark.parametrize("version", [-1, 0.5, "1", True, torch.tensor([0, 0])], ids=str)
    def test_change_when_a_version_is_none_then_refused_and_nothing_changed(
        self, client: tdserve.Client, name: str, version: Any
    ) -> None:
        kv = client.create_kv(name)
        versions = kv.put(KEYS, [1] * 6)
        for given in (version, [*versions[:5], version]):
            for change in (lambda: kv.delete(KEYS, given), lambda: kv.put(KEYS, [2] * 6, given)):  # noqa: B023
                with raises(tdserve.InvalidRequestError, argument="if_version"):
                    change()
        assert kv.get(KEYS) == [1] * 6

    def test_put_when_one_version_is_for_all_then_any_integer(self, client: tdserve.Client, name: str) -> None:
        kv = client.create_kv(name)
        kv.put(KEYS[:3], [1, 2, 3], np.int64(0))
        kv.put(KEYS[3:], [1, 2, 3], 0)
        with pytest.raises(tdserve.VersionConflictError):
            kv.put(KEYS[5:], [4], np.int64(0))
        assert kv.get(KEYS) == [1, 2, 3, 1, 2, 3]

    @pytest.mark.parametrize("wrong", NO_KEYS, ids=lambda key: repr(key)[:9])
    def test_call_when_one_of_its_keys_can_be_none_then_refused_and_nothing_changed(
        self, client: tdserve.Client, name: str, wrong: Any
    ) -> None:
        kv = client.create_kv(name)
        kv.put(KEYS, [1] * 6)
        keys: Any = [*KEYS, wrong]
        calls: list[Callable[[], Any]] = [
            lambda: kv.put(keys, [2] * 7),
            lambda: kv.delete(keys),
            lambda: kv.delete(keys, missing_ok=True),
            lambda: kv.pop(keys, None),
            lambda: kv.get(keys),
            lambda: kv.versions(keys),
        ]
        for call in calls:
            with pytest.raises(tdserve.InvalidRequestError, match="invalid key: "):
                call()
        assert kv.get(KEYS) == [1] * 6
        assert wrong not in kv

    @pytest.mark.parametrize("wrong", [3, b"a", None])
    def test_call_when_the_keys_are_neither_one_nor_several_then_refused(
        self, client: tdserve.Client, name: str, wrong: Any
    ) -> None:
        kv = client.create_kv(name)
        for call in (kv.get, kv.delete, kv.pop, kv.versions, lambda keys: kv.put(keys, [1])):
            with pytest.raises(tdserve.InvalidRequestError, match=r"keys: .* is neither a str nor a list of str"):
                call(wrong)

    def test_call_when_there_are_no_keys_then_nothing(self, client: tdserve.Client, name: str) -> None:
        kv = client.create_kv(name)
        assert kv.put([], []) == []
        assert kv.put([], [], return_early=True).result(30.0) == []
        assert (kv.get([]), kv.get_with_versions([]), kv.pop([]), kv.versions([])) == ([], ([], []), [], [])
        assert kv.delete([]) == 0
