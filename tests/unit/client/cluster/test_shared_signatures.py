"""Shared stores have the calls of stores of one server: the same methods, with the same parameters.

A difference is allowed if a table below names it, with the reason. Entries for differences that are gone must be
removed.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping

import pytest

from tdserve.client.client import Client
from tdserve.client.cluster.cluster_client import ClusterClient
from tdserve.client.cluster.stores.sharded_dataset import ShardedDataset
from tdserve.client.cluster.stores.sharded_keyed import ShardedKeyedHandle
from tdserve.client.cluster.tables.sharded_batches import ShardedBatches, ShardedTaken
from tdserve.client.cluster.tables.sharded_queue import ShardedQueueHandle
from tdserve.client.cluster.tables.sharded_replay import ShardedReplayHandle
from tdserve.client.cluster.tables.sharded_writer import ShardedWriter
from tdserve.client.handles.handle import StoreHandle
from tdserve.client.kv.keyed_handle import KeyedHandle
from tdserve.client.tables.draws.batches import Batches
from tdserve.client.tables.draws.taking import Taken
from tdserve.client.tables.queue import QueueHandle
from tdserve.client.tables.replay import ReplayHandle
from tdserve.client.tables.writers.writer import ReplayWriter

PAIRS: Mapping[type, type] = {
    ReplayHandle: ShardedReplayHandle,
    QueueHandle: ShardedQueueHandle,
    KeyedHandle: ShardedKeyedHandle,
    StoreHandle: ShardedDataset,
    ReplayWriter: ShardedWriter,
    Taken: ShardedTaken,
    Batches: ShardedBatches,
    Client: ClusterClient,
}
"""A class for one server, and its shared counterpart."""

_PASSED_ON = "the other arguments go to the client of each server by name, whose own signature refuses a wrong one"
_ROWS_ALONE = "a dataset of several servers reads and writes rows and leaves; it takes fewer arguments"

OTHER_PARAMETERS: Mapping[type, Mapping[str, str]] = {
    StoreHandle: dict.fromkeys(("get", "get_at", "keys", "set_at_", "to_tensordict"), _ROWS_ALONE),
    Client: dict.fromkeys(
        (
            "create_queue",
            "create_replay",
            "dumps",
            "memmap",
            "memmap_like",
            "memmap_refresh_",
            "publish",
            "save",
            "subscribe",
        ),
        _PASSED_ON,
    ),
}
"""Methods whose parameters differ, with the reason."""

_PART = "a step of calls on the part that each server has"
_TABLE_METHODS: Mapping[str, str] = {
    "capacity": "an attribute there",
    "check_rows": "asked by the storage of TorchRL, which is of one server",
    "find_sequences": "rows of several servers have no common order",
    "follow_and_retry": _PART,
    "is_part": "what is shared is no part",
    "make_query": _PART,
    "part_capacity": "an attribute there",
    "read_numbered": _PART,
    "read_rows": _PART,
    "read_with_generations": _PART,
    "settings": "an attribute there",
}

LACKING: Mapping[type, Mapping[str, str]] = {
    ReplayHandle: _TABLE_METHODS,
    QueueHandle: _TABLE_METHODS,
    Client: {
        **dict.fromkeys(
            (
                "call",
                "count_call",
                "hand_over",
                "has_channel",
                "has_session",
                "is_turning",
                "make_deadline",
                "make_movers",
                "movers",
                "open_handle",
                "perform",
                "perform_in_turn",
                "session",
                "is_numpy_wanted",
            ),
            "of a client with one session, which each server's own client has",
        ),
        "address": "an attribute there",
        "recipe": "an attribute of its servers",
        "why_not_gloo": "each server has its own reason",
        "why_not_nccl": "each server has its own reason",
    },
}
"""Names that the shared class lacks, with the reason."""

NO_CALLS = {"__new__", "__init__", "__copy__", "__reduce__", "__getstate__", "__setstate__", "__del__"}
"""Methods for how an object is made, copied, sent and ended."""


def list_names(single: type) -> list[str]:
    """Returns the public methods and properties of a class, and the methods of its operators."""
    own = [vars(each) for each in single.__mro__ if each.__module__.startswith("tdserve.")]
    found = {name for names in own for name, value in names.items() if callable(value) or isinstance(value, property)}
    return sorted(name for name in found - NO_CALLS if not name.startswith("_") or name.startswith("__"))


def describe_parameters(method: object) -> list[tuple[str, str, object]] | None:
    """Returns name, kind and default of each parameter; None for a property."""
    if not callable(method):
        return None
    return [
        (each.name, each.kind.name, describe_default(each.default))
        for each in inspect.signature(method).parameters.values()
    ]


def describe_default(default: object) -> object:
    """Returns equal values for two defaults that mean the same; for functions, what they do."""
    return default.__code__.co_code if inspect.isfunction(default) else default


def find_other_parameters(single: type, shared: type) -> list[str]:
    """Returns the names of public methods of both whose parameters differ."""
    return [
        name
        for name in list_names(single)
        if not name.startswith("__")
        and hasattr(shared, name)
        and describe_parameters(getattr(single, name)) != describe_parameters(getattr(shared, name))
    ]


def find_lacking(single: type, shared: type) -> list[str]:
    """Returns the names that the shared class lacks, or has only as every object does."""
    return [name for name in list_names(single) if getattr(shared, name, None) is getattr(object, name, None)]


@pytest.mark.parametrize("single", PAIRS, ids=lambda single: single.__name__)
def test_methods_when_several_servers_share_it_then_have_the_parameters_of_one_server(single: type) -> None:
    assert find_other_parameters(single, PAIRS[single]) == sorted(OTHER_PARAMETERS.get(single, {}))


@pytest.mark.parametrize("single", [each for each in PAIRS if each is not StoreHandle], ids=lambda each: each.__name__)
def test_methods_when_several_servers_share_it_then_all_are_there(single: type) -> None:
    assert find_lacking(single, PAIRS[single]) == sorted(LACKING.get(single, {}))
