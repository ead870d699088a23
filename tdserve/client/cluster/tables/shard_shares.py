"""Draws for data-parallel readers of a table that several servers share."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from tdserve.base.deadline import Deadline
from tdserve.base.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    TDServeError,
    TransportError,
    VersionConflictError,
)
from tdserve.client.cluster.servers.part_errors import note_elsewhere
from tdserve.client.cluster.tables.drawn_parts import DrawnPart, weigh_parts
from tdserve.client.cluster.tables.shard_masses import ask_mass
from tdserve.client.cluster.tables.sharded_table import ShardedTable
from tdserve.client.session.calls.call_conditions import may_repeat
from tdserve.client.session.calls.call_deadline import within
from tdserve.client.tables.draws.query import Query
from tdserve.client.tables.draws.sampling import draw_whole_rows
from tdserve.client.tables.draws.share import Share
from tdserve.rules.lost_servers import PATIENCE_S
from tdserve.rules.placement import name_splits
from tdserve.rules.shard_division import ShardMass, ShardScale, check_not_final, divide_among_ranks, explain_shortage

MAX_SPLITS_BYTES = 1 << 20
"""Room for how thousands of steps were divided; each shard keeps the rows of the last few."""


PAUSE_S = 0.02
"""Pause of a rank that waits for rows of all shards."""


class StepDivision(NamedTuple):
    """How a step is divided among the shards.

    Attributes:
        counts: Rows that each rank gets of a shard.
        scales: Scales of all shards when it was divided: ranks that ask later have probabilities and weights by the
            same ones.
    """

    counts: dict[int, int]
    scales: dict[int, ShardScale]

    @classmethod
    def parse(cls, kept: Any) -> StepDivision:
        """Reads what :meth:`format` made."""
        counts = {int(shard): int(count) for shard, count, _, _ in kept if count}
        return cls(counts, {int(shard): ShardScale(float(mass), float(least)) for shard, _, mass, least in kept})

    def format(self) -> list[list[float]]:
        """Returns shard, rows of a rank, mass and least mass of each shard, for the keyed store."""
        return [[shard, self.counts.get(shard, 0), *scale] for shard, scale in self.scales.items()]


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
            DeadlineExceededError, StepForgottenError: As in ``ReplayHandle.sample``.
        """
        with within(deadline):
            counts, scales = self._agree(make_query, share, num_rows, deadline)

        def draw(shard: int, part: Any) -> DrawnPart:
            query = make_query(part)
            rows = draw_whole_rows(part._client, query, counts[shard], num_batches=1, deadline=deadline)
            return DrawnPart(shard, part._client, query, rows)

        def follow_and_draw(shard: int, part: Any) -> DrawnPart:
            found: DrawnPart = part.follow_and_retry(lambda: draw(shard, part), deadline)
            return found

        try:
            found = self._table.ask_each(counts, follow_and_draw, deadline=deadline)
        except DeadlineExceededError as error:
            if isinstance(error.__cause__, TransportError):  # it is not rows that are missing, but answers
                raise
            later = f"step {share.step} was divided when there were enough; if no more come, all ranks may go on with"
            raise note_elsewhere(error, f"{later} step={share.step + 1}") from error
        parts = [found[shard] for shard in sorted(found)]
        weigh_parts(parts, scales, self._table.settings.sampler)
        return parts

    def forget(self, deadline: Deadline) -> None:
        """Forgets how steps were divided."""
        with within(deadline):
            splits = self._open()
            splits.delete(splits.keys(), missing_ok=True)

    def _open(self) -> Any:
        """Returns the keyed store that has how each step is divided."""
        client = self._table.parts.get_part(0)._client
        return client.create_kv(
            name_splits(self._table.name), max_bytes=MAX_SPLITS_BYTES, eviction="lru", exists_ok=True
        )

    def _agree(
        self, make_query: Callable[[Any], Query], share: Share, num_rows: int, deadline: Deadline
    ) -> StepDivision:
        """Returns how a step is divided; the first rank that asks decides."""
        splits, name = self._open(), f"{share.run}/{share.world_size}/{share.step}"
        query: Query | None = None
        while True:
            found = _read(splits, name, num_rows)  # again after each wait: another rank may have drawn what has come
            if found is not None:
                return found
            if query is None:
                query = self._table.ask_any_part(make_query, deadline)
                self._check(query, share, num_rows)
            masses = self._ask_masses(make_query, num_rows, deadline)
            counts = divide_among_ranks(
                self._table.settings,
                masses,
                num_rows,
                share.world_size,
                self._rng,
                unit=query.group_size or 1,
                is_grouped=query.group_by is not None,
            )
            if counts is not None:
                division = StepDivision(counts, {shard: mass.scale for shard, mass in masses.items()})
                try:
                    splits.put(name, division.format(), if_version=0)
                except VersionConflictError:  # another rank was faster
                    return _read(splits, name, num_rows) or division
                return division
            check_not_final(
                self._table.name,
                masses,
                self._table.num_shards,
                num_needed=num_rows * share.world_size,
                unit=share.world_size * (query.group_size or 1),
            )
            if deadline.expired:
                table, conditions = self._table, query.describe_conditions()
                why = explain_shortage(table.settings, masses, conditions, servers=table.placement.servers)
                ranks = f"{num_rows} rows for each of {share.world_size} ranks, as many of each shard"
                raise DeadlineExceededError(
                    what=f"{ranks}, of {self._table.name!r} ({why})", timeout_s=deadline.timeout_s
                )
            time.sleep(deadline.limit(PAUSE_S))

    def _check(self, query: Query, share: Share, num_rows: int) -> None:
        """Refuses, before it is noted how a step is divided, what no rows that come would make possible.

        Raises:
            InvalidRequestError: The rows of a rank are no whole groups, or the table is too small for all ranks.
        """
        unit, table = query.group_size or 1, self._table
        if num_rows % unit:
            reason = f"{num_rows} rows per rank are not a whole number of groups of {unit}"
            raise InvalidRequestError(argument="num_rows", reason=reason)
        most = table.num_shards * (table.part_capacity // (share.world_size * unit)) * unit
        if num_rows > most:
            reason = (
                f"{num_rows} rows per rank are too many: a full table gives {share.world_size} ranks at most {most} "
                "each, equally many from each shard"
            )
            raise InvalidRequestError(argument="num_rows", reason=reason)

    def _ask_masses(
        self, make_query: Callable[[Any], Query], num_rows: int, deadline: Deadline
    ) -> Mapping[int, ShardMass]:
        """Asks all shards that answer what may be drawn from them under the conditions of a step; one that has stopped
        answering must not take all the time that the call has."""
        table = self._table

        def ask(_: int, part: Any) -> ShardMass:
            until = deadline.shorten(PATIENCE_S)
            return ask_mass(part, lambda each: replace(make_query(each), share=None), num_rows, until)

        while True:
            try:
                return table.ask_parts(table.parts.list_live() or range(table.num_shards), ask)
            except TDServeError as error:  # a server is slow, or the table at rest
                if not may_repeat(error, deadline):
                    raise


def _read(splits: Any, name: str, num_rows: int) -> StepDivision | None:
    kept = splits.get(name, default=None)
    if kept is None:
        return None
    found = StepDivision.parse(kept)
    num_divided = sum(found.counts.values())
    if num_divided != num_rows:
        reason = f"{num_rows}: other ranks of this step have asked for {num_divided} rows"
        raise InvalidRequestError(argument="num_rows", reason=reason)
    return found
