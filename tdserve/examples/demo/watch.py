"""What the parent sees of a run, read from the server like any client could from a second terminal."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import tdserve
from tdserve.examples.demo.stores import EPISODES_CAPACITY, POLICY, TRANSITIONS_CAPACITY, Stores

NUM_EPISODES_OF_MEAN = 20
"""Episodes that the mean return is taken over."""

NUM_RECENT_ROWS = 64
"""Newest transitions that tell which policy the actors follow: one message of each of two actors."""

NUM_POLLS_OF_RATES = 4
"""Rates are taken over these polls (2 s): shorter spans jump with every pause of a busy machine."""


class Episode(NamedTuple):
    """One finished episode."""

    seconds: float  # since the run began
    actor: int
    episode_return: float
    policy_version: int


@dataclass(frozen=True)
class Snapshot:
    """A run at one moment. Counts are since its beginning."""

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
        """The rates; all 0 when no time passed."""
        span_s = last.seconds - first.seconds
        per_s = 1.0 / span_s if span_s > 0 else 0.0
        return cls(
            transitions=(last.num_transitions - first.num_transitions) * per_s,
            samples=(last.num_samples - first.num_samples) * per_s,
            updates=(last.num_updates - first.num_updates) * per_s,
            num_bytes={name: (count - first.num_bytes.get(name, 0)) * per_s for name, count in last.num_bytes.items()},
        )


class Watch:
    """Follows a run.

    Args:
        client: The parent's own.
        stores: The run's replays.
        started_s: When the run began, in seconds since the epoch.
        first_episode: Number of the first episode that belongs to it.
    """

    def __init__(self, client: tdserve.Client, stores: Stores, *, started_s: float, first_episode: int = 0) -> None:
        self._client = client
        self._stores = stores
        self._started_s = started_s
        self._first_episode = first_episode
        self._polls: deque[Snapshot] = deque([Snapshot()], maxlen=NUM_POLLS_OF_RATES + 1)
        self._num_updates = 0
        self._version = 0
        self.episodes: list[Episode] = []

    @property
    def seconds(self) -> float:
        """Since the run began."""
        return time.time() - self._started_s

    @property
    def newest(self) -> Snapshot:
        """What the last poll saw."""
        return self._polls[-1]

    @property
    def rates(self) -> Rates:
        """Of the last two seconds or so."""
        return Rates.between(self._polls[0], self._polls[-1])

    def poll(self) -> Snapshot:
        """Asks the server.

        Raises:
            TDServeError: It did not answer.
        """
        self.episodes = self._read_episodes()
        info = self._stores.transitions.info()
        versions = self._read_recent_versions(info["inserts"])
        self._read_policy()
        snapshot = Snapshot(
            seconds=self.seconds,
            num_episodes=len(self.episodes),
            mean_return=mean_return(self.episodes),
            num_transitions=info["inserts"],
            num_samples=info["samples"],
            num_updates=self._num_updates,
            version=self._version,
            staleness=self._version - sum(versions) / len(versions) if versions else None,
            num_bytes={
                name: moved["bytes_in"] + moved["bytes_out"]
                for name, moved in self._client.stats()["transports"].items()
            },
        )
        self._polls.append(snapshot)
        return snapshot

    def _read_episodes(self) -> list[Episode]:
        episodes: list[Episode] = []
        for part in parts(self._first_episode, self._stores.episodes.info()["inserts"], EPISODES_CAPACITY):
            rows = self._stores.episodes[part]
            columns = (rows["ended_s"] - self._started_s, rows["actor"], rows["episode_return"], rows["policy_version"])
            episodes += [Episode(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]
        return episodes

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
    """Of the last 20 episodes; None before there are so many."""
    returns = [episode.episode_return for episode in episodes[-NUM_EPISODES_OF_MEAN:]]
    return sum(returns) / len(returns) if len(returns) == NUM_EPISODES_OF_MEAN else None


def parts(first: int, end: int, capacity: int) -> list[slice]:
    """Where rows number ``first`` to ``end - 1`` of a ring lie, those that were overwritten left out, oldest first."""
    first = max(first, end - capacity)
    if first >= end:
        return []
    start, stop = first % capacity, (end - 1) % capacity + 1
    return [slice(start, stop)] if start < stop else [slice(start, capacity), slice(0, stop)]
