from __future__ import annotations

from contextlib import closing

from tdserve.bench.child import Child
from tdserve.bench.floor_link import HOST, PURPOSE, REQUEST_NBYTES, Exchange
from tdserve.transport.gloo import CLIENT_RANK, GlooChannel
from tdserve.transport.proving import Bond
from tests.unit.transport.bonds import SECRET


def test_peer_when_ordered_then_answers_every_operation_and_says_when_it_has_everything() -> None:
    with closing(Child("tdserve.bench.floor_link")) as child:
        assert child.hear() == {"ready": True}
        child.tell({"connect": HOST, "secret": SECRET.hex()})
        channel = GlooChannel(child.pipe.kv_store, CLIENT_RANK, host=HOST, bond=Bond(SECRET, PURPOSE), peer="the peer")
        exchange = Exchange(channel)
        child.tell({"out": 0, "in": REQUEST_NBYTES, "num_ops": 2, "message_nbytes": 1_000})
        assert child.hear() == {"ready": True}
        for _ in range(3):  # two operations, then the end
            exchange.receive(REQUEST_NBYTES)
        channel.close()
