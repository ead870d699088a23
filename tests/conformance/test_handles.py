"""A handle does what a local tensordict does, or refuses with an error of its own and changes nothing.

No call silently acts on a copy: the store then holds what a local tensordict would hold.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from tensordict import TensorClass, TensorDict, lazy_stack, set_lazy_legacy

import tdserve
from tests.conformance.handle_calls import (
    ALL_KEYS,
    FACES,
    FEW_VALUES,
    IN_PLACE,
    OUT,
    SET,
    TORCH,
    TORCH_IN_PLACE,
    VALUES,
    WRITES,
    Call,
    Face,
    Point,
    assigned_by_tensordict,
    dense,
    differs_by_design,
    named_by_tensordict,
)
from tests.sameness import difference
from tests.tensordict_examples import doubled, fault, local_td, outcome

pytestmark = pytest.mark.integration

_numbers = itertools.count()


class Named(TensorClass):
    """An instance with a field whose name is an attribute of handles."""

    spec: torch.Tensor


@pytest.fixture(scope="module")
def client(server: tdserve.Server) -> Iterator[tdserve.Client]:
    """One client for all calls."""
    with server.client(transport="shm") as made:
        yield made


class Pair:
    """A local tensordict and a store of the same content, made again after a call has changed them."""

    def __init__(self, client: tdserve.Client, face: Face) -> None:
        self._client = client
        self._face = face
        self._store: Any = None

    def fault(self, call: Call) -> str | None:
        """Returns how the two differ after a call, in content, result or error."""
        td, before = self._face.make(), self._face.make()
        if self._store is None:
            name = f"pair-{next(_numbers)}"
            self._client.init_remote(before, name)
            self._store = self._client[name]
        local = outcome(call, self._face.look(td))
        remote = outcome(call, self._face.look(self._store))
        after = self._store.to_tensordict()
        is_changed = difference(after, before) is not None
        if is_changed:
            self._client.delete(self._store.name)
            self._store = None
        if isinstance(remote, tdserve.TDServeError):
            return f"changed, and refused by {remote!r}" if is_changed else None
        if isinstance(remote, Exception):
            return fault(local, remote)
        if isinstance(local, Exception):
            return f"changed, where tensordict raises {local!r}" if is_changed else None
        return difference(after, td)


def faults(client: tdserve.Client, face: Face, calls: dict[str, Call]) -> list[str]:
    """Returns the faults of calls, each made on a pair of its own."""
    pair = Pair(client, face)
    found = {title: pair.fault(call) for title, call in calls.items()}
    return [f"{title}: {text}" for title, text in found.items() if text is not None]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "keys_of_all_values"),
    [
        *(pytest.param(name, ["a", "new"] if name == "handle" else [], id=name) for name in FACES),
        pytest.param("handle", FACES["handle"].keys, id="handle at every key", marks=pytest.mark.full),
    ],
)
def test_write_when_of_any_value_then_as_of_the_local_one_or_refused(
    client: tdserve.Client, name: str, keys_of_all_values: Sequence[Any]
) -> None:
    face = FACES[name]
    calls = {
        f"{write} {key} {title}": make(key, value)
        for write, make in WRITES.items()
        if write in face.writes or not face.writes
        for key in face.keys
        for title, value in VALUES.items()
        if (key in keys_of_all_values or title in FEW_VALUES) and not differs_by_design(write, key, title)
    }
    assert faults(client, face, calls) == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FACES)
def test_write_when_to_all_keys_then_as_of_the_local_one_or_refused(client: tdserve.Client, name: str) -> None:
    without_values = FACES[name]._replace(make=lambda: FACES[name].make().exclude("t"))
    values = {title: value for title, value in VALUES.items() if title != "value"}  # instances take these for fields
    calls = {f"{write} {title}": make(value) for write, make in ALL_KEYS.items() for title, value in values.items()}
    assert faults(client, without_values, calls) == []


def test_tables_when_compared_with_tensordict_then_each_of_its_calls_is_decided() -> None:
    assert named_by_tensordict("inplace") - IN_PLACE.keys() == set()
    assert named_by_tensordict("out") - OUT.keys() == set()
    assert assigned_by_tensordict() == SET.keys()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("look", ["handle", "view"])
def test_call_when_in_place_then_the_store_has_it_or_refuses(client: tdserve.Client, look: str) -> None:
    face = Face(local_td) if look == "handle" else Face(local_td, lambda each: each.select("a", "n"))
    assert faults(client, face, {**IN_PLACE, **TORCH_IN_PLACE}) == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_call_when_it_fills_a_store_then_the_store_has_it_or_refuses(client: tdserve.Client) -> None:
    """Calls that fill a tensordict are made on the store and on a local tensordict."""
    calls: dict[str, Call] = {}
    for name, make in OUT.items():
        if make is not None:
            if "gather" not in name:  # it may not read what it writes
                calls[f"{name} of itself"] = lambda each, make=make: make(each)(each)  # type: ignore[misc]
            calls[f"{name} of another"] = lambda each, make=make: make(each)(local_td() * 3)  # type: ignore[misc]
    assert faults(client, Face(local_td), calls) == []


@pytest.mark.parametrize("name", [name for name in OUT if name.startswith("torch.")])
def test_function_when_out_is_a_store_then_that_is_filled_and_returned(client: tdserve.Client, name: str) -> None:
    """A tensordict that torch accepts as ``out`` may be a store: it is filled, not refused."""
    td, store = local_td(), _stored(client, local_td())
    make = OUT[name]
    assert make is not None
    assert make(store)(doubled()) is store
    make(td)(doubled())
    assert difference(store.to_tensordict(), td) is None
    view = store.view(-1)
    assert view.apply(lambda x: x + 1, out=view) is view
    assert difference(store.to_tensordict(), td + 1) is None


@pytest.mark.parametrize("name", SET)
def test_property_when_assigned_then_the_store_has_it_or_refuses(client: tdserve.Client, name: str) -> None:
    store = _stored(client, local_td())
    error = outcome(lambda each: setattr(each, name, SET[name](local_td())), store)
    if name == "is_locked":
        assert error is None
        assert store.is_locked
        assert client[store.name].to_tensordict().is_locked
        return
    assert isinstance(error, tdserve.NotSupportedError)
    assert difference(store.to_tensordict(), local_td()) is None


@pytest.mark.parametrize("name", TORCH)
def test_function_of_torch_when_it_gives_a_view_then_writes_into_that_reach_the_store(
    client: tdserve.Client, name: str
) -> None:
    td, store = local_td(), _stored(client, local_td())
    for each in (td, store):
        TORCH[name](each).zero_()
    assert difference(store.to_tensordict(), td) is None
    assert float(store["a"].sum()) < float(local_td()["a"].sum())


def test_field_when_assigned_and_read_then_it_is_the_stores(client: tdserve.Client) -> None:
    store = _stored(client, Point(torch.zeros(4), None, batch_size=[4]))
    assert store.y is None
    store.x = torch.ones(4)
    store.y = "text"
    assert client[store.name]["x"].tolist() == [1.0] * 4
    assert store.y == store.to_tensordict().y == "text"
    assert store.x.tolist() == store.select("x").x.tolist() == [1.0] * 4
    with pytest.raises(AttributeError, match=r"its fields are \['x', 'y'\]"):
        store.z = torch.ones(4)
    with pytest.raises(AttributeError):
        store.z  # noqa: B018 (it raises)
    with pytest.raises(tdserve.NotSupportedError):
        store.batch_size = []


def test_field_when_its_name_is_an_attribute_of_handles_then_set_takes_it(client: tdserve.Client) -> None:
    store = _stored(client, Named(torch.zeros(4), batch_size=[4]))
    with pytest.raises(tdserve.NotSupportedError, match="use set"):
        store.spec = torch.ones(4)
    store.set("spec", torch.ones(4))
    assert store["spec"].tolist() == [1.0] * 4


def test_rows_when_a_field_is_none_then_it_stays_so(client: tdserve.Client) -> None:
    store = _stored(client, TensorDict({"p": Point(torch.zeros(4), None, batch_size=[4])}, [4]))
    row = TensorDict({"p": Point(torch.ones(2), None, batch_size=[2])}, [2])
    store[:2] = row.to_tensordict(retain_none=True)
    store.select("p")[2:] = row.to_tensordict(retain_none=True)
    store.update({"p": {"x": torch.ones(4), "y": None}})
    assert store["p"].x.tolist() == [1.0] * 4
    assert store["p"].y is None


def test_structure_when_only_elements_have_it_then_as_of_the_local_one(client: tdserve.Client) -> None:
    rows = [TensorDict({"a": torch.ones(3), **({"z": torch.ones(3)} if row else {})}, [3]) for row in range(2)]
    td, store = lazy_stack(rows), _stored(client, lazy_stack(rows))
    for ask in ("dim", "ndimension", "numel", "size", "is_empty"):
        assert getattr(store, ask)() == getattr(td, ask)(), ask
    assert (store.batch_dims, store.ndim) == (td.batch_dims, td.ndim) == (2, 2)
    assert store.empty().batch_size == td.empty().batch_size == (2, 3)
    assert store.refine_names(None, None) is store
    with pytest.raises(tdserve.NotSupportedError, match="names"):
        store.refine_names("time", ...)


def test_key_when_new_and_of_some_rows_then_others_are_zero(client: tdserve.Client) -> None:
    td, store = TensorDict({}, [5]), _stored(client, TensorDict({}, [5]))
    for each in (td, store):
        each[0] = TensorDict({"obs": torch.ones(2), "n": {"x": torch.tensor(1)}}, [])
        each[3:] = TensorDict({"obs": torch.ones(2, 2), "n": {"x": torch.arange(2)}}, [2])
    assert difference(store.to_tensordict(), td) is None
    with pytest.raises(tdserve.SpecMismatchError, match=r"no such key \(update\(\) and set\(\) add some"):
        store[0] = TensorDict({"obs": torch.zeros(2), "other": torch.ones(2)}, [])
    assert difference(store.to_tensordict(), td) is None


@pytest.mark.filterwarnings("ignore:The legacy lazy mode")
def test_views_when_tensordict_makes_lazy_ones_then_as_without(client: tdserve.Client) -> None:
    td = TensorDict({"p": Point(torch.zeros(4, 3), None, batch_size=[4, 3])}, [4, 3])
    store = _stored(client, td)
    with set_lazy_legacy(True):
        views = [store.transpose(0, 1), store.permute(1, 0), store.unsqueeze(0).squeeze(0).transpose(0, 1)]
        for view in views:
            assert view.batch_size == (3, 4)
            assert view[0].batch_size == (4,)
            assert view["p"].x.shape == (3, 4)


def test_inner_name_when_tensordict_asks_for_it_then_the_error_names_the_remedy(client: tdserve.Client) -> None:
    store = _stored(client, dense())
    with pytest.raises(tdserve.NotSupportedError, match="to_tensordict") as raised:
        dense().apply(lambda x: x + 1, out=store)
    assert isinstance(raised.value, AttributeError)
    assert not hasattr(store, "_set_str")
    assert difference(store.to_tensordict(), dense()) is None


def _stored(client: tdserve.Client, td: Any) -> Any:
    name = f"stored-{next(_numbers)}"
    client.init_remote(td, name)
    return client[name]
