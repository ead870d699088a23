"""Draws for data-parallel readers of a table that several servers share."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from tdserve.base.deadline import Deadline
from tdserve.base.errors import DeadlineExceededError, InvalidRequestError, VersionConflictError
from tdserve.client.cluster.shard_draws import DrawnPart
from tdserve.client.cluster.shard_masses import ask_mass
from tdserve.client.cluster.sharded_table import ShardedTable
from tdserve.client.session.call_deadline import within
from tdserve.client.tables.sampling import Query, draw_whole_rows
from tdserve.client.tables.share import Share
from tdserve.rules.placement import name_splits
from tdserve.rules.shard_division import divide

MAX_SPLITS_BYTES = 1 << 20
"""Room for how thousands of steps were divided; each shard keeps the rows of the last few."""


PAUSE_S = 0.02
"""Pause of a rank that waits for rows of all shards."""


class ShardShares:
    """Divides each step among the shards, once for all ranks. Threads: safe."""

    def __init__(self, table: ShardedTable) -> None:
        self._table = table
        self._rng = np.random.default_rng()

    def draw(
        self, make_query: Callable[[Any], Query], share: Share, num_rows: int, deadline: Deadline
    ) -> list[DrawnPart]:
        """Draws the rows of one rank.

        Raises:
            ConnectError: A shard that has rows of this step does not answer.
            DeadlineExceededError, StepForgottenError: As of ``ReplayHandle.sample``.
        """
        with within(deadline):
            counts = self._agree(make_query, share, num_rows, deadline)

        def draw(shard: int, part: Any) -> DrawnPart:
            query = make_query(part)
            rows = draw_whole_rows(part._client, query, counts[shard], num_batches=1, deadline=deadline)
            return DrawnPart(shard, part._client, query, rows)

        def follow_and_draw(shard: int, part: Any) -> DrawnPart:
            found: DrawnPart = part.follow_and_retry(lambda: draw(shard, part), deadline)
            return found

        found = self._table.ask_each(counts, follow_and_draw, deadline=deadline)
        return [found[shard] for shard in sorted(found)]

    def forget(self, deadline: Deadline) -> None:
        """Forgets how steps were divided."""
        with within(deadline):
            splits = self._open()
            splits.delete(splits.keys(), missing_ok=True)

    def _open(self) -> Any:
        """Returns the keyed store that has how each step is divided."""
        client = self._table.get_part(0)._client
        return client.create_kv(
            name_splits(self._table.name), max_bytes=MAX_SPLITS_BYTES, eviction="lru", exists_ok=True
        )

    def _agree(
        self, make_query: Callable[[Any], Query], share: Share, num_rows: int, deadline: Deadline
    ) -> dict[int, int]:
        """Returns how many rows each shard gives to each rank in a step; the first rank that asks decides."""
        splits, name = self._open(), f"{share.run}/{share.world_size}/{share.step}"
        found = _read(splits, name, num_rows)
        if found is not None:
            return found
        counts = self._divide(make_query, share, num_rows, deadline)
        try:
            splits.put(name, [[shard, count] for shard, count in counts.items()], if_version=0)
        except VersionConflictError:  # another rank was faster
            return _read(splits, name, num_rows) or counts
        return counts

    def _divide(
        self, make_query: Callable[[Any], Query], share: Share, num_rows: int, deadline: Deadline
    ) -> dict[int, int]:
        table = self._table

        def ask(_: int, part: Any) -> Any:
            return ask_mass(part, lambda each: replace(make_query(each), share=None), num_rows, deadline)

        asked = table.ask_any_part(make_query, deadline)
        unit = asked.group_size or 1
        least = getattr(table.settings.limiter, "min_size", 0)
        while True:
            masses = table.ask_parts(table.list_live() or range(table.num_shards), ask)
            room = {shard: found.num_rows // (share.world_size * unit) for shard, found in masses.items()}
            is_enough = sum(found.num_rows for found in masses.values()) >= max(least, num_rows * share.world_size)
            if is_enough and sum(room.values()) * unit >= num_rows:
                shares = {shard: found.mass for shard, found in masses.items()}
                counts = divide(num_rows // unit, shares, self._rng)
                if any(count > room[shard] for shard, count in counts.items()):
                    counts = divide(num_rows // unit, room, self._rng, is_distinct=True)
                return {shard: count * unit for shard, count in counts.items()}
            if deadline.expired:
                what = f"{num_rows} rows for each of {share.world_size} ranks, as many of each shard, of {table.name!r}"
                raise DeadlineExceededError(what=what, timeout_s=deadline.timeout_s)
            time.sleep(deadline.limit(PAUSE_S))


def _read(splits: Any, name: str, num_rows: int) -> dict[int, int] | None:
    if name not in splits:
        return None
    found = {int(shard): int(count) for shard, count in splits.get(name)}
    if sum(found.values()) != num_rows:
        reason = f"{num_rows}: other ranks of this step have asked for {sum(found.values())} rows"
        raise InvalidRequestError(argument="num_rows", reason=reason)
    return found
