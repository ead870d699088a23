"""Numbers in plain dicts come back as they are, wherever no structure makes tensors of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import tdserve

pytestmark = pytest.mark.integration

VALUES: dict[str, Any] = {"f": 16777217.0, "i": 2**70, "list": [0.1, 2], "tuple": (1, 2), "n": {"x": 0.1}, "none": None}


def make_content(**changes: Any) -> dict[str, Any]:
    """Returns values beside a tensor, an array and a number that has a dtype."""
    return {**VALUES, "t": torch.arange(3), "a": np.ones(2), "s": np.float64(0.1), **changes}


def check(found: Any, **changes: Any) -> None:
    """Compares what was read with ``make_content``."""
    content = found.to_dict()
    assert content.pop("t").tolist() == [0, 1, 2]
    assert content.pop("a").tolist() == [1.0, 1.0]
    assert content.pop("s").item() == 0.1
    expected = {**VALUES, **changes}
    assert content == expected
    assert [type(content[key]) for key in expected] == [*map(type, expected.values())]


def test_dict_when_given_for_a_tensordict_then_its_numbers_come_back_as_they_are(
    client: tdserve.Client, name: str
) -> None:
    client.init_remote(make_content(), name)
    check(client.from_remote_init(name))
    client.send(make_content(f=0.3), name)
    check(client.from_remote_init(name), f=0.3)
    client.memmap(make_content(), f"{name}-memmap")
    check(client.load_memmap(f"{name}-memmap"))


def test_weights_when_a_dict_has_numbers_then_each_version_has_its_own(client: tdserve.Client, name: str) -> None:
    for version in (1, 2):
        client.publish(name, make_content(f=0.1 * version))
        found = client.latest(name)
        assert found is not None
        check(found.data, f=0.1 * version)


def test_entry_when_a_dict_has_a_tensor_then_its_numbers_come_back_as_they_are(
    client: tdserve.Client, name: str
) -> None:
    entries = client.create_kv(name)
    entries["a"] = make_content()
    entries.put(["b", "c", "d"], [make_content(i=-1), VALUES, {"in": make_content()}])
    check(entries["a"])
    first, second, third = entries.get(["b", "c", "d"])
    check(first, i=-1)
    assert second == VALUES
    check(third["in"])


def test_batch_when_its_dict_has_lists_of_numbers_then_one_per_row(client: tdserve.Client, name: str) -> None:
    client.init_remote({"x": np.zeros((3, 2)), "label": [2**70, 0.1, None]}, name, batch_size=[3])
    assert client[name][:2]["label"] == [2**70, 0.1]


def test_like_when_a_dict_then_its_numbers_are_columns_which_refuse_what_they_cannot_hold(
    client: tdserve.Client, name: str
) -> None:
    table = client.create_replay(name, {"reward": 0.0, "step": 0}, 10)
    entries = client.create_kv(f"{name}-entries", like={"reward": 0.0, "step": 0})
    table.extend({"reward": [0.1, 2], "step": [2**60 + 1, 0]})
    for key, number in (("reward", 2**24 + 1), ("reward", 1e39), ("step", 2**70), ("step", 0.5)):
        with pytest.raises(tdserve.SpecMismatchError, match=f"'{key}'"):
            table.extend({"reward": [0.1], "step": [1], key: [number]})
        with pytest.raises(tdserve.SpecMismatchError, match=f"'{key}'"):
            entries.put("a", {"reward": 0.1, "step": 1, key: number})
    expected = TensorDict({"reward": torch.tensor([0.1, 2]), "step": torch.tensor([2**60 + 1, 0])}, [2])
    assert (table[:] == expected).all()
    assert len(entries) == 0


def test_lists_when_no_structure_is_known_then_arrays_stay_listed_and_tensors_are_refused_by_key(
    client: tdserve.Client, name: str
) -> None:
    arrays = [np.array([2**53 + 1]), np.array([2.5, 1.0])]
    tensors = {"t": torch.ones(1), "o": [torch.ones(2), torch.ones(2)]}
    for write in (client.init_remote, client.memmap, lambda content, at: client.publish(at, content)):
        with pytest.raises(tdserve.NotSupportedError, match=rf"list, at 'o'\[0\] of store '{name}'.*stack the tensors"):
            write(tensors, name)
    assert name not in client
    client.init_remote({"t": torch.ones(1), "o": arrays}, name)
    client.publish(f"{name}-published", {"t": torch.ones(1), "o": arrays})
    published = client.latest(f"{name}-published")
    assert published is not None
    for found in (client.from_remote_init(name), published.data):
        assert [each.tolist() for each in found["o"]] == [[2**53 + 1], [2.5, 1.0]]
        assert [each.dtype for each in found["o"]] == [np.int64, np.float64]


def test_table_when_a_list_mixes_integers_and_fractions_then_none_is_rounded(client: tdserve.Client, name: str) -> None:
    table = client.create_replay(name, {"x": np.float64(0)}, 10)
    table.extend({"x": [2**53, 2.5]})
    for listed in ([2**53 + 1, 2.5], [torch.tensor(2**53 + 1), torch.tensor(2.5)]):
        with pytest.raises(tdserve.SpecMismatchError, match=f"'{name}', key 'x'"):
            table.extend({"x": listed})
    assert table[:]["x"].tolist() == [2**53, 2.5]


def test_handle_when_a_number_is_set_then_a_tensor_as_of_tensordict(client: tdserve.Client, name: str) -> None:
    client.init_remote({"x": np.zeros(2)}, name)
    store = client[name]
    store.set("step", 3)
    store.update({"part": {"lr": 0.5}})
    assert store["step"].dtype is torch.int64
    assert store["part", "lr"].dtype is torch.float32


def test_rows_when_integers_are_above_int64_then_a_column_that_can_hold_them_does(
    client: tdserve.Client, name: str
) -> None:
    like = TensorDict({"i": torch.zeros((), dtype=torch.int64), "u": torch.zeros((), dtype=torch.uint64)}, [])
    table = client.create_replay(name, like=like, capacity=8)
    table.extend({"i": [1, 2], "u": [2**63, 1]})
    table.extend({"i": [3], "u": [2**64 - 1]})
    table.extend({"i": np.array([4], np.longlong), "u": np.array([5], np.ulonglong)})
    assert table[:]["u"].tolist() == [2**63, 1, 2**64 - 1, 5]
    for rows in ({"i": [2**63], "u": [1]}, {"i": [2**63, 1], "u": [1, 1]}):
        with pytest.raises(tdserve.SpecMismatchError, match="key 'i': expected numbers that int64 can hold"):
            table.extend(rows)
    for number in (2**64, -1, 0.5):
        with pytest.raises(tdserve.SpecMismatchError, match="key 'u': expected"):
            table.extend({"i": [1, 1], "u": [1, number]})
    assert table.extend({"i": [], "u": []}).tolist() == []
    assert len(table) == 4
