from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from tdserve.base.errors import PeerLostError
from tdserve.bench.child import Child, LinePipe


def test_pipe_when_lines_come_then_entries_feed_the_rendezvous_and_the_rest_is_received() -> None:
    lines = [{"key": "0/1", "value": "6162"}, {"order": 7}]
    pipe = LinePipe(io.StringIO("".join(json.dumps(line) + "\n" for line in lines)), io.StringIO())
    assert pipe.receive() == {"order": 7}
    assert pipe.receive() is None
    assert pipe.kv_store.get("0/1") == b"ab"


def test_pipe_when_the_rendezvous_sets_an_entry_then_a_line_tells_the_other_end() -> None:
    outgoing = io.StringIO()
    LinePipe(io.StringIO(""), outgoing).kv_store.set("0/0", b"ab")
    assert json.loads(outgoing.getvalue()) == {"key": "0/0", "value": "6162"}


def test_pipe_when_nobody_reads_any_more_then_send_says_so() -> None:
    outgoing = io.StringIO()
    outgoing.close()
    with pytest.raises(PeerLostError):
        LinePipe(io.StringIO(""), outgoing).send({"order": 1})


def test_child_when_it_ends_at_once_then_hear_says_so_and_close_reaps_it() -> None:
    child = Child("tdserve.bench.floor_link")
    assert child.receive() == {"ready": True}
    child.close()
    with pytest.raises(PeerLostError, match="floor_link"):
        child.receive()
    assert not Path(f"/proc/{child.pid}").exists()
