"""The tests that keyed stores must pass over every transport: a class provides ``connect`` and inherits the tests."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict

import tdserve
from tests.conformance.suite import Connect, Suite
from tests.errors import raises
from tests.processes import wait_for

LARGE = 1_000_000
"""Elements of a tensor whose content does not fit into messages."""


def entry(number: int) -> TensorDict:
    """Returns an entry that shows its number in every leaf."""
    return TensorDict({"x": torch.full((3,), float(number)), "n": {"y": torch.tensor(number)}}, [])


def entries(*numbers: int) -> Any:
    """Returns several entries as rows."""
    return torch.stack([entry(number) for number in numbers])


def assert_same(found: Any, expected: Any) -> None:
    """Checks that type and content are equal."""
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    elif isinstance(expected, np.ndarray):
        assert found.dtype == expected.dtype
        assert np.array_equal(found, expected)
    elif isinstance(expected, LazyStackedTensorDict):
        for row, own in zip(found.tensordicts, expected.tensordicts, strict=True):
            assert_same(row, own)
    elif hasattr(expected, "batch_size"):
        assert found.batch_size == expected.batch_size
        assert set(found.keys(True, True)) == set(expected.keys(True, True))
        for key in expected.keys(True, True):
            assert_same(found[key], expected[key])
    else:
        assert type(found) is type(expected)
        assert found == expected


VALUES = [
    torch.tensor(1.5),
    torch.zeros(0, 3, dtype=torch.int64),
    torch.rand(5).bfloat16(),
    torch.tensor([1 + 2j, 3.0]),
    entry(3),
    TensorDict({}, [2]),
    TensorDict({"text": "ä", "t": torch.arange(4)}, []),
    LazyStackedTensorDict(TensorDict({"a": torch.ones(2)}, []), TensorDict({"a": torch.ones(3)}, [])),
    None,
    True,
    2**40,
    0.5,
    "text",
    b"bytes",
    [1, "two", None],
    {"a": (1, 2)},
    np.arange(6).reshape(2, 3),
    torch.arange(LARGE),
]


@pytest.mark.integration
class KeyedSuite(Suite):
    """The requirements of keyed stores. A subclass gives ``connect``, which returns a fresh client of one server."""

    # ------------------------------------------------------------ content

    @pytest.mark.slow
    @pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
    def test_put_when_anything_then_comes_out_equal(
        self, connect: Connect, client: tdserve.Client, name: str, value: Any
    ) -> None:
        kv = client.create_kv(name)
        kv.put("key", value)
        with connect() as other:
            assert_same(other.kv(name)["key"], value)
        assert_same(kv.get(["key"])[0], value)

    def test_put_when_several_of_any_structure_then_a_list(self, client: tdserve.Client, name: str) -> None:
        kv = client.create_kv(name)
        kv.put(["a", "b", "c"], [1, "two", entry(3)])
        first, second, third = kv.get(["c", "a", "b"])
        assert_same(first, entry(3))
        assert (second, third) == (1, "two")
        kv.put(["d", "e"], entries(4, 5))
        assert_same(kv["e"], entry(5))

    @pytest.mark.slow
    @pytest.mark.parametrize("return_early", [False, True])
    def test_put_when_columns_of_tensors_and_values_then_each_comes_out_equal(
        self, client: tdserve.Client, name: str, return_early: bool
    ) -> None:
        kv = client.create_kv(name)
        large, small = torch.rand(16, 2048), torch.arange(32, dtype=torch.int16).view(16, 2)
        values = [*large, *small, *map(str, range(16))]
        expected = [value.clone() if isinstance(value, torch.Tensor) else value for value in values]
        keys = [str(number) for number in range(48)]
        done = kv.put(keys, values, return_early=return_early)
        large.zero_()
        versions = done.result() if return_early else done
        found = kv.get(keys)
        for value, wanted in zip(found, expected, strict=True):
            assert_same(value, wanted)
        assert kv.put(keys[:16], torch.ones(16, 3)) == list(range(versions[-1] + 1, versions[-1] + 17))
        assert_same(kv["15"], torch.ones(3))
        client.delete(name)

    @pytest.mark.slow
    @pytest.mark.parametrize("num_keys", [1, 3, 5_000])
    def test_put_when_like_then_one_stacked_tensordict(self, client: tdserve.Client, name: str, num_keys: int) -> None:
        kv = client.create_kv(name, like=entry(0))
        rows = TensorDict({"x": torch.rand(num_keys, 3), "n": {"y": torch.arange(num_keys)}}, [num_keys])
        keys = [f"key/{number}" for number in range(num_keys)]
        kv.put(keys, rows)
        assert_same(kv.get(keys), rows)
        assert_same(kv[keys[-1]], rows[-1])
        assert_same(kv.get(keys, select=[("n", "y")]), rows.select(("n", "y")))
        kv[keys[0]] = entry(7)
        assert_same(kv[keys[0]], entry(7))

    def test_put_when_like_is_a_tensor_then_tensors(self, client: tdserve.Client, name: str) -> None:
        kv = client.create_kv(name, like=torch.zeros(2))
        kv.put(["a", "b"], torch.arange(4.0).view(2, 2))
        assert_same(kv["b"], torch.tensor([2.0, 3.0]))
        assert_same(kv.get(["b", "a"]), torch.tensor([[2.0, 3.0], [0.0, 1.0]]))

    def test_put_when_like_has_values_then_equal(self, client: tdserve.Client, name: str) -> None:
        def make(number: int) -> TensorDict:
            return TensorDict({"text": f"text {number}", "t": torch.tensor(number)}, [])

        kv = client.create_kv(name, like=make(0))
        kv.put(["a", "b"], [make(1), make(2)])
        assert kv["b"]["text"] == "text 2"
        found = kv.get(["b", "a"])
        assert found["t"].tolist() == [2, 1]
        assert list(found["text"]) == ["text 2", "text 1"]

    def test_put_when_it_does_not_fit_then_refused_and_nothing_changes(self, client: tdserve.Client, name: str) -> None:
        kv = client.create_kv(name, like=entry(0))
        kv.put("a", entry(1))
        for wrong in (TensorDict({"x": torch.zeros(4)}, []), torch.zeros(3), 5):
            with pytest.raises(tdserve.SpecMismatchError):
                kv.put("a", wrong)
        with pytest.raises(tdserve.InvalidRequestError):
            kv.put(["a", "b", "c"], entries(1, 2))
        wrong_keys: list[Any] = ["", "x" * 501, 5, "\ud800"]
        for key in wrong_keys:
            with pytest.raises(tdserve.InvalidRequestError):
                kv.put(key, entry(1))
        assert_same(kv["a"], entry(1))
        assert kv.keys() == ["a"]

    def test_put_when_pickle_is_not_allowed_then_refused(self, client: tdserve.Client, name: str) -> None:
        kv = client.create_kv(name)
        with pytest.raises(tdserve.NotSupportedError):
            kv.put("a", object())
        assert len(kv) == 0

    # ------------------------------------------------------------ versions

    def test_put_when_its_future_is_cancelled_then_it_goes_on_and_so_do_later_ones(
        self, client: tdserve.Client, name: str
    ) -> None:
        kv = client.create_kv(name)
        assert not kv.put("a", 1, return_early=True).cancel()
        later = [kv.put(f"b/{number}", number, return_early=True) for number in range(20)]
        assert len({future.result(30.0) for future in later}) == 20
        assert kv["a"] == 1

    @pytest.mark.parametrize(
        ("value", "hint"),
        [({"w": torch.empty(2, device="meta")}, "meta"), (torch.empty(2, device="meta"), "meta")],
    )
    def test_put_when_it_cannot_be_stored_then_the_error_names_the_remedy(
        self, client: tdserve.Client, name: str, value: Any, hint: str
    ) -> None:
        kv = client.create_kv(name)
        with pytest.raises(tdserve.NotSupportedError, match=hint):
            kv.put("a", value)
        assert len(kv) == 0

    @pytest.mark.parametrize(
        "limit",
        [{"max_bytes": 0}, {"max_bytes": "1"}, {"ttl_s": 0.0}, {"ttl_s": -1.0}, {"ttl_s": "3"}, {"ttl_s": True}],
    )
    def test_create_when_a_limit_is_no_number_above_zero_then_refused(
        self, client: tdserve.Client, name: str, limit: dict[str, Any]
    ) -> None:
        with pytest.raises(tdserve.InvalidRequestError):
            client.create_kv(name, **limit)
        assert name not in client

    def test_arguments_when_they_are_of_another_type_then_refused(self, client: tdserve.Client, name: str) -> None:
        kv: Any = client.create_kv(name)
        kv["a"] = entry(1)
        for prefix in (5, None, b"a"):
            with raises(tdserve.InvalidRequestError, argument="prefix"):
                kv.keys(prefix)
        with pytest.raises(tdserve.InvalidRequestError):
            kv.keys("\ud800")
        with pytest.raises(tdserve.InvalidRequestError):
            kv.get("a", select=5)
        with pytest.raises(tdserve.InvalidRequestError, match="b'a' is neither a str nor a list of str"):
            kv.get(b"a")
        assert [key in kv for key in ("", "k" * 501, "\ud800", 5)] == [False] * 4
        with pytest.raises(tdserve.KeyNotFoundError, match=r"client\.kv\(.*\)\.keys\(\) lists its keys"):
            kv.get("b")

    def test_put_when_conditional_then_compares_and_sets(self, client: tdserve.Client, name: str) -> None:
        kv = client.create_kv(name)
        first = kv.put("a", 1, if_version=0)
        assert first > 0
        with pytest.raises(tdserve.VersionConflictError) as caught:
            kv.put("a", 2, if_version=0)
        assert (caught.value.key, caught.value.expected, caught.value.actual) == ("a", 0, first)
        second = kv.put("a", 2, if_version=first)
        assert second > first
        with pytest.raises(tdserve.VersionConflictError):
            kv.put(["b", "a"], [0, 0], if_version=[0, first])
        assert kv.keys() == ["a"]
        assert kv.get_with_versions("a") == (2, second)
        kv.delete("a")
        kv.put("a", 3)
        with pytest.raises(tdserve.VersionConflictError):
            kv.delete("a", if_version=second)
        assert kv.versions(["a", "b"]) == [kv.versions("a"), 0]

    def test_put_when_several_then_a_version_for_each(self, client: tdserve.Client, name: str) -> None:
        kv = client.create_kv(name)
        versions = kv.put(["a", "b", "c"], [1, 2, 3])
        assert versions == kv.versions(["a", "b", "c"])
        assert len(set(versions)) == 3

    @pytest.mark.slow
    def test_put_when_many_count_by_compare_and_set_then_no_count_is_lost(
        self, connect: Connect, client: tdserve.Client, name: str
    ) -> None:
        kv = client.create_kv(name)
        kv.put("count", 0)

        def count() -> None:
            with connect() as own:
                handle, num_counted = own.kv(name), 0
                while num_counted < 20:
                    value, version = handle.get_with_versions("count")
                    try:
                        handle.put("count", value + 1, if_version=version)
                        num_counted += 1
                    except tdserve.VersionConflictError:
                        pass

        with ThreadPoolExecutor(4) as pool:
            for future in [pool.submit(count) for _ in range(4)]:
                future.result(60.0)
        assert kv["count"] == 80

    # ------------------------------------------------------------ absence

    def test_get_when_a_key_is_missing_then_the_error_names_it(self, client: tdserve.Client, name: str) -> None:
        kv = client.create_kv(name)
        for number in range(2):  # before and after something was ever put
            with pytest.raises(tdserve.KeyNotFoundError) as caught:
                kv.get(["a", "b"] if number else ["b"])
            assert (caught.value.store, caught.value.key) == (name, "b")
            kv.put("a", 1)
        with pytest.raises(KeyError):
            kv["c"]
        assert "a" in kv
        assert "c" not in kv
        assert kv.get([]) == []

    def test_get_when_a_key_of_an_entry_is_missing_then_the_error_names_the_call_that_lists_them(
        self, client: tdserve.Client, name: str
    ) -> None:
        kv = client.create_kv(name, like=entry(0))
        kv.put("a", entry(1))
        with pytest.raises(tdserve.KeyNotFoundError, match=r"entry 'a' of .*\.get\('a'\)\.keys\(True\) lists its keys"):
            kv.get("a", select="absent")
        with pytest.raises(tdserve.KeyNotFoundError):
            kv.get([], select="absent")
        some = next(iter(entry(0).keys()))
        assert list(kv.get([], select=some).keys()) == [some]

    @pytest.mark.slow
    def test_get_when_it_waits_as_long_as_the_client_then_comes(
        self, connect: Connect, client: tdserve.Client, name: str
    ) -> None:
        kv = client.create_kv(name)
        with connect() as other, ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(other.kv(name).get, "a", timeout_s=None)
            wait_for(lambda: kv.info()["num_waiting"] == 1, "a waiting get")
            kv.put("a", 1)
            assert waiting.result(30.0) == 1

    @pytest.mark.slow
    def test_get_when_it_waits_then_comes_with_the_last_key(
        self, connect: Connect, client: tdserve.Client, name: str
    ) -> None:
        kv = client.create_kv(name)
        kv.put("a", 1)
        with connect() as other, ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(other.kv(name).get, ["a", "b", "c"], timeout_s=60.0)
            wait_for(lambda: kv.info()["num_waiting"] >= 1, "a waiting get")
            kv.put("b", 2)
            kv.put("unrelated", 0)
            assert not waiting.done()
            kv.put("c", 3)
            assert waiting.result(30.0) == [1, 2, 3]

    def test_get_when_nothing_comes_then_ends(self, client: tdserve.Client, name: str) -> None:
        kv = client.create_kv(name)
        with pytest.raises(tdserve.DeadlineExceededError) as caught:
            kv.get("a", timeout_s=0.05)
        assert "'a'" in str(caught.value)
        kv.put("a", 1)
        assert kv.get("a", timeout_s=5.0) == 1
        with pytest.raises(tdserve.DeadlineExceededError, match=r"^a put of entry 'b' in"):
            kv.get(["a", "b"], timeout_s=0.05)  # names what is missing alone

    @pytest.mark.slow
    def test_delete_when_acknowledged_then_no_client_reads_it(
        self, connect: Connect, client: tdserve.Client, name: str
    ) -> None:
        kv = client.create_kv(name)
        with connect() as other:
            far = other.kv(name)
            for number in range(50):
                kv.put(["a", "b"], [number, number])
                assert far.get(["a", "b"]) == [number, number]
                assert kv.delete(["a", "b"]) == 2
                assert "a" not in far
        with pytest.raises(tdserve.KeyNotFoundError):
            kv.delete("a")
        kv.put("a", 1)
        with pytest.raises(tdserve.KeyNotFoundError):
            kv.delete(["a", "b"])
        assert kv.delete(["a", "b"], missing_ok=True) == 1
        kv["a"] = 1
        del kv["a"]
        assert len(kv) == 0

    @pytest.mark.slow
    def test_pop_when_several_compete_then_each_entry_goes_to_one(
        self, connect: Connect, client: tdserve.Client, name: str
    ) -> None:
        kv = client.create_kv(name)
        keys = [str(number) for number in range(40)]
        kv.put(keys, list(range(40)))

        def take(_: int) -> list[int]:
            found = []
            with connect() as own:
                handle = own.kv(name)
                for key in keys:
                    try:
                        found.append(handle.pop(key))
                    except tdserve.KeyNotFoundError:
                        continue
            return found

        with ThreadPoolExecutor(3) as pool:
            taken = list(pool.map(take, range(3)))
        assert sorted(itertools.chain(*taken)) == list(range(40))
        assert kv.keys() == []
        kv.put(["a", "b"], [1, 2])
        assert kv.pop(["b", "a"]) == [2, 1]

    # ------------------------------------------------------------ keys

    def test_keys_when_listed_then_sorted_and_by_prefix(self, client: tdserve.Client, name: str) -> None:
        kv = client.create_kv(name)
        assert kv.keys() == []
        kv.put(["b/2", "a", "b/1", "ä", "c"], [0] * 5)
        assert kv.keys() == sorted(["b/2", "a", "b/1", "ä", "c"])
        assert kv.keys(prefix="b/") == ["b/1", "b/2"]
        assert kv.keys("x") == []
        assert list(kv) == kv.keys()
        assert len(kv) == kv.info()["num_rows"] == 5

    @pytest.mark.slow
    def test_keys_when_more_than_a_page_then_all(self, client: tdserve.Client, name: str) -> None:
        kv = client.create_kv(name, like=torch.tensor(0))
        keys = [f"{number:06}" for number in range(12_345)]
        kv.put(keys, torch.arange(12_345))
        assert kv.keys() == keys
        assert kv.keys("012") == keys[-345:]
