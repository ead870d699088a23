from __future__ import annotations

from tdserve.client.session.catalog.message_facts import convert_stats, to_facts
from tdserve.v1 import control_pb2


def test_message_when_turned_into_facts_then_has_every_field_and_what_lies_in_lists() -> None:
    message = control_pb2.GetStatsResponse(num_stores=2, workers=[control_pb2.WorkerStats(pid=7)])
    facts = to_facts(message)
    assert facts["workers"] == [{"worker": 0, "pid": 7, "num_restarts": 0, "is_ready": False}]
    assert facts["num_stores"] == 2
    assert list(facts) == [field.name for field in message.DESCRIPTOR.fields]


def test_worker_when_it_has_not_started_then_has_no_process_id() -> None:
    workers = [control_pb2.WorkerStats(pid=pid) for pid in (0, 7)]
    facts = convert_stats(control_pb2.GetStatsResponse(workers=workers))
    assert [worker["pid"] for worker in facts["workers"]] == [None, 7]


def test_server_when_its_figures_are_shown_then_counts_have_the_names_of_their_transports() -> None:
    counts = [control_pb2.TransportStats(transport=name, bytes_in=5) for name in ("gloo", "inline")]
    facts = convert_stats(control_pb2.GetStatsResponse(transports=counts, server_id="s"))
    assert facts["server_id"] == "s"
    assert facts["sessions"] == []
    assert list(facts["transports"]) == ["gloo", "inline"]
    assert facts["transports"]["gloo"] == {
        "bytes_in": 5,
        "bytes_out": 0,
        "transfers_in": 0,
        "transfers_out": 0,
        "bytes_relayed": 0,
        "transfers_relayed": 0,
    }
