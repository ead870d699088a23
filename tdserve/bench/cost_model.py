"""A model of what calls cost, fitted to measured figures: which part of a server limits 1, 10 and 1,000 machines."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tdserve.bench.figures import Figure

PARTS = ("control", "workers", "client")

MACHINES = (1, 10, 1000)

WIRE_BYTES_PER_S = 1.25e9
"""Of each machine: 10 Gbit/s."""

WORKERS_OF_MACHINE, CORES_OF_MACHINE = 4, 16

_NAME = re.compile(r"(?P<call>.+), (?P<clients>\d+) clients?(?:, (?P<shards>\d+) shards?)?")

MAX_ERROR = 0.5
"""Error of a model at any measured point beyond which no limit is named: the machine did other things as well."""

MAX_CROWDING = 0.5

MAX_PER_CORE = 4
"""Clients per core beyond which they wait for their turn at a core more than for the server: calls then cost several
times as much."""

LEAST_S = 1e-6
"""Seconds of CPU below which a part has none in a call."""


@dataclass(frozen=True)
class Point:
    """One measured figure.

    Attributes:
        calls_per_s: Calls per second of all clients.
        cpu_s: CPU time of a call, by part.
        mib: Memory by part, of all its processes.
        nbytes: Content of a call.
        wait_s: Median time of a call.
    """

    num_clients: int
    num_shards: int
    calls_per_s: float
    cpu_s: Mapping[str, float]
    mib: Mapping[str, float]
    nbytes: float
    wait_s: float


@dataclass(frozen=True)
class CallModel:
    """What one kind of call costs.

    Attributes:
        call: Its name.
        fixed_s, per_shard_s: Seconds of CPU of a call, by part: those that it costs anyway, and for each shard.
        crowding: By what part all of it costs more for each client per core beyond one.
        nbytes: Content of a call.
        delay_s: Time of a call in which nothing works on it.
        session_mib: Memory that a session costs, by part.
        shard_mib: Memory of a server, by part.
        errors: By number of clients and shards, of the fitted points: calculated by measured calls/s, less 1.
    """

    call: str
    fixed_s: Mapping[str, float]
    per_shard_s: Mapping[str, float]
    crowding: float
    nbytes: float
    delay_s: float
    session_mib: Mapping[str, float]
    shard_mib: Mapping[str, float]
    errors: Mapping[tuple[int, int], float]

    @property
    def is_usable(self) -> bool:
        """Whether the model comes so near to what was measured that limits may be calculated with it."""
        return all(abs(error) <= MAX_ERROR for error in self.errors.values())

    def compute_cpu_s(self, part: str, num_shards: int) -> float:
        """Returns the CPU of a call at one part, of all its processes, where each client has a core."""
        return max(self.fixed_s[part] + self.per_shard_s[part] * num_shards, 0.0)

    def find_limits(self, num_machines: int, *, num_shards: int) -> dict[str, float]:
        """Returns the calls/s that each part of all machines suffices for, the least first.

        Each machine has one server; clients have machines of their own, of as many cores.

        Args:
            num_shards: Machines that share a table.
        """
        control_s, workers_s, client_s = (self.compute_cpu_s(part, num_shards) for part in PARTS)
        demands = {
            "control": control_s,
            "workers": workers_s / WORKERS_OF_MACHINE,
            "cores of servers": (control_s + workers_s) / CORES_OF_MACHINE,
            "wire": self.nbytes / WIRE_BYTES_PER_S,
            "cores of clients": client_s / CORES_OF_MACHINE,
        }
        limits = {name: num_machines / demand for name, demand in demands.items() if demand >= LEAST_S / 100}
        return dict(sorted(limits.items(), key=lambda item: item[1]))


def read_points(figures: Iterable[Figure]) -> dict[str, list[Point]]:
    """Returns the points of each kind of call among figures of the workloads ``clients`` and ``cluster``."""
    found: dict[str, list[Point]] = {}
    for figure in figures:
        name = _NAME.fullmatch(figure.name)
        if name is None or figure.unit != "calls/s" or "client CPU" not in figure.details:
            continue
        details = figure.details
        point = Point(
            int(name["clients"]),
            int(name["shards"] or 1),
            figure.median,
            {part: details.get(f"{part} CPU", 0.0) / 1e6 for part in PARTS},
            {part: details.get(f"{part} MiB", 0.0) for part in PARTS},
            details.get("MB/s", 0.0) * 1e6 / figure.median,
            figure.op_median_ms / 1e3,
        )
        found.setdefault(name["call"], []).append(point)
    return found


def fit(call: str, points: Sequence[Point], num_cores: int) -> CallModel:
    """Fits costs to the points of a kind of call, by least squares of relative errors.

    Points of more than ``MAX_PER_CORE`` clients per core are left out, if there are others.

    Args:
        num_cores: Number of cores of the machine on which everything ran.
    """
    points = [point for point in points if point.num_clients <= MAX_PER_CORE * num_cores] or points
    shards = np.array([point.num_shards for point in points], np.float64)
    clients = np.array([point.num_clients for point in points], np.float64)
    session_mib, shard_mib = {}, {}
    for part in PARTS:
        columns = np.stack([clients, shards], axis=1)
        (session, shard), *_ = np.linalg.lstsq(columns, np.array([point.mib[part] for point in points]), rcond=None)
        session_mib[part], shard_mib[part] = float(session), float(shard)
    least = min(point.num_clients for point in points)
    delays_s = [
        point.wait_s * (least / point.num_clients) - sum(point.cpu_s.values())
        for point in points
        if point.num_clients == least
    ]
    costs = [_fit_costs(points, float(crowding), num_cores) for crowding in np.linspace(0.0, MAX_CROWDING, 101)]
    model = CallModel(
        call=call,
        **min(costs, key=lambda each: _find_error(points, each, num_cores))._asdict(),
        nbytes=median(point.nbytes for point in points),
        delay_s=max(median(delays_s), 0.0),
        session_mib=session_mib,
        shard_mib=shard_mib,
        errors={},
    )
    errors = {}
    for point in points:
        demand_s = sum(model.compute_cpu_s(part, point.num_shards) for part in PARTS)
        demand_s *= 1 + model.crowding * compute_crowd(point.num_clients, num_cores)
        calculated = compute_rate(point.num_clients, demand_s, num_cores, model.delay_s)
        errors[point.num_clients, point.num_shards] = calculated / point.calls_per_s - 1
    return replace(model, errors=errors)


class _Costs(NamedTuple):
    fixed_s: dict[str, float]
    per_shard_s: dict[str, float]
    crowding: float


def _fit_costs(points: Sequence[Point], crowding: float, num_cores: int) -> _Costs:
    costs = _Costs({}, {}, crowding)
    shards = np.array([point.num_shards for point in points], np.float64)
    grown = np.array([1 + crowding * compute_crowd(point.num_clients, num_cores) for point in points])
    weights = grown / [sum(point.cpu_s.values()) for point in points]
    for part in PARTS:
        cpu_s = np.array([point.cpu_s[part] for point in points]) / grown
        costs.fixed_s[part], costs.per_shard_s[part] = _fit_line(shards, cpu_s, weights)
    return costs


def _find_error(points: Iterable[Point], costs: _Costs, num_cores: int) -> float:
    """Returns the sum of squares of the relative errors of the CPU of all parts."""
    error = 0.0
    for point in points:
        fitted_s = sum(costs.fixed_s[part] + costs.per_shard_s[part] * point.num_shards for part in PARTS)
        fitted_s *= 1 + costs.crowding * compute_crowd(point.num_clients, num_cores)
        error += (fitted_s / sum(point.cpu_s.values()) - 1) ** 2
    return error


def compute_crowd(num_clients: int, num_cores: int) -> float:
    """Returns how many clients there are for each core, beyond one."""
    return max(num_clients / num_cores - 1, 0.0)


def _fit_line(x: NDArray[np.float64], y: NDArray[np.float64], weights: NDArray[np.float64]) -> tuple[float, float]:
    """Returns the intercept and the slope, neither of them negative, that fit best: no part of a call costs less than
    nothing."""

    def fit_columns(*columns: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.asarray(np.linalg.lstsq(np.stack(columns, axis=1) * weights[:, None], y * weights)[0], np.float64)

    ones = np.ones_like(x)
    if len(set(x)) < 2:
        return float(fit_columns(ones)[0]), 0.0
    intercept, slope = fit_columns(ones, x)
    if slope < 0:
        return max(float(fit_columns(ones)[0]), 0.0), 0.0
    if intercept < 0:
        return 0.0, max(float(fit_columns(x)[0]), 0.0)
    return float(intercept), float(slope)


def compute_rate(num_clients: int, demand_s: float, num_cores: int, delay_s: float) -> float:
    """Returns the calls/s of clients that each wait for their own, by mean value analysis.

    Several cores are one queue that is as many times as fast, and a delay that makes up for it to a call that is alone
    (Seidmann's approximation).

    Args:
        demand_s: CPU of a call.
        num_cores: Cores that share it.
        delay_s: Time of a call in which nothing works on it.
    """
    queue_s, delay_s = demand_s / num_cores, delay_s + demand_s * (num_cores - 1) / num_cores
    rate = waiting = 0.0
    for number in range(1, num_clients + 1):
        residence_s = queue_s * (1 + waiting)
        rate = number / (delay_s + residence_s)
        waiting = rate * residence_s
    return rate
