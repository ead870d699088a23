"""The tests of a keyed store as a dict, over every transport."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tests.conformance.keyed_arguments_suite import KeyedArgumentsSuite
from tests.conformance.keyed_suite import assert_same, entries, entry
from tests.errors import raises

NUM_MANY = 2_500
"""More entries than an iterator reads in one call."""

NUM_EARLY = 20
"""Puts with an early return; some of them are still under way when the next call is made."""


def make_pair(number: int) -> torch.Tensor:
    """Returns a tensor that shows a number."""
    return torch.full((2,), number)


class KeyedMappingSuite(KeyedArgumentsSuite):
    """The requirements of keyed stores that are used as dicts. A subclass gives ``connect``."""

    def test_get_when_absent_and_a_default_is_given_then_that(self, client: tdserve.Client, name: str) -> None:
        kv = client.create_kv(name)
        kv.put(["a", "b"], [None, 2])
        assert [kv.get("a", default=5), kv.get("x", default=5), kv.get("x", default=None)] == [None, 5, None]
        assert kv.get(["x", "a", "y", "b", "x"], default=7) == [7, None, 7, 2, 7]
        assert kv.get(["x", "y"], default=0) == [0, 0]
        assert kv.get([], default=0) == []
        with raises(tdserve.InvalidRequestError, argument="default"):
            kv.get("x", timeout_s=1.0, default=0)
        kv["a"] = entry(1)
        with pytest.raises(tdserve.KeyNotFoundError):
            kv.get("a", select="no", default=0)

    def test_get_when_the_store_has_a_structure_and_a_default_is_given_then_a_list(
        self, client: tdserve.Client, name: str
    ) -> None:
        kv = client.create_kv(name, like=entry(0))
        kv.put(["a", "b"], entries(1, 2))
        first, second, third = kv.get(["b", "x", "a"], default=None)
        assert_same(first, entry(2))
        assert second is None
        assert_same(third, entry(1))

    def test_pop_when_absent_and_a_default_is_given_then_that(self, client: tdserve.Client, name: str) -> None:
        kv = client.create_kv(name)
        kv.put(["a", "b", "c"], [1, 2, 3])
        assert kv.pop("x", None) is None
        assert kv.pop("a", 9) == 1
        assert kv.pop("a", default=9) == 9
        assert kv.pop(["b", "x"], 0) == [2, 0]
        assert kv.pop(["x", "y"], 0) == [0, 0]
        assert kv.keys() == ["c"]
        with pytest.raises(tdserve.KeyNotFoundError):
            kv.pop("x")

    @pytest.mark.slow
    @pytest.mark.parametrize("like", [None, "tensordict", "tensor"])
    def test_items_when_many_then_each_entry_once_in_order(
        self, client: tdserve.Client, name: str, like: str | None
    ) -> None:
        makers: dict[str | None, Any] = {None: int, "tensordict": entry, "tensor": make_pair}
        make = makers[like]
        kv = client.create_kv(name, like=None if like is None else make(0))
        keys = [f"{number:05}" for number in range(NUM_MANY)]
        kv.put(keys, [make(number) for number in range(NUM_MANY)])
        found = kv.items()
        kv.delete(["00001", "02400"])
        kv.put("a", make(7))
        left = [key for key in keys if key not in ("00001", "02400")]
        for (key, value), expected in zip(found, left, strict=True):
            assert key == expected
            if int(key) % 100 == 0:
                assert_same(value, make(int(key)))
        assert [key for key, _ in kv.items(prefix="0249")] == keys[2490:2500]
        assert len(list(kv.values())) == NUM_MANY - 1
        assert_same(next(kv.values("a")), make(7))
        assert list(kv.items("none")) == []

    @pytest.mark.slow
    def test_items_when_entries_are_large_then_read_a_few_at_once(self, client: tdserve.Client, name: str) -> None:
        kv = client.create_kv(name)
        for number in range(8):
            kv[str(number)] = torch.full((1_000_000,), float(number))
        values = kv.values()
        assert next(values)[0] == 0
        for key in ("5", "6", "7"):
            del kv[key]
        assert [int(value[0]) for value in values] == [1, 2, 3, 4]

    def test_items_when_keys_are_selected_then_only_those(self, client: tdserve.Client, name: str) -> None:
        kv = client.create_kv(name)
        kv.put(["a", "b"], entries(1, 2))
        assert [set(value.keys()) for value in kv.values(select="x")] == [{"x"}, {"x"}]

    def test_keys_when_given_by_an_iterator_then_as_by_a_list(self, client: tdserve.Client, name: str) -> None:
        kv: Any = client.create_kv(name)
        assert len(kv.put(iter("abc"), [1, 2, 3])) == 3
        assert kv.get(key for key in "ab") == [1, 2]
        assert kv.get(iter("ax"), default=0) == [1, 0]
        assert kv.get_with_versions(iter("ab"))[0] == [1, 2]
        assert kv.pop(iter("ab")) == [1, 2]
        assert kv.keys() == ["c"]

    def test_update_when_done_then_all_are_there(self, client: tdserve.Client, name: str) -> None:
        kv = client.create_kv(name)
        kv.update({"a": 1, "b": {"t": torch.zeros(2), "n": 0.1}}, c=3)
        kv.update([("c", 4), ("d", 5)])
        kv.update()
        assert dict(kv.items("c")) == {"c": 4}
        assert kv["b"]["n"] == 0.1
        assert sorted(kv) == ["a", "b", "c", "d"]

    def test_setdefault_when_absent_then_put_and_else_kept(self, client: tdserve.Client, name: str) -> None:
        kv = client.create_kv(name)
        assert (kv.setdefault("a", 1), kv.setdefault("a", 2), kv["a"]) == (1, 1, 1)
        assert kv.setdefault("n") is None
        assert kv.setdefault("n", 3) is None

    @pytest.mark.slow
    def test_clear_when_done_then_empty(self, client: tdserve.Client, name: str) -> None:
        kv: Any = client.create_kv(name, like=TensorDict({"x": torch.zeros(1)}, []))
        for prefix in "ab":
            kv.put([f"{prefix}{number}" for number in range(9_000)], TensorDict({"x": torch.zeros(9_000, 1)}, [9_000]))
        kv.clear()
        assert (len(kv), list(kv.items())) == (0, [])
        kv.clear()

    def test_clear_when_a_put_with_an_early_return_was_before_then_empty(
        self, client: tdserve.Client, name: str
    ) -> None:
        kv = client.create_kv(name)
        for number in range(NUM_EARLY):
            put = [kv.put(f"{key}{number}", torch.zeros(1000), return_early=True) for key in "ab"]
            kv.clear()
            assert [each.done() for each in put] == [True, True]
            assert (kv.keys(), len(kv)) == ([], 0)

    def test_pop_when_a_key_is_named_twice_then_its_value_twice(self, client: tdserve.Client, name: str) -> None:
        kv = client.create_kv(name)
        kv.put(["a", "b"], [1, 2])
        assert kv.pop(["a", "b", "a", "none"], None) == [1, 2, 1, None]
        assert len(kv) == 0
        with pytest.raises(tdserve.KeyNotFoundError):
            kv.pop(["a", "a"])

    def test_keys_when_a_prefix_is_longer_than_any_key_then_none(self, client: tdserve.Client, name: str) -> None:
        kv = client.create_kv(name)
        kv.put("x" * 500, 1)
        assert kv.keys("x" * 500) == ["x" * 500]
        assert kv.keys("x" * 501) == []
        assert list(kv.items("é" * 251)) == []
