"""Servers and clients of a simulated cluster: they decide by the rules of real ones; only their work is assumed."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tdserve.bench.call_costs import CallCosts
from tdserve.bench.simulated_time import Process, SimulatedTime, Station
from tdserve.rules.lost_servers import REACH_S, LostServers
from tdserve.rules.placement import choose_servers, choose_writer_shard, list_shards_to_try
from tdserve.rules.replay.eligibility.conditions import PLAIN
from tdserve.rules.replay.limiter import MinSize
from tdserve.rules.replay.plans import Arrival, SamplePlan
from tdserve.rules.replay.samplers.prioritized import Prioritized
from tdserve.rules.replay.settings import Settings
from tdserve.rules.replay.table import Table
from tdserve.rules.replay.table_state import TableState
from tdserve.rules.shard_division import FRESH_S, KnownMasses, ShardMass, divide_sample

MIN_PAUSE_S, MAX_PAUSE_S = 0.002, 0.05
"""Pauses of a client that waits for rows."""

MESSAGE_NBYTES = 200
"""Of a request, or an answer, without rows."""


@dataclass(frozen=True)
class Scenario:
    """What is simulated.

    Attributes:
        num_servers: Each has one control process, its data workers and one wire.
        num_clients: Half of them write, half of them sample.
        num_stores: Prioritized tables; each client uses one.
        num_shards: Servers that share a table.
        part_rows: Capacity of each part.
        sample_rows, extend_rows: Rows of a call.
        row_nbytes: Bytes of a row.
        learn_s, act_s: Mean seconds between the calls of a client that samples, or writes.
        latency_s: Latency of a message on the wire.
        wire_bytes_per_s: Bytes per second of each server's network.
        seconds: How long it continues.
        lost_at_s: When the server that has most parts ends; never, if that is after the end.
        back_at_s: When it serves again, with its rows.
        fresh_s: Age up to which masses are used.
        changes_priorities: Whether clients that sample change the priorities of their rows.
        seed: The same one gives the same figures.
    """

    num_servers: int = 1000
    num_clients: int = 10_000
    num_stores: int = 1000
    num_shards: int = 8
    part_rows: int = 256
    sample_rows: int = 256
    extend_rows: int = 64
    row_nbytes: int = 1024
    learn_s: float = 2.0
    act_s: float = 1.0
    latency_s: float = 100e-6
    wire_bytes_per_s: float = 1.25e9
    seconds: float = 4.0
    lost_at_s: float = 1.0
    back_at_s: float = 3.0
    fresh_s: float = FRESH_S
    changes_priorities: bool = True
    seed: int = 0


class SimulatedServer:
    """A server: stations that calls wait for, and the parts of tables that are there.

    Attributes:
        parts: By store.
        is_up: Whether it listens.
    """

    def __init__(self, scenario: Scenario, costs: CallCosts) -> None:
        self._scenario = scenario
        self._costs = costs
        self.control, self.worker, self.wire = Station(), Station(), Station()
        self.parts: dict[int, Table] = {}
        self.is_up = True

    def serve(self, arrival_s: float, num_rows: int = 0) -> float:
        """Works on a request, and on its rows if it has any; returns when the last byte of the answer was sent."""
        scenario, costs = self._scenario, self._costs
        nbytes = num_rows * scenario.row_nbytes
        done_s = self.control.serve(arrival_s, costs.control_s)
        if num_rows:
            done_s = self.worker.serve(done_s, (costs.worker_s + nbytes * costs.worker_s_per_byte) / costs.num_workers)
        return self.wire.serve(done_s, (nbytes + MESSAGE_NBYTES) / scenario.wire_bytes_per_s)


@dataclass
class Tally:
    """What was seen.

    Attributes:
        num_calls: Calls of clients, by kind.
        num_requests: Requests of clients to servers, by kind.
        waits_s: How long calls took, by kind.
        distances: One per sample: half the sum of differences between the shares of the shards that it was divided by
            and those that they had when it was drawn.
        drawn, expected: Rows drawn of each part, and those to be expected by the shares that parts had.
        num_redirected: Extends that another shard took.
        noticed_s: When clients noticed that the server was lost.
        found_s: When clients noticed that it is back.
        num_beside: Samples of tables with a part on the lost server while it was lost.
        num_slow: How many of these waited for it.
    """

    num_calls: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("sample", "extend"), 0))
    num_requests: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("mass", "rows", "change"), 0))
    waits_s: dict[str, list[float]] = field(default_factory=lambda: {"sample": [], "extend": []})
    distances: list[float] = field(default_factory=list)
    drawn: dict[tuple[int, int], float] = field(default_factory=dict)
    expected: dict[tuple[int, int], float] = field(default_factory=dict)
    num_redirected: int = 0
    noticed_s: list[float] = field(default_factory=list)
    found_s: list[float] = field(default_factory=list)
    num_beside: int = 0
    num_slow: int = 0


class SimulatedCluster:
    """All servers and clients of a scenario.

    Attributes:
        servers: By number.
        placements: Servers of each store, by shard.
        lost: The server that is lost.
        tally: What was seen.
    """

    def __init__(self, scenario: Scenario, costs: CallCosts | None = None) -> None:
        self.scenario = scenario
        self.costs = costs or CallCosts()
        self.time = SimulatedTime()
        self.rng = np.random.default_rng(scenario.seed)
        self.tally = Tally()
        self.servers = [SimulatedServer(scenario, self.costs) for _ in range(scenario.num_servers)]
        names = (f"store-{number}" for number in range(scenario.num_stores))
        self.placements = [choose_servers(name, scenario.num_shards, scenario.num_servers) for name in names]
        self.settings = Settings(sampler=Prioritized(alpha=1.0), limiter=MinSize(scenario.sample_rows))
        for store, servers in enumerate(self.placements):
            for server in servers:
                part = self.servers[server].parts[store] = self._make_part(store)
                write_rows(part, scenario.part_rows // 2, self.rng)
        self.lost = max(range(scenario.num_servers), key=lambda server: len(self.servers[server].parts))
        for number in range(scenario.num_clients):
            client = SimulatedClient(self, number)
            mean_s = scenario.act_s if client.writes else scenario.learn_s
            self.time.start(client.work(mean_s), after_s=float(self.rng.exponential(mean_s)))

    def _make_part(self, store: int) -> Table:
        rows, limiter = self.scenario.part_rows, self.settings.limiter.make_part(self.scenario.num_shards)
        settings = self.settings.with_limiter(limiter)
        return Table(TableState(f"store-{store}", rows, np.zeros(rows, np.int64), settings))

    def run(self) -> Tally:
        """Runs until the end; returns what was seen."""
        scenario, lost = self.scenario, self.servers[self.lost]
        for moment_s, is_up in ((scenario.lost_at_s, False), (scenario.back_at_s, True)):
            if moment_s < scenario.seconds:
                self.time.run(moment_s)
                lost.is_up = is_up
        self.time.run(scenario.seconds)
        return self.tally

    def ask(self, shards: Iterable[int], store: int) -> dict[int, ShardMass]:
        """Returns what may be drawn from shards now."""
        return {shard: find_mass(self.get_part(store, shard)) for shard in shards}

    def get_part(self, store: int, shard: int) -> Table:
        """Returns a part of a table."""
        return self.servers[self.placements[store][shard]].parts[store]


class SimulatedClient:
    """A client that samples from one table, or writes to it.

    Args:
        number: Clients with the same remainder by the number of stores use one store; every other of them writes.
    """

    def __init__(self, cluster: SimulatedCluster, number: int) -> None:
        scenario = cluster.scenario
        self._cluster, self._scenario = cluster, scenario
        self._store = number % scenario.num_stores
        self.writes = bool(number // scenario.num_stores % 2)
        self._servers = cluster.placements[self._store]
        self._rng = np.random.default_rng([scenario.seed, number])
        self._known = KnownMasses(scenario.fresh_s)
        self._lost = LostServers()
        identity = self._rng.bytes(16)
        self._shard = choose_writer_shard(scenario.num_shards, writer=0, identity=identity, rank=None)
        self._scale = float(self._rng.lognormal())  # of its rows' priorities

    def work(self, mean_s: float) -> Process:
        """Makes calls for ever, with pauses of random length."""
        tally, time = self._cluster.tally, self._cluster.time
        kind, call = ("extend", self._extend) if self.writes else ("sample", self._sample)
        while True:
            began_s = time.now_s
            yield from call()
            tally.num_calls[kind] += 1
            tally.waits_s[kind].append(time.now_s - began_s)
            yield float(self._rng.exponential(mean_s))

    # ------------------------------------------------------------ calls

    def _sample(self) -> Process:
        cluster, scenario = self._cluster, self._scenario
        num_missing, plans, began_s = scenario.sample_rows, dict[int, SamplePlan](), cluster.time.now_s
        is_beside = cluster.lost in self._servers and scenario.lost_at_s <= began_s < scenario.back_at_s
        pause_s = MIN_PAUSE_S
        while num_missing:
            masses = yield from self._find_masses(is_fresh=bool(plans))
            counts = divide_sample(cluster.settings, masses, num_missing, self._rng)
            if counts is None:
                yield pause_s
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
                continue
            drawn = yield from self._draw(counts, masses)
            plans |= drawn
            num_missing -= sum(len(plan.rows) for plan in drawn.values())
        cluster.tally.num_beside += is_beside
        cluster.tally.num_slow += is_beside and cluster.time.now_s - began_s >= REACH_S
        if scenario.changes_priorities:
            yield from self._change_priorities(plans)

    def _draw(
        self, counts: Mapping[int, int], masses: Mapping[int, ShardMass]
    ) -> Generator[float, None, dict[int, SamplePlan]]:
        """Draws rows from some shards at the same time; those that do not answer give none."""
        cluster, tally, store = self._cluster, self._cluster.tally, self._store
        plans: dict[int, SamplePlan] = {}
        yield self._scenario.latency_s
        up, down = self._part_shards(counts)
        now = cluster.ask(masses if not down else up, store)
        used_total = sum(masses[shard].mass for shard in now)
        total = sum(mass.mass for mass in now.values())
        shares = {shard: mass.mass / total for shard, mass in now.items()}
        if not down:
            tally.distances.append(sum(abs(masses[s].mass / used_total - share) for s, share in shares.items()) / 2)
            for shard, share in shares.items():
                key = store, shard
                tally.expected[key] = tally.expected.get(key, 0.0) + share * sum(counts.values())
        done_s = cluster.time.now_s
        for shard in up:
            plan = cluster.get_part(store, shard).samples.draw_sample(counts[shard], rng=cluster.rng)
            done_s = max(done_s, self._serve(shard, "rows", counts[shard]))
            if plan is not None:
                plans[shard] = plan
                if not down:
                    tally.drawn[store, shard] = tally.drawn.get((store, shard), 0.0) + len(plan.rows)
        yield from self._wait_for(done_s, down)
        return plans

    def _find_masses(self, *, is_fresh: bool) -> Generator[float, None, Mapping[int, ShardMass]]:
        live = yield from self._list_live()
        known = None if is_fresh else self._known.find(None, live, self._cluster.time.now_s)
        if known is None:
            known = yield from self._ask_masses(live)
            if not set(live) <= set(known):  # the others had answered long before a server turned out to be lost
                known = yield from self._ask_masses((yield from self._list_live()))
            self._known.note(None, known, self._cluster.time.now_s)
        return known

    def _ask_masses(self, live: Sequence[int]) -> Generator[float, None, Mapping[int, ShardMass]]:
        found: Mapping[int, ShardMass] = {}
        while not found:
            yield self._scenario.latency_s
            up, down = self._part_shards(live or range(len(self._servers)))
            found = self._cluster.ask(up, self._store)
            done_s = max((self._serve(shard, "mass") for shard in up), default=0.0)
            yield from self._wait_for(done_s, down)
        return found

    def _change_priorities(self, plans: Mapping[int, SamplePlan]) -> Process:
        """Gives the rows that it has learned from other priorities."""
        yield self._scenario.latency_s
        up, down = self._part_shards(plans)
        done_s = self._cluster.time.now_s
        for shard in up:
            part, rows = self._cluster.get_part(self._store, shard), np.unique(plans[shard].rows)
            part.update_priority(rows, self._scale * self._rng.lognormal(size=len(rows)), None)
            done_s = max(done_s, self._serve(shard, "change"))
        self._known.forget()
        yield from self._wait_for(done_s, down)

    def _extend(self) -> Process:
        scenario, cluster = self._scenario, self._cluster
        for shard in list_shards_to_try(self._shard, len(self._servers), "redirect"):
            if (yield from self._is_lost(self._servers[shard])):
                continue
            yield scenario.latency_s
            up, down = self._part_shards([shard])
            if up:
                part = cluster.get_part(self._store, shard)
                write_rows(part, scenario.extend_rows, self._rng, self._scale)
                cluster.tally.num_redirected += shard != self._shard
            yield from self._wait_for(self._serve(shard, "rows", scenario.extend_rows) if up else 0.0, down)
            if up:
                return

    # ------------------------------------------------------------ servers

    def _serve(self, shard: int, kind: str, num_rows: int = 0) -> float:
        self._cluster.tally.num_requests[kind] += 1
        return self._cluster.servers[self._servers[shard]].serve(self._cluster.time.now_s, num_rows)

    def _part_shards(self, shards: Iterable[int]) -> tuple[list[int], list[int]]:
        """Returns the shards whose servers listen now, and the others."""
        listed = sorted(shards)
        up = [shard for shard in listed if self._cluster.servers[self._servers[shard]].is_up]
        return up, [shard for shard in listed if shard not in up]

    def _wait_for(self, done_s: float, down: Iterable[int]) -> Process:
        """Waits for the last answer, and for servers that do not listen as long as a call tries to reach them."""
        time, tally = self._cluster.time, self._cluster.tally
        lost = [self._servers[shard] for shard in down]
        yield max(done_s + self._scenario.latency_s - time.now_s, REACH_S if lost else 0.0)
        for server in lost:
            if self._lost.note_lost(server, time.now_s):
                tally.noticed_s.append(time.now_s)

    def _is_lost(self, server: int) -> Generator[float, None, bool]:
        if server in self._lost and self._lost.begin_probe(server, self._cluster.time.now_s):
            yield 2 * self._scenario.latency_s
            if self._cluster.servers[server].is_up:
                self._lost.note_found(server)
                self._cluster.tally.found_s.append(self._cluster.time.now_s)
        return server in self._lost

    def _list_live(self) -> Generator[float, None, list[int]]:
        live = []
        for shard, server in enumerate(self._servers):
            if not (yield from self._is_lost(server)):
                live.append(shard)
        return live


def find_mass(part: Table) -> ShardMass:
    """Returns what a server answers when it is asked for a mass."""
    selector, counts = part.selectors.get(PLAIN), part.counts
    masses = selector.mass, selector.least_mass, selector.num_epochs, selector.num_drawable, False
    return ShardMass(*masses, counts.num_rows, counts.inserts)


def write_rows(part: Table, num_rows: int, rng: np.random.Generator, scale: float = 1.0) -> None:
    """Commits rows with random priorities."""
    priorities: NDArray[np.float64] = scale * rng.lognormal(size=num_rows)
    reservation = part.arrivals.reserve(num_rows)
    if reservation is not None:
        part.arrivals.arrive(reservation.rows, Arrival(priorities=priorities))
        part.arrivals.commit(reservation)
