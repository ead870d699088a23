"""Simulates how long a version takes to reach many pullers, and what the server sends, with the rule of the server.

The model: every host has a full-duplex link of the same rate, and the network between them is not the bottleneck. A
host sends one chunk at a time, to its pullers in turn. A chunk arrives a latency after it was sent, and is passed on
from then on. All pullers ask at once. The control process handles one request at a time. A pair of clients has to be
formed before its first chunk, and a puller verifies what it received at the end. ``tdserve.rules.fanout`` decides who
gets the version from whom. Nothing fails, no host is slower than others, and copies within a host cost nothing.

``python -m tests.fanout_simulation`` prints the table of ``tdserve/bench/README.md``.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from tdserve.rules.fanout import SERVER, Fanout

MIB = 1 << 20


@dataclass(frozen=True)
class Network:
    """What a simulation assumes. The defaults of the last five were measured with two cores on one host.

    Attributes:
        nic_bytes_per_s: The rate of every host in each direction; 10 Gb/s.
        latency_s: Time from one host to another.
        chunk_bytes: The size of one message.
        pair_s: Time to form a pair of two clients.
        direct_s, relayed_s: Time that the control process takes for one pull.
        verified_bytes_per_s: The rate of checksums.
    """

    nic_bytes_per_s: float = 1.25e9
    latency_s: float = 100e-6
    chunk_bytes: int = 4 * MIB
    pair_s: float = 5e-3
    direct_s: float = 0.3e-3
    relayed_s: float = 1.1e-3
    verified_bytes_per_s: float = 3e9


@dataclass(frozen=True)
class Outcome:
    """The result of a simulation.

    Attributes:
        first_s, median_s, last_s: When pullers have the version, verified, after the publish.
        server_bytes: What the server has sent.
        depth: The depth of the tree: hops between the server and the last puller.
    """

    first_s: float
    median_s: float
    last_s: float
    server_bytes: int
    depth: int


@dataclass(eq=False)
class _Host:
    """A puller, or the server. A puller gets its version over one hop.

    Attributes:
        number: The server is 0.
        num_chunks: Chunks that are here.
        num_coming: Chunks that were sent to this puller.
        hop: The number of the hop in the rule of the server.
        keeps: Whether the puller passes the version on.
        depth: Hops between the server and this puller.
        done_s: When the puller has the version, verified.
        pullers: Those that this host still sends chunks to, the next one first.
    """

    number: int
    num_chunks: int = 0
    num_coming: int = 0
    hop: int = 0
    keeps: bool = False
    depth: int = 0
    done_s: float = 0.0
    is_sending: bool = False
    pullers: deque[_Host] = field(default_factory=deque)


class _Simulation:
    def __init__(self, num_pullers: int, nbytes: int, fanout: int, network: Network) -> None:
        self._network = network
        self._nbytes = nbytes
        self.num_chunks = -(-nbytes // network.chunk_bytes)
        self._fanout = Fanout(fanout) if fanout else None
        self.hosts = [_Host(number) for number in range(num_pullers + 1)]
        self.hosts[SERVER].num_chunks = self.num_chunks
        self.sent_chunks = 0
        self._now_s = 0.0
        self._control_free_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._waiting = deque(self.hosts[1:])

    def run(self) -> None:
        """Simulates until every puller has the version."""
        self._after(self._network.latency_s, self._place)
        while self._events:
            self._now_s, _, event = heapq.heappop(self._events)
            event()

    def _after(self, wait_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self._now_s + wait_s, next(self._order), event))

    def _place(self) -> None:
        """Tells those at the head of the line from whom they get the version."""
        network = self._network
        while self._waiting:
            puller, source = self._waiting[0], self.hosts[SERVER]
            if self._fanout is not None:
                placed = self._fanout.place(1, 1, puller.number, num_waiting=len(self._waiting) - 1)
                if placed is None:
                    return
                source, puller.hop, puller.keeps = self.hosts[placed.relay], placed.hop, placed.keeps
            self._waiting.popleft()
            puller.depth = source.depth + 1
            cost_s, pair_s = network.relayed_s, network.pair_s + network.latency_s
            if source.number == SERVER:
                cost_s, pair_s = network.direct_s, 0.0
            self._control_free_s = max(self._control_free_s, self._now_s) + cost_s
            wait_s = self._control_free_s - self._now_s + pair_s
            self._after(wait_s, partial(self._begin, source, puller))

    def _begin(self, source: _Host, puller: _Host) -> None:
        source.pullers.append(puller)
        self._send(source)

    def _send(self, source: _Host) -> None:
        """Sends the next chunk that is here to the next puller that lacks it."""
        if source.is_sending:
            return
        for _ in range(len(source.pullers)):
            puller = source.pullers.popleft()
            can_send = puller.num_coming < source.num_chunks
            puller.num_coming += can_send
            if puller.num_coming < self.num_chunks:
                source.pullers.append(puller)
            if can_send:
                source.is_sending = True
                took_s = self._network.chunk_bytes / self._network.nic_bytes_per_s
                self._after(took_s, partial(self._on_sent, source, puller))
                return

    def _on_sent(self, source: _Host, puller: _Host) -> None:
        source.is_sending = False
        self.sent_chunks += source.number == SERVER
        self._after(self._network.latency_s, partial(self._on_arrival, source, puller))
        self._send(source)

    def _on_arrival(self, source: _Host, puller: _Host) -> None:
        puller.num_chunks += 1
        latency_s = self._network.latency_s
        if puller.keeps and puller.num_chunks == 1:
            self._after(latency_s, partial(self._tell, puller, is_over=False))
        if puller.num_chunks == self.num_chunks:
            verify_s = 0.0 if source.number == SERVER else self._nbytes / self._network.verified_bytes_per_s
            puller.done_s = self._now_s + verify_s
            self._after(latency_s + verify_s, partial(self._tell, puller, is_over=True))
        self._send(puller)

    def _tell(self, puller: _Host, *, is_over: bool) -> None:
        if self._fanout is None:
            return
        if is_over:
            self._fanout.end(puller.hop, is_whole=True)
        else:
            self._fanout.note_holding(puller.number, puller.hop)
        self._place()


def simulate(num_pullers: int, nbytes: int, fanout: int, network: Network | None = None) -> Outcome:
    """Publishes one version of ``nbytes`` to pullers that all wait for it.

    Args:
        num_pullers: At least 1.
        nbytes: The size of the version.
        fanout: As in ``Client.publish``; with 0 the server sends the version to everybody.
        network: What to assume.
    """
    simulation = _Simulation(num_pullers, nbytes, fanout, network or Network())
    simulation.run()
    pullers = simulation.hosts[1:]
    done = sorted(host.done_s for host in pullers)
    server_bytes = simulation.sent_chunks * nbytes // simulation.num_chunks
    return Outcome(done[0], done[len(done) // 2], done[-1], server_bytes, max(host.depth for host in pullers))


def format_table(
    *, num_pullers: int = 1000, nbytes: int = 256 * MIB, fanouts: Iterable[int] = (0, 1, 2, 4, 8)
) -> list[str]:
    """Returns the lines of a table in Markdown."""
    lines = [
        "| fanout | median puller | last puller | sent by the server | depth |",
        "|---|---|---|---|---|",
    ]
    for fanout in fanouts:
        found = simulate(num_pullers, nbytes, fanout)
        name = str(fanout) if fanout else "none"
        gigabytes = f"{found.server_bytes / 1e9:.2f} GB"
        lines.append(f"| {name} | {found.median_s:.2f} s | {found.last_s:.2f} s | {gigabytes} | {found.depth} |")
    return lines


if __name__ == "__main__":
    print("\n".join(format_table()))
