"""The tests of reading a table's rows by number that the service must pass over every transport."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict

import tdserve
from tdserve.base.errors import InvalidRequestError, KeyNotFoundError, SelectionError
from tests.conformance.suite import Suite
from tests.errors import raises

FEW, MANY = 8, 20_000
"""Numbers of rows: a few hundred bytes of a column are part of the answer, more are sent in messages."""


def make_rows(num_rows: int) -> TensorDict:
    """Returns rows that show their number in every leaf."""
    number = torch.arange(num_rows)
    nested = TensorDict({"flag": number % 2 == 0, "wide": number[:, None].expand(-1, 40).float()}, [num_rows])
    return TensorDict({"number": number, "nested": nested, "text": list(map(str, number.tolist()))}, [num_rows])


def assert_same(found: TensorDict, expected: TensorDict) -> None:
    """Checks that keys, batch size and content are equal."""
    assert found.batch_size == expected.batch_size
    assert set(found.keys(True, True)) == set(expected.keys(True, True))
    assert bool((found == expected).all())


class RowReadsSuite(Suite):
    """The requirements of reads by number. A subclass gives ``connect``."""

    def test_rows_when_more_than_a_message_names_then_as_read_together(
        self, client: tdserve.Client, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rows = LazyStackedTensorDict(
            *[TensorDict({"x": torch.rand(number + 1), "s": NonTensorData(f"row {number}")}) for number in range(9)]
        )
        table = client.create_replay(name, like=rows[0], capacity=9)
        table.extend(rows)
        together = table[[8, 3, 3, 0, 5]]
        monkeypatch.setattr("tdserve.client.tables.rows_by_number.MAX_MESSAGE_ROWS", 2)
        assert_same(table[[8, 3, 3, 0, 5]], together)
        assert table.get_at("s", [8, 3, 3]).tolist() == ["row 8", "row 3", "row 3"]

    @pytest.mark.parametrize("num_rows", [FEW, MANY])
    def test_get_at_when_a_key_is_named_then_as_of_the_whole_rows(
        self, client: tdserve.Client, name: str, num_rows: int
    ) -> None:
        rows = make_rows(num_rows)
        table = client.create_replay(name, like=rows[0], capacity=num_rows + 2)
        table.extend(rows)
        picked = [5, 1, 1, 7]
        for _ in range(2):  # the second time without a request, where that is possible
            assert table.get_at("number", slice(None)).equal(rows["number"])
            assert table.get_at(("nested", "flag"), picked).tolist() == [False, False, False, False]
            assert table.get_at("number", 3).shape == ()
            assert list(table.get_at("text", [4, 2]).tolist()) == ["4", "2"]
            assert_same(table.get_at("nested", slice(2, 6)), rows["nested"][2:6])
            some: Any = table.get_at(["text", ("nested", "wide")], picked)
            assert_same(some, rows[picked].select("text", ("nested", "wide")))
            assert table.get_at("number", []).shape == (0,)
            assert table.get_at("text", []).tolist() == []
        for wrong in (True, torch.tensor(True), [[0, 1], [2]]):
            with pytest.raises(SelectionError):
                table[wrong]
        with pytest.raises(InvalidRequestError, match="nothing to read"):
            table.get_at([], picked)
        table.delete([0])
        assert table.get_at("number", slice(None)).equal(rows["number"][1:])
        with pytest.raises(SelectionError):
            table.get_at("number", [0])
        with raises(KeyNotFoundError, key="('nested', 'nope')"):
            table.get_at(("nested", "nope"), picked)

    def test_get_at_when_the_key_came_later_then_found(self, client: tdserve.Client, name: str) -> None:
        table = client.create_replay(name, like=make_rows(1)[0], capacity=FEW)
        table.extend(make_rows(FEW))
        other = client.replay(name)
        assert other.get_at("number", [1]).tolist() == [1]
        table.add_leaves(make_rows(1)[0].set("late", torch.zeros(3)))
        assert other.get_at("late", [1, 2]).equal(torch.zeros(2, 3))

    def test_get_at_when_rows_differ_in_size_then_padded_and_nothing_of_no_rows(
        self, client: tdserve.Client, name: str
    ) -> None:
        rows = LazyStackedTensorDict(*[TensorDict({"a": torch.arange(n + 1), "b": torch.tensor(n)}) for n in range(4)])
        for number, ragged in enumerate((None, ["a"])):
            table = client.create_replay(f"{name}-{number}", like=rows[3], capacity=FEW, ragged=ragged)
            table.extend(rows)
            assert table.get_at("a", [0, 2], pad=-1).tolist() == [[0, -1, -1], [0, 1, 2]]
            padded = table.get_at(["a", "b"], [1, 0], pad={"a": 7}, timeout_s=30)
            assert padded["a"].tolist() == [[0, 1], [0, 7]]
            assert padded["masks", "a"].tolist() == [[True, True], [True, False]]
            assert table.get_at("missing", [1], default=None) is None
            assert table.get_at(["a", "missing"], [1], default="none") == "none"
            with pytest.raises(KeyNotFoundError):
                table.get_at("missing", [1])
            if ragged:
                assert len(table.get_at("a", [])) == 0
                continue
            with pytest.raises(InvalidRequestError, match=r"'a' of table .*differ in size: give pad=, or \['a'\]"):
                table.get_at("a", [0, 2])
            with pytest.raises(SelectionError, match="selects no rows"):  # only rows know their keys
                table.get_at("a", [])
            assert len(table.get_at(["a"], [])) == 0

    @pytest.mark.parametrize("options", [{"ragged": ["a", ("n", "z")]}, {}], ids=["ragged", "packed"])
    def test_get_at_when_numbers_have_two_dimensions_then_padded_or_refused_by_key(
        self, client: tdserve.Client, name: str, options: Any
    ) -> None:
        rows = LazyStackedTensorDict(
            *[
                TensorDict({"a": torch.arange(size), "b": torch.tensor(size), "n": {"z": torch.ones(size, 2)}})
                for size in (1, 4, 2, 3)
            ]
        )
        table = client.create_replay(name, like=rows[3], capacity=FEW, **options)
        table.extend(rows)
        places = torch.tensor([[0, 1], [2, 3]])
        padding = {"a": -1, ("n", "z"): -2}  # for all calls; calls ignore it for keys that they do not ask for
        expected = [[[0, -1, -1, -1], [0, 1, 2, 3]], [[0, 1, -1, -1], [0, 1, 2, -1]]]
        assert table.get_at("a", places, pad=padding).tolist() == expected
        some = table.get_at(["a", ("n", "z")], places.numpy(), pad=padding)
        assert (some.batch_size, some["a"].tolist()) == ((2, 2), expected)
        assert some["masks", "a"].equal(some["a"] >= 0)
        assert (some["n", "z"].shape, int(some["n", "z"][0, 0].sum())) == ((2, 2, 4, 2), 2 - 2 * 6)
        assert some["masks", "n", "z"].sum() == 10
        assert table.get_at("b", places).tolist() == [[1, 4], [2, 3]]
        assert table.get_at("a", [3, 0], pad=padding).tolist() == [[0, 1, 2], [0, -1, -1]]
        assert table.get_at("a", places[:, :1], pad=0).shape == (2, 1, 2)
        for keys in ("a", ["a"]):
            if keys == "a" or options:
                with pytest.raises(InvalidRequestError, match=r"2 dimensions.*'a'.*one dimension of numbers.*pad="):
                    table.get_at(keys, places)
        if options:
            with pytest.raises(InvalidRequestError, match=r"'a'.*pad="):
                table[places]
        with pytest.raises(InvalidRequestError, match=r"'nope'.*nothing that is ragged"):
            table.get_at("a", places, pad={"a": -1, "nope": 0})

    def test_rows_when_numbers_have_two_dimensions_then_values_have_them_too(
        self, client: tdserve.Client, name: str
    ) -> None:
        rows = make_rows(4)
        table = client.create_replay(name, like=rows[0], capacity=FEW)
        table.extend(rows)
        places = torch.tensor([[3, 1], [0, 0]])
        assert_same(table[places], rows[places.reshape(-1)].reshape(2, 2))
        assert table.get_at("text", places).tolist() == [["3", "1"], ["0", "0"]]
