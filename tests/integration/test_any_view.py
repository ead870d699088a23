"""Random tensordicts as stores: views and methods of a store return what those of the tensordict return."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from tensordict import TensorDict

import tdserve
from tests.tensordict_examples import Call, fault, outcome
from tests.tensordict_strategies import tensordicts

pytestmark = pytest.mark.integration

_numbers = itertools.count()

CALLS: dict[str, Call] = {
    "select": lambda each: each.select(*list(each.keys())[:1]),
    "select nested": lambda each: each.select(*list(each.keys(True))[-2:]),
    "exclude": lambda each: each.exclude(*list(each.keys())[:1]),
    "flatten_keys": lambda each: each.flatten_keys("|"),
    "unsqueeze": lambda each: each.unsqueeze(0),
    "unsqueeze, row": lambda each: each.unsqueeze(0)[0],
    "reshape": lambda each: each.reshape(-1),
    "reshape, rows": lambda each: each.reshape(-1)[:1],
    "transpose": lambda each: each.transpose(0, -1),
    "transpose, row": lambda each: each.transpose(0, -1)[0],
    "split": lambda each: each.split(1)[0],
    "split the last": lambda each: each.split(2, -1)[0],
    "unbind": lambda each: each.unbind(0)[-1],
    "squeeze": lambda each: each.squeeze(),
    "clone": lambda each: each.clone(),
    "items": lambda each: list(each.items(True)),
    "values": lambda each: list(each.values()),
    "leaves": lambda each: list(each.keys(True, True)),
    "a flattened one": lambda each: each.flatten_keys("|").get(next(iter(each.flatten_keys("|").keys()), "none"), None),
    "bytes": lambda each: each.bytes(),
    "numel": lambda each: each.numel(),
    "depth": lambda each: each.depth,
    "empty": lambda each: each.empty(),
    "empty, recurse": lambda each: each.empty(recurse=True),
}


@pytest.mark.slow
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(td=tensordicts())
def test_store_when_of_any_tensordict_then_views_and_methods_are_its_own(
    client: tdserve.Client, td: TensorDict
) -> None:
    name = f"any-view-{next(_numbers)}"
    store = client.memmap(td, name)
    try:
        assert repr(store).startswith(f"StoreHandle(\n    {name!r} at ")
        assert list(store.keys(True)) == list(td.keys(True))
        faults: dict[str, str | None] = {}
        for which, call in CALLS.items():
            expected = outcome(call, td)
            if not isinstance(expected, Exception):  # a view raises when it is read
                faults[which] = fault(expected, outcome(call, store))
        assert {which: found for which, found in faults.items() if found is not None} == {}
    finally:
        client.delete(name)
