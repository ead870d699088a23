"""Runs inputs through decoders, and keeps those that were not refused properly."""

from __future__ import annotations

import time
import traceback
from dataclasses import dataclass, field

from tests.fuzz.decoders import Decoder
from tests.fuzz.inputs import Inputs

MAX_INPUT_S = 2.0
"""Processor time for one input; nearly all take microseconds."""

MAX_KEPT = 64
"""Accepted inputs that later ones are made from, beside the seeds."""


@dataclass
class Tally:
    """The results of the inputs of one decoder.

    Attributes:
        faults: The first input for each place at which something improper was raised, with its traceback.
    """

    num_inputs: int = 0
    num_accepted: int = 0
    faults: dict[str, tuple[bytes, str]] = field(default_factory=dict)


def fuzz_decoder(decoder: Decoder, inputs: Inputs, num_inputs: int) -> Tally:
    """Feeds a decoder its seeds, mutations of them and of what it has accepted, and random bytes."""
    tally, pool = Tally(), list(decoder.seeds)
    for seed in decoder.seeds:
        _feed(decoder, seed, tally)
    while tally.num_inputs < num_inputs:
        is_fresh = inputs.rng.random() < 0.05
        content = inputs.make_bytes() if is_fresh else inputs.mutate(inputs.rng.choice(pool))
        if _feed(decoder, content[:65_536], tally):
            if len(pool) < len(decoder.seeds) + MAX_KEPT:
                pool.append(content)
            elif inputs.rng.random() < 0.01:
                pool[inputs.rng.randrange(len(decoder.seeds), len(pool))] = content
    return tally


def _feed(decoder: Decoder, content: bytes, tally: Tally) -> bool:
    tally.num_inputs += 1
    begun_s, is_accepted = time.thread_time(), False
    try:
        is_accepted = decoder.check(content)
    except BaseException as fault:
        if isinstance(fault, KeyboardInterrupt):
            raise
        place = traceback.extract_tb(fault.__traceback__)[-1]
        where = f"{type(fault).__name__} at {place.filename.rpartition('/')[2]}:{place.lineno}"
        tally.faults.setdefault(where, (content, traceback.format_exc()))
    if (took_s := time.thread_time() - begun_s) > MAX_INPUT_S:
        tally.faults.setdefault("slow", (content, f"{took_s:.1f} s"))
    tally.num_accepted += is_accepted
    return is_accepted
