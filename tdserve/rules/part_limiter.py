"""The limiter of each part of a table, so that all of them do what one of the whole table would."""

from __future__ import annotations

from dataclasses import replace

from tdserve.rules.replay.limiter import Limiter, MinSize, Queue, SampleToInsertRatio


def make_part_limiter(limiter: Limiter, num_shards: int) -> Limiter:
    """Returns the limiter of a part.

    Readers count what a sample of the whole table needs, ``min_size`` rows of all shards together, since one may have
    none. Each shard keeps a ratio by itself, with the error buffer of the whole: a sample may take most of its rows
    from one.
    """
    if isinstance(limiter, MinSize):
        return MinSize(1)
    if isinstance(limiter, SampleToInsertRatio):
        return replace(limiter, min_size=-(-limiter.min_size // num_shards))
    if isinstance(limiter, Queue):
        return Queue(-(-limiter.max_size // num_shards))
    return limiter
