"""Watches a run: reads from the server what any client could read from a second terminal."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, NamedTuple

from tensordict import TensorDictBase

import tdserve
from tdserve.examples.demo.demo_stores import EPISODES_CAPACITY, POLICY, TRANSITIONS_CAPACITY, DemoStores

NUM_EPISODES_OF_MEAN = 20
"""The mean return is that of this many episodes."""

NUM_RECENT_ROWS = 64
"""This many of the newest transitions tell which policy the actors follow: one message of each of two actors."""

NUM_POLLS_OF_RATES = 4
"""Rates are those of this many polls (2 s). Over a shorter time they jump with every pause of a busy machine."""


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


def compute_rates(first: Snapshot, last: Snapshot) -> dict[str, Any]:
    """Returns transitions, samples, updates and ``num_bytes`` per second between two snapshots.

    All are 0 when no time passed.
    """
    span_s = last.seconds - first.seconds or math.inf
    return {
        "transitions": (last.num_transitions - first.num_transitions) / span_s,
        "samples": (last.num_samples - first.num_samples) / span_s,
        "updates": (last.num_updates - first.num_updates) / span_s,
        "num_bytes": {name: (num - first.num_bytes.get(name, 0)) / span_s for name, num in last.num_bytes.items()},
    }


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
        transitions = stores.transitions.info()
        return cls(
            first_episode=stores.episodes.info()["inserts"],
            first_transition=transitions["inserts"],
            first_sample=transitions["samples"],
            first_update=find_newest(client)[1],
        )


class RunWatch:
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
        self._num_bytes = Counter(dict.fromkeys(self._server_bytes, 0))
        self._polls = deque([Snapshot(seconds=begun.seconds)], maxlen=NUM_POLLS_OF_RATES + 1)
        self.episodes: list[Episode] = []

    @property
    def seconds(self) -> float:
        """The seconds since the run began."""
        return time.time() - self._started_s

    @property
    def progress(self) -> dict[str, float]:
        """The metadata of each published policy, for a learner that continues the run."""
        return self._begun._replace(seconds=self.seconds)._asdict()

    @property
    def newest(self) -> Snapshot:
        """The snapshot of the last poll."""
        return self._polls[-1]

    @property
    def rates(self) -> dict[str, Any]:
        """The rates of about the last two seconds."""
        return compute_rates(self._polls[0], self._polls[-1])

    def poll(self) -> Snapshot:
        """Asks the server, and returns its figures.

        Raises:
            TDServeError: The server did not answer.
        """
        self.episodes = self._read_episodes()
        info = self._stores.transitions.info()
        num_rows = info["inserts"]
        recent = read_rows(self._stores.transitions, max(0, num_rows - NUM_RECENT_ROWS), num_rows, TRANSITIONS_CAPACITY)
        versions = [version for rows in recent for version in rows["policy_version"].tolist()]
        version, num_updates = find_newest(self._client)
        snapshot = Snapshot(
            seconds=self.seconds,
            num_episodes=len(self.episodes),
            mean_return=compute_mean_return(self.episodes),
            num_transitions=num_rows - self._begun.first_transition,
            num_samples=info["samples"] - self._begun.first_sample,
            num_updates=num_updates - self._begun.first_update,
            version=version,
            staleness=version - fmean(versions) if versions else None,
            num_bytes=self._count_bytes(),
        )
        self._polls.append(snapshot)
        return snapshot

    def _read_episodes(self) -> list[Episode]:
        replay, episodes = self._stores.episodes, []
        for rows in read_rows(replay, self._begun.first_episode, replay.info()["inserts"], EPISODES_CAPACITY):
            columns = (rows["ended_s"] - self._started_s, rows["actor"], rows["episode_return"], rows["policy_version"])
            episodes += [Episode(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]
        return episodes

    def _read_bytes(self) -> Counter[str]:
        transports = self._client.stats()["transports"]
        return Counter({name: moved["bytes_in"] + moved["bytes_out"] for name, moved in transports.items()})

    def _count_bytes(self) -> dict[str, int]:
        """Returns the bytes moved since the watch began; where the server has restarted, at least that many."""
        before, self._server_bytes = self._server_bytes, self._read_bytes()
        self._num_bytes.update(self._server_bytes - before)  # without those that a new server counts from 0 again
        return dict(self._num_bytes)


def find_newest(client: tdserve.Client) -> tuple[int, int]:
    """Returns the number of the newest policy, and after how many updates it was published."""
    if POLICY not in client:
        return 0, 0
    newest = client.versions(POLICY)[-1]
    return newest.version, newest.metadata["num_updates"]


def compute_mean_return(episodes: list[Episode]) -> float | None:
    """Returns the mean return of the last 20 episodes; None before there are that many."""
    returns = [episode.episode_return for episode in episodes[-NUM_EPISODES_OF_MEAN:]]
    return fmean(returns) if len(returns) == NUM_EPISODES_OF_MEAN else None


def read_rows(replay: tdserve.ReplayHandle, first: int, end: int, capacity: int) -> list[TensorDictBase]:
    """Returns rows ``first`` to ``end - 1`` of a ring, oldest first, without those that were overwritten."""
    first = max(first, end - capacity)
    if first >= end:
        return []
    start, stop = first % capacity, (end - 1) % capacity + 1
    parts = [slice(start, stop)] if start < stop else [slice(start, capacity), slice(0, stop)]
    return [replay[part] for part in parts]
