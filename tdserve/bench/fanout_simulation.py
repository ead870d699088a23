"""How long a version takes to reach many pullers, and what the server sends: a simulation, with the rule of the server.

The model. Every host has a full-duplex link of one rate, and the network between them is not the bottleneck. A host
sends one chunk at a time, to its pullers in turn; a chunk arrives a latency after it was sent, and from then on is
passed on. All pullers ask at once. The control process handles one request at a time. A pair of clients has to be
formed before its first chunk, and what came is verified at the end. ``tdserve.rules.fanout`` decides who gets it from
whom. Nothing fails, nobody is slower than others, and copies within a host cost nothing.
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
    """What a simulation assumes; the defaults of the last five were measured with two cores on one host.

    Attributes:
        nic_bytes_per_s: Of every host, in each direction; 10 Gb/s.
        latency_s: From one host to another.
        chunk_bytes: Of one message.
        pair_s: To form a pair of two clients.
        direct_s, relayed_s: Time of the control process for one pull.
        verified_bytes_per_s: Checksums.
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
    """What came of it.

    Attributes:
        first_s, median_s, last_s: When pullers have the version, verified, after the publish.
        server_bytes: What the server has sent.
        depth: Of the tree: ends between the server and the last puller.
    """

    first_s: float
    median_s: float
    last_s: float
    server_bytes: int
    depth: int


@dataclass(eq=False)
class _Host:
    """A puller, or the server."""

    number: int
    num_chunks: int = 0  # that are here
    depth: int = 0
    done_s: float = 0.0
    is_sending: bool = False
    links: deque[_Flow] = field(default_factory=deque)


@dataclass(eq=False)
class _Flow:
    """A version on its way to one puller."""

    number: int
    puller: _Host
    is_from_server: bool
    keeps: bool
    next_chunk: int = 0


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
        """To the end."""
        self._after(self._network.latency_s, self._place)
        while self._events:
            self._now_s, _, event = heapq.heappop(self._events)
            event()

    def _after(self, wait_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self._now_s + wait_s, next(self._order), event))

    def _place(self) -> None:
        """Tells those at the head of the line whom they get it from."""
        while self._waiting:
            puller, network = self._waiting[0], self._network
            if self._fanout is None:
                source, flow = SERVER, _Flow(puller.number, puller, True, False)
            else:
                placed = self._fanout.place(1, 1, puller.number, num_waiting=len(self._waiting) - 1)
                if placed is None:
                    return
                source, flow = placed.relay, _Flow(placed.link, puller, placed.relay == SERVER, placed.keeps)
            self._waiting.popleft()
            cost_s = network.direct_s if source == SERVER else network.relayed_s
            self._control_free_s = max(self._control_free_s, self._now_s) + cost_s
            pair_s = 0.0 if source == SERVER else network.pair_s + network.latency_s
            puller.depth = self.hosts[source].depth + 1
            wait_s = self._control_free_s - self._now_s + pair_s
            self._after(wait_s, partial(self._begin, self.hosts[source], flow))

    def _begin(self, source: _Host, flow: _Flow) -> None:
        source.links.append(flow)
        self._send(source)

    def _send(self, source: _Host) -> None:
        """The next chunk that is here, to the next puller that lacks it."""
        if source.is_sending:
            return
        for _ in range(len(source.links)):
            flow = source.links.popleft()
            if flow.next_chunk < source.num_chunks:
                flow.next_chunk += 1
                if flow.next_chunk < self.num_chunks:
                    source.links.append(flow)
                source.is_sending = True
                took_s = self._network.chunk_bytes / self._network.nic_bytes_per_s
                self._after(took_s, partial(self._on_sent, source, flow))
                return
            source.links.append(flow)

    def _on_sent(self, source: _Host, flow: _Flow) -> None:
        source.is_sending = False
        self.sent_chunks += source.number == SERVER
        is_last = flow.next_chunk == self.num_chunks
        self._after(self._network.latency_s, partial(self._on_arrival, flow, is_last=is_last))
        self._send(source)

    def _on_arrival(self, flow: _Flow, *, is_last: bool) -> None:
        puller = flow.puller
        puller.num_chunks += 1
        if flow.keeps and puller.num_chunks == 1:
            self._after(self._network.latency_s, partial(self._tell, flow, is_over=False))
        if is_last:
            verify_s = 0.0 if flow.is_from_server else self._nbytes / self._network.verified_bytes_per_s
            puller.done_s = self._now_s + verify_s
            self._after(self._network.latency_s + verify_s, partial(self._tell, flow, is_over=True))
        self._send(puller)

    def _tell(self, flow: _Flow, *, is_over: bool) -> None:
        if self._fanout is None:
            return
        if is_over:
            self._fanout.end(flow.number, is_whole=True)
        else:
            self._fanout.holds(flow.puller.number, flow.number)
        self._place()


def simulate(num_pullers: int, nbytes: int, fanout: int, network: Network | None = None) -> Outcome:
    """Publishes one version of ``nbytes`` to pullers that all wait for it.

    Args:
        num_pullers: At least 1.
        nbytes: Of the version.
        fanout: As of ``Client.publish``; 0: the server sends it to everybody.
        network: What to assume.
    """
    simulation = _Simulation(num_pullers, nbytes, fanout, network or Network())
    simulation.run()
    pullers = simulation.hosts[1:]
    done = sorted(host.done_s for host in pullers)
    server_bytes = simulation.sent_chunks * nbytes // simulation.num_chunks
    return Outcome(done[0], done[len(done) // 2], done[-1], server_bytes, max(host.depth for host in pullers))


def table(*, num_pullers: int = 1000, nbytes: int = 256 * MIB, fanouts: Iterable[int] = (0, 1, 2, 4, 8)) -> list[str]:
    """The lines of a table in Markdown."""
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
