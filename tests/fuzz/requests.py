"""Requests that are valid, of every kind that is answered: where random ones begin."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import NonTensorStack, TensorDict

import tdserve
from tdserve.structure.captures.capture import capture
from tdserve.structure.trees import codec
from tdserve.v1 import content_pb2, control_pb2
from tests.contents import content_of

STORES = ("td", "texts", "ring", "weighed", "queue", "keyed", "weights")
"""Names of the stores that hostile sessions may use, change and delete."""


def make_rows(num_rows: int = 4) -> TensorDict:
    """Returns rows of two leaves."""
    number = torch.arange(num_rows)
    return TensorDict({"x": number[:, None] + torch.zeros(num_rows, 3), "n": {"y": number.clone()}}, [num_rows])


def make_texts() -> TensorDict:
    """Returns rows with a value each."""
    return make_rows().set("text", NonTensorStack("a", "b", "c", "d"))


def make_stores(client: tdserve.Client) -> None:
    """Makes those of ``STORES`` that are missing."""
    row = make_rows()[0]
    if "td" not in client:
        client.init_remote(make_rows(), "td", exists_ok=True)
    if "texts" not in client:
        client.init_remote(make_texts(), "texts", exists_ok=True)
    if "ring" not in client:
        client.create_replay("ring", row, 16).extend(make_rows())
    if "weighed" not in client:
        sampler = tdserve.Prioritized(alpha=0.6, beta=0.4)
        client.create_replay("weighed", make_texts()[0], 16, sampler=sampler).extend(make_texts())
    if "queue" not in client:
        client.create_queue("queue", row, 8).extend(make_rows())
    if "keyed" not in client:
        client.create_kv("keyed").put("k", row)
    if "weights" not in client:
        client.publish("weights", row)


def make_requests() -> list[control_pb2.ClientMessage]:
    """Returns one request of each kind, or several."""
    bodies = [*_list_table_requests(), *_list_store_requests(), *_list_other_requests()]
    return [control_pb2.ClientMessage(**body) for body in bodies]


_PATH = content_pb2.Path(parts=["x"])


def _list_table_requests() -> list[dict[str, Any]]:
    row_spec = capture(make_rows()[0]).spec
    ring = content_of(capture(make_rows()), fingerprint=row_spec.prepend((16,)).fingerprint)
    version = content_of(capture(make_rows()[0]), fingerprint=row_spec.fingerprint)
    numbers = torch.arange(2).numpy().tobytes()
    return [
        {"extend": control_pb2.ExtendRequest(store="ring", num_rows=4, content=ring, priorities={"data": bytes(8)})},
        {"extend": control_pb2.ExtendRequest(store="weighed", num_rows=4, content=ring, timeout_s=0.2, wished_claim=4)},
        {"extend": control_pb2.ExtendRequest(store="queue", num_rows=4, content=ring, timeout_s=0.2)},
        {"sample": control_pb2.SampleRequest(store="ring", num_rows=2, num_batches=1, timeout_s=0.2)},
        {"sample": control_pb2.SampleRequest(store="weighed", num_rows=2, num_batches=2, require=[_PATH])},
        {"sample": control_pb2.SampleRequest(store="queue", num_rows=1, num_batches=1, is_lease=True, consumer="c")},
        {"sample": control_pb2.SampleRequest(store="ring", num_rows=2, message_nbytes=[128], is_plain=True)},
        {"sample": control_pb2.SampleRequest(store="ring", num_rows=2, share={"rank": 0, "world_size": 2, "step": 1})},
        {"sample": control_pb2.SampleRequest(store="weighed", priorities_of=numbers)},
        {"publish": control_pb2.PublishRequest(store="weights", spec=codec.encode(row_spec), content=version, keep=3)},
        {"latest": control_pb2.LatestRequest(store="weights", timeout_s=0.2, relays=True)},
        {"change": control_pb2.ChangeRequest(store="weighed", priorities={"rows": numbers, "priorities": bytes(8)})},
        {"change": control_pb2.ChangeRequest(store="ring", delete={"data": numbers})},
        {"change": control_pb2.ChangeRequest(store="queue", acknowledge={"rows": numbers, "generations": bytes(8)})},
        {"change": control_pb2.ChangeRequest(store="ring", limiter='{"limiter": {"type": "MinSize", "min_size": 1}}')},
    ]  # fmt: skip


def _list_store_requests() -> list[dict[str, Any]]:
    rows, spec = make_rows(), capture(make_rows()).spec
    row_spec = capture(make_rows()[0]).spec
    whole = content_of(capture(rows), fingerprint=spec.fingerprint)
    sent = content_of(capture(rows), fingerprint=spec.fingerprint, is_inline=False)
    some = content_pb2.Selection(items=[{"slice": {"start": 0, "stop": 2}}])
    listed = content_pb2.Selection(items=[{"positions": {"shape": [2], "data": bytes(16)}}])
    masked = content_pb2.Selection(items=[{"mask": {"shape": [4], "data": b"\xa0"}}])
    added = codec.encode(capture(TensorDict({"z": torch.zeros(4)}, [4])).spec)
    made = control_pb2.CreateStoreRequest(name="made", kind=control_pb2.STORE_KIND_TENSORDICT, spec=codec.encode(spec))
    half = codec.encode(capture(make_rows(2)).spec)
    tensordict = control_pb2.STORE_KIND_TENSORDICT
    hidden = control_pb2.CreateStoreRequest(name="made", kind=tensordict, spec=half, is_hidden=True)
    renamed = control_pb2.Renamed(old_key=_PATH, new_key=_PATH)
    create = control_pb2.CreateStoreRequest(
        name="made", kind=control_pb2.STORE_KIND_REPLAY, spec=codec.encode(row_spec), capacity=8
    )
    return [
        {"read": control_pb2.ReadRequest(store="td", selection=some, timeout_s=0.2)},
        {"read": control_pb2.ReadRequest(store="texts", selection=listed, keys=[_PATH])},
        {"read": control_pb2.ReadRequest(store="ring", selection=masked, message_nbytes=[96])},
        {"write": control_pb2.WriteRequest(store="td", content=whole, timeout_s=0.2)},
        {"write": control_pb2.WriteRequest(store="td", selection=some, content=sent)},
        {"write": control_pb2.WriteRequest(store="made", content=whole, new_store=made)},
        {"alter": control_pb2.AlterRequest(store="td", added=added, timeout_s=0.2)},
        {"alter": control_pb2.AlterRequest(store="texts", removed=[_PATH], renamed=[renamed])},
        {"create_store": create},
        {"create_store": hidden},
        {"delete_store": control_pb2.DeleteStoreRequest(name="made")},
        {"end_filling": control_pb2.EndFillingRequest(store="made")},
    ]  # fmt: skip


def _list_other_requests() -> list[dict[str, Any]]:
    return [
        {"taken": control_pb2.TakenRequest(hop=1, checksums=bytes(16))},
        {"join_group": control_pb2.JoinGroup(name="g", world_size=2, backend="gloo", timeout_s=0.2)},
        {"adopt": control_pb2.AdoptRequest(name="made", path="/etc")},
        {"put": control_pb2.PutRequest(store="keyed", keys=[b"k"], content={"values": b"", "inline": b""})},
        {"get": control_pb2.GetRequest(store="keyed", keys=[b"k"], timeout_s=0.2)},
        {"remove": control_pb2.RemoveRequest(store="keyed", keys=[b"k"], if_versions=[1])},
        {"list": control_pb2.ListRequest(store="keyed", prefix=b"k", page_size=3)},
        {"catalog": control_pb2.CatalogRequest(describe_store={"name": "td"})},
        {"catalog": control_pb2.CatalogRequest(list_stores={"prefix": "t", "page_size": 2})},
        {"catalog": control_pb2.CatalogRequest(list_keys={"name": "td", "include_nested": True})},
        {"move": control_pb2.MoveRequest(store="td", move="m", list_files=True)},
        {"move": control_pb2.MoveRequest(store="made", move="m", receive={"paths": [b"a"], "nbytes": [10]})},
        {"move": control_pb2.MoveRequest(store="td", move="m", read={"blocks": [{"path": b"x", "nbytes": 8}]})},
        {"checkpoint": control_pb2.CheckpointRequest(checkpoint="c", store="td", list_files=True)},
        {"checkpoint": control_pb2.CheckpointRequest(checkpoint="c", freeze=1 << 20, timeout_s=0.2)},
        {"rendezvous": control_pb2.Rendezvous(key="0/1", value=b"x")},
        {"group_notice": control_pb2.GroupNotice(name="g", epoch=1, leave=True)},
        {"relay_report": control_pb2.RelayReport(holds=1)},
        {"client_report": control_pb2.ClientReport(calls=[{"call": "read", "buckets": [1, 2]}])},
        {"claimed": control_pb2.Claimed(uid="u", num=1)},
        {"part": control_pb2.MessagePart(content=b"x", is_last=True)},
        {"channel_lost": control_pb2.ChannelLost(channel=0, reason="x")},
        {"cancel": control_pb2.CancelRequest(cancelled=1)},
    ]  # fmt: skip


def list_blobs() -> list[bytes]:
    """Returns bytes that mean something in requests: fingerprints, content, numbers."""
    found = [capture(make_rows()).spec.fingerprint, capture(make_rows()[0]).spec.prepend((16,)).fingerprint]
    return [*found, bytes(16), bytes(80), torch.arange(4).numpy().tobytes(), b"k"]
