from __future__ import annotations

import json

import torch
from tensordict import TensorDict

from tdserve.client.session.catalog.description import VersionInfo, from_message
from tdserve.structure.captures.capture import capture
from tdserve.structure.trees import codec
from tdserve.v1 import control_pb2
from tdserve.values.value_codec import encode_value

SPEC = capture(TensorDict({"a": torch.zeros(4, 2), "n": {"t": "text"}}, [4])).spec
MESSAGE = control_pb2.StoreDescription(
    name="x",
    kind=control_pb2.STORE_KIND_WEIGHTS,
    spec=codec.encode(SPEC),
    num_rows=4,
    nbytes=32,
    version=7,
    created_s=12.5,
    extra=["shape"],
    uid="u",
    versions=[control_pb2.VersionInfo(version=7, nbytes=32, created_s=13.5, metadata=encode_value({"b": b"x"}))],
)


def test_description_when_read_from_a_message_then_has_the_same_fields() -> None:
    found = from_message(MESSAGE)
    assert (found.name, found.kind, found.spec, found.batch_size) == ("x", "weights", SPEC, (4,))
    assert (found.num_rows, found.rows, found.nbytes, found.bytes) == (4, 4, 32, 32)
    assert found.versions == (VersionInfo(7, 32, 13.5, {"b": b"x"}),)
    assert (found.versions[0].time, found.versions[0].size) == (13.5, 32)
    assert found.extra == ("shape",)


def test_objects_when_of_rows_then_what_lies_there_and_none_of_weights() -> None:
    rows = control_pb2.StoreDescription(spec=MESSAGE.spec, kind=control_pb2.STORE_KIND_TENSORDICT)
    assert (from_message(rows).objects, from_message(MESSAGE).objects) == (("n.t",), ())


def test_description_when_as_dict_then_json_carries_it() -> None:
    said = json.loads(json.dumps(from_message(MESSAGE).as_dict()))
    assert said["versions"] == [{"version": 7, "nbytes": 32, "created_s": 13.5}]
    assert {"key": "a", "type": "float32", "shape": [4, 2], "nbytes": 32} in said["spec"]["keys"]
    assert [leaf["key"] for leaf in said["spec"]["keys"]] == ["a", ["n", "t"], "n"]


def test_description_when_the_kind_is_of_a_later_server_then_unknown() -> None:
    message = control_pb2.StoreDescription(spec=MESSAGE.spec)
    assert from_message(message).kind == "unknown"


def test_description_when_of_a_table_then_has_its_rules_and_the_number_of_leased_rows() -> None:
    message = control_pb2.StoreDescription(spec=MESSAGE.spec, kind=control_pb2.STORE_KIND_REPLAY)
    assert (from_message(message).as_dict()["settings"], from_message(message).is_closed) == ({}, False)
    message.settings, message.num_leased, message.is_closed = '{"limiter":{"kind":"queue","max_size":4}}', 3, True
    message.num_waiting = 2
    said = from_message(message).as_dict()
    assert said["settings"] == {"limiter": {"kind": "queue", "max_size": 4}}
    assert (said["num_leased"], said["is_closed"], said["num_waiting"]) == (3, True, 2)


def test_description_when_a_table_has_a_policy_then_has_the_lags_of_its_rows() -> None:
    message = control_pb2.StoreDescription(spec=MESSAGE.spec, kind=control_pb2.STORE_KIND_REPLAY)
    assert (from_message(message).policy, from_message(message).lag_mean) == ("", None)
    message.settings, message.newest_policy_version, message.num_discarded = '{"policy":"p"}', 7, 3
    message.lags.min, message.lags.mean, message.lags.max = 0, 1.5, 4
    said = from_message(message).as_dict()
    assert (said["policy"], said["newest_policy_version"], said["num_discarded"]) == ("p", 7, 3)
    assert (said["lag_min"], said["lag_mean"], said["lag_max"]) == (0, 1.5, 4)


def test_description_when_printed_then_its_tree() -> None:
    found = from_message(MESSAGE)
    assert str(found) == found.tree()
    table = control_pb2.StoreDescription(spec=MESSAGE.spec, name="r", kind=control_pb2.STORE_KIND_REPLAY, capacity=9)
    assert from_message(table).tree().startswith("r (replay, 0 of 9 rows, 0 bytes; structure of a row): TensorDict[4]")
    assert found.tree().splitlines() == [
        "x (weights, 4 rows, 32 bytes): TensorDict[4]",
        "├─ a: float32[4, 2]",
        "└─ n: TensorDict[4]",
        "   └─ t: non-tensor[4]",
    ]
