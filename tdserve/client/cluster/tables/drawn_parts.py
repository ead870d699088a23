"""Rows that were drawn from one shard of a table, with probabilities and weights of the whole table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tdserve.client.session.session_client import SessionClient
from tdserve.client.tables.draws.query import Query
from tdserve.client.tables.draws.sampled import Sampled
from tdserve.rules.replay.samplers.sampler import Sampler
from tdserve.rules.shard_division import ShardScale

SHOWING_WEIGHT = 0.99
"""A weight that is nearer to 1 is not exact enough to tell its exponent."""

_PRIORITY, _PROBABILITY, _WEIGHT = ("priority",), ("probability",), ("priority_weight",)


class DrawnPart(NamedTuple):
    """Rows of one shard.

    Attributes:
        client: Through which they were drawn.
        query: For which they were drawn.
        rows: The rows, with the numbers that they have in their shard.
    """

    shard: int
    client: SessionClient
    query: Query
    rows: Sampled


def weigh_parts(parts: Sequence[DrawnPart], scales: Mapping[int, ShardScale], sampler: Sampler) -> None:
    """Makes probabilities and weights those of the whole table.

    Args:
        parts: Each as its shard has sent it.
        scales: Scales of all shards by which the sample was divided.
        sampler: Sampler of the table.
    """
    whole = sum(scale.mass for scale in scales.values())
    least = min((scale.least for scale in scales.values() if scale.least > 0), default=0.0)
    weighted = [part for part in parts if _WEIGHT in part.rows.tensors and scales[part.shard].least]
    shown = (_find_beta(part, scales[part.shard], sampler) for part in weighted)
    known = float(getattr(sampler, "beta", 0.0))
    beta = next((beta for beta in shown if beta is not None), known)
    for part in weighted:
        part.rows.tensors[_WEIGHT] = part.rows.tensors[_WEIGHT] * (least / scales[part.shard].least) ** beta
    for part in parts:
        tensors = part.rows.tensors
        if _PROBABILITY in tensors and whole:
            tensors[_PROBABILITY] = tensors[_PROBABILITY] * (scales[part.shard].mass / whole)


def _find_beta(part: DrawnPart, scale: ShardScale, sampler: Sampler) -> float | None:
    """Returns the exponent of the weights with which rows were drawn, from the least likely to the most weighty: others
    may have changed it since this handle was made. None if it does not show, as where all rows are the least likely."""
    tensors = part.rows.tensors
    if _PRIORITY not in tensors:
        return None
    weights = tensors[_WEIGHT].double()
    row = int(weights.argmin())
    # Not by its probability, which is larger where it was drawn after others that it had to differ from.
    masses = sampler.weigh_priorities(tensors[_PRIORITY][row : row + 1].double().numpy())
    ratio = scale.least / float(masses[0]) if masses is not None and masses[0] else 0.0
    if not 0 < float(weights[row]) < SHOWING_WEIGHT or not 0 < ratio < 1:
        return None
    return math.log(float(weights[row])) / math.log(ratio)
