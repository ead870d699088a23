"""The targets of all figures, in one table."""

from __future__ import annotations

from fnmatch import fnmatchcase

from tdserve.bench.figures import Target
from tdserve.bench.floors import GLOO_AND_GATHER, LOCAL_GATHER, MEMCPY, OVER_GLOO, SAMPLE, TORCHRL
from tdserve.bench.grpc_link import GRPC_STREAM

TARGETS: tuple[tuple[str, str, Target], ...] = (
    ("*", "transitions: extend 1024, 16 under way", Target("at least", 2e6)),
    ("*", "transitions: append through writer(64)", Target("at least", 5e4)),
    ("gloo", "transitions: extend 64, one by one", Target("below", 1100.0)),  # the best peer over TCP
    ("gloo", "transitions: sample 256, one by one", Target("of floor", 1 / 1.8, GLOO_AND_GATHER)),
    ("gloo", "transitions: sample 256, 8 under way", Target("at least", 1.5e6)),
    ("shm", "transitions: sample *", Target("of floor", 1 / 2, TORCHRL)),  # at most twice TorchRL's time
    ("gloo", "pixels: *", Target("of floor", 0.7)),
    ("grpc", "pixels: *, * under way", Target("of floor", 0.8, GRPC_STREAM)),
    ("grpc", "weights: * in 100: publish, recycled", Target("of floor", 0.8, GRPC_STREAM)),
    ("grpc", "weights: * in 100: latest(out=)", Target("of floor", 0.8, GRPC_STREAM)),
    ("shm", "pixels: extend *", Target("of floor", 0.7, MEMCPY)),
    ("shm", "pixels: sample *", Target("of floor", 0.7, LOCAL_GATHER)),
    ("shm", "pixels: sample *", Target("of floor", 1 / 1.3, TORCHRL)),  # at most 1.3 times its time
    ("shm", "pixels: sample *", Target("of floor", 4.0, OVER_GLOO)),
    # in shared memory a uniform sample is a gather and little more, and the plan asks nothing
    ("gloo", "prioritized: sample 256, one by one", Target("of floor", 0.7)),
    ("gloo", "prioritized: sample 256, 8 under way", Target("of floor", 0.7)),
    # TorchRL's own buffer took 3.5 and 1.0 s for the 4,600 updates of a DQN learner
    ("shm", "prioritized: sample 128 and update", Target("below", 978.0)),
    # trees of weights: few large tensors, many small ones (2,000, or 200 when quick), a policy
    ("gloo", "weights: * in 100: publish, recycled", Target("of floor", 0.85)),
    ("gloo", "weights: * in 100: latest(out=)", Target("of floor", 0.85)),
    ("gloo", "weights: * in 100: latest(out=), 4 at once", Target("of floor", 0.9)),  # all share one wire, or two cores
    ("gloo", "weights: * in 200*: publish, recycled", Target("of floor", 0.6)),
    ("gloo", "weights: * in 200*: latest(out=)", Target("of floor", 0.6)),
    # a collection of all garbage takes ten times as long as a publish
    ("*", "weights: *: publish of new tensors, the slowest of 20", Target("of floor", 0.25)),
    ("gloo", "weights: * in 16: publish until visible", Target("below", 5.0)),
    ("shm", "weights: * in 100: publish, recycled", Target("of floor", 0.7, MEMCPY)),
    ("shm", "weights: * in 100: publish after a pause", Target("of floor", 1 / 1.7, MEMCPY)),
    ("shm", "weights: * in 100: publish after a pause", Target("tail", 3.0, MEMCPY)),
    ("shm", "weights: * in 100: latest(out=)", Target("of floor", 0.7, MEMCPY)),
    ("shm", "weights: *: latest(copy=False)", Target("below", 2.0)),  # whatever the size
    ("shm", "weights: * in 100: publish until seen elsewhere", Target("below", 30.0)),
    ("shm", "weights: * in 16: publish until visible", Target("below", 1.0)),
    ("gloo", "small: get one scalar of *", Target("below", 450.0)),
    ("shm", "small: get one scalar of *", Target("below", 60.0)),
    ("*", "small: read a small tensordict by name", Target("below", 180.0)),  # the best peer over TCP
    ("*", "small: send a small tensordict", Target("below", 760.0)),  # likewise
    ("*", "small: keys of a store of *", Target("below", 10.0)),
    ("*", "small: names of * stores", Target("below", 10.0)),
    # five times the best peer, both at once
    ("*", "mixed: sample 256 while 4 processes write", Target("at least", 104e3)),
    ("*", "mixed: 4 processes extend 64 meanwhile", Target("at least", 550e3)),
    # over gloo the reads are those of the best peer
    ("gloo", "chat: extend 64 histories, 8 under way", Target("at least", 38_000)),
    ("gloo", "chat: sample 64 histories, 8 under way", Target("at least", 41_900)),
    ("shm", "chat: extend 64 histories, 8 under way", Target("at least", 100_000)),
    ("shm", "chat: sample 64 histories, 8 under way", Target("at least", 100_000)),
    ("gloo", "chat: * 64 dialogues, 8 under way", Target("at least", 80_000)),
    ("shm", "chat: * 64 dialogues, 8 under way", Target("at least", 120_000)),
    ("gloo", "chat: write 64 dialogues, one by one", Target("at least", 40_000)),
    ("shm", "chat: write 64 dialogues, one by one", Target("at least", 60_000)),
    ("gloo", "chat: read 64 dialogues by number", Target("at least", 40_000)),
    ("shm", "chat: read 64 dialogues by number", Target("at least", 60_000)),
    ("gloo", "kv: get one scalar of *", Target("below", 250.0)),
    ("gloo", "kv: put one scalar", Target("below", 500.0)),
    ("gloo", "kv: put one scalar, 16 under way", Target("at least", 5_000)),
    ("gloo", "kv: put 256 scalars, 16 under way", Target("at least", 200_000)),
    ("shm", "kv: get one scalar of *", Target("below", 15.0)),
    ("*", "creation: create a store*", Target("below", 757.0)),  # 1,321 a second, as the best peer
    ("*", "creation: delete a store*", Target("below", 757.0)),
    ("gloo", "clients: * client*", Target("below", 80.0, detail="control CPU")),  # microseconds for a call
    ("gloo", "clients: * client*", Target("below", 200.0, detail="workers CPU")),
    ("*", "dataset: *: DataLoader, 4 workers", Target("of floor", 0.7, SAMPLE)),
)
"""Transport, figure and target. ``*`` stands for any text; a bound is in the unit of the figure (see ``Target``)."""


def find_targets(transport: str, workload: str, name: str) -> list[Target]:
    """Returns what the plan asks of a figure over this transport."""
    figure = f"{workload}: {name}"
    return [target for of, pattern, target in TARGETS if of in ("*", transport) and fnmatchcase(figure, pattern)]
