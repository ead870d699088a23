"""Watches a run: reads from the server what any client could read from a second terminal."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from statistics import fmean
from typing import NamedTuple

import tdserve
from tdserve.examples.demo.stores import EPISODES_CAPACITY, POLICY, TRANSITIONS_CAPACITY, DemoStores

NUM_EPISODES_OF_MEAN = 20
"""The mean return is that of so many episodes."""

NUM_RECENT_ROWS = 64
"""So many of the newest transitions tell which policy the actors follow: one message of each of two actors."""

NUM_POLLS_OF_RATES = 4
"""Rates are those of so many polls (2 s). Over a shorter time they jump with every pause of a busy machine."""


class Episode(NamedTuple):
    """One finished episode."""

    seconds: float  # since the run began
    actor: int
    episode_return: float
    policy_version: int


@dataclass(frozen=True)
class Snapshot:
    """A run at one moment. All counts begin with the run."""

    seconds: float = 0.0
    num_episodes: int = 0
    mean_return: float | None = None  # of the last 20 episodes; None before there are 20
    num_transitions: int = 0
    num_samples: int = 0
    num_updates: int = 0
    version: int = 0
    staleness: float | None = None  # versions that the newest transitions' policy is behind the newest
    num_bytes: dict[str, int] = field(default_factory=dict)  # moved in both directions, by transport


@dataclass(frozen=True)
class Rates:
    """Per second, between two snapshots."""

    transitions: float
    samples: float
    updates: float
    num_bytes: dict[str, float]

    @classmethod
    def between(cls, first: Snapshot, last: Snapshot) -> Rates:
        """Returns the rates; all are 0 when no time passed."""
        span_s = last.seconds - first.seconds

        def rate(before: float, after: float) -> float:
            return (after - before) / span_s if span_s > 0 else 0.0

        return cls(
            transitions=rate(first.num_transitions, last.num_transitions),
            samples=rate(first.num_samples, last.num_samples),
            updates=rate(first.num_updates, last.num_updates),
            num_bytes={name: rate(first.num_bytes.get(name, 0), count) for name, count in last.num_bytes.items()},
        )


class Begun(NamedTuple):
    """How far a run is, and which rows, samples and updates are its first: earlier ones belong to earlier runs."""

    seconds: float = 0.0
    first_episode: int = 0
    first_transition: int = 0
    first_sample: int = 0
    first_update: int = 0

    @classmethod
    def now(cls, client: tdserve.Client, stores: DemoStores) -> Begun:
        """Returns a run that begins now, after everything that the stores hold."""
        policy = client.latest(POLICY, newer_than=0, timeout_s=0)
        transitions = stores.transitions.info()
        return cls(
            first_episode=stores.episodes.info()["inserts"],
            first_transition=transitions["inserts"],
            first_sample=transitions["samples"],
            first_update=0 if policy is None else policy.metadata["num_updates"],
        )


class Watch:
    """Follows a run.

    Args:
        client: The parent's own client.
        stores: The replays of the run.
        begun: How far the run is, and what does not belong to it.
    """

    def __init__(self, client: tdserve.Client, stores: DemoStores, begun: Begun) -> None:
        self._client = client
        self._stores = stores
        self._begun = begun
        self._started_s = time.time() - begun.seconds
        self._server_bytes = self._read_bytes()
        self._num_bytes = dict.fromkeys(self._server_bytes, 0)
        self._polls: deque[Snapshot] = deque(maxlen=NUM_POLLS_OF_RATES + 1)
        self._num_updates = begun.first_update
        self._version = 0
        self.episodes: list[Episode] = []

    @property
    def seconds(self) -> float:
        """The seconds since the run began."""
        return time.time() - self._started_s

    @property
    def newest(self) -> Snapshot:
        """The snapshot of the last poll."""
        return self._polls[-1] if self._polls else Snapshot(seconds=self._begun.seconds)

    @property
    def rates(self) -> Rates:
        """The rates of about the last two seconds; 0 until the second poll."""
        return Rates.between(self._polls[0] if self._polls else self.newest, self.newest)

    def poll(self) -> Snapshot:
        """Asks the server, and returns what it said.

        Raises:
            TDServeError: The server did not answer.
        """
        self.episodes = self._read_episodes()
        info = self._stores.transitions.info()
        versions = self._read_recent_versions(info["inserts"])
        self._read_policy()
        snapshot = Snapshot(
            seconds=self.seconds,
            num_episodes=len(self.episodes),
            mean_return=mean_return(self.episodes),
            num_transitions=info["inserts"] - self._begun.first_transition,
            num_samples=info["samples"] - self._begun.first_sample,
            num_updates=self._num_updates - self._begun.first_update,
            version=self._version,
            staleness=self._version - fmean(versions) if versions else None,
            num_bytes=self._count_bytes(),
        )
        self._polls.append(snapshot)
        return snapshot

    def _read_episodes(self) -> list[Episode]:
        episodes: list[Episode] = []
        for part in parts(self._begun.first_episode, self._stores.episodes.info()["inserts"], EPISODES_CAPACITY):
            rows = self._stores.episodes[part]
            columns = (rows["ended_s"] - self._started_s, rows["actor"], rows["episode_return"], rows["policy_version"])
            episodes += [Episode(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]
        return episodes

    def _read_bytes(self) -> dict[str, int]:
        transports = self._client.stats()["transports"]
        return {name: moved["bytes_in"] + moved["bytes_out"] for name, moved in transports.items()}

    def _count_bytes(self) -> dict[str, int]:
        """Returns the bytes moved since the watch began. A server that restarted counts from 0 again."""
        before, self._server_bytes = self._server_bytes, self._read_bytes()
        for name, num_bytes in self._server_bytes.items():
            first = before.get(name, 0)
            growth = num_bytes - first if num_bytes >= first else num_bytes  # after a restart: a lower bound
            self._num_bytes[name] = self._num_bytes.get(name, 0) + growth
        return dict(self._num_bytes)

    def _read_policy(self) -> None:
        policy = self._client.latest(POLICY, newer_than=self._version, timeout_s=0)
        if policy is not None:
            self._version = policy.version
            self._num_updates = policy.metadata["num_updates"]

    def _read_recent_versions(self, num_transitions: int) -> list[int]:
        end = num_transitions % TRANSITIONS_CAPACITY or TRANSITIONS_CAPACITY
        newest = slice(max(0, end - NUM_RECENT_ROWS), end)
        return self._stores.transitions[newest]["policy_version"].tolist() if num_transitions else []


def mean_return(episodes: list[Episode]) -> float | None:
    """Returns the mean return of the last 20 episodes; None before there are so many."""
    returns = [episode.episode_return for episode in episodes[-NUM_EPISODES_OF_MEAN:]]
    return fmean(returns) if len(returns) == NUM_EPISODES_OF_MEAN else None


def parts(first: int, end: int, capacity: int) -> list[slice]:
    """Returns where rows ``first`` to ``end - 1`` of a ring lie, oldest first, without those that were overwritten."""
    first = max(first, end - capacity)
    if first >= end:
        return []
    start, stop = first % capacity, (end - 1) % capacity + 1
    return [slice(start, stop)] if start < stop else [slice(start, capacity), slice(0, stop)]
