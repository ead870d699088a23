"""Whole trees of weights: published, read with and without ``out``, and seen by a second process that waits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import count

from tensordict import TensorDictBase

from tdserve.base.errors import StoreNotFoundError
from tdserve.bench import content
from tdserve.bench.figures import Figure, Scale, Target, gigabytes
from tdserve.bench.floors import MEMCPY, GlooFloors, memcpy_fresh, memcpy_touched
from tdserve.bench.measure import Pacing, Round, Task, timed_round
from tdserve.bench.options import MIB, Wire
from tdserve.bench.stage import Stage
from tdserve.bench.watcher import Watcher
from tdserve.client.client import connect

MESSAGE_NBYTES = 64 * MIB
"""Gloo is fastest in messages of about this size; a large payload's floor is the better of one message and these."""

VERSIONS_KEPT = 2
"""tdserve's default. From two publishes later on, retired version files are recycled."""

OF_MEMCPY = Target("of floor", 0.7, MEMCPY)


@dataclass(frozen=True)
class TreeTargets:
    """What the plan asks of one tree over one transport.

    Attributes:
        moved: Of publishing it into recycled files, and of reading it into existing tensors.
        mapped: Of ``latest(copy=False)``.
        seen: Of the time until a waiting process has it.
    """

    moved: tuple[Target, ...]
    mapped: tuple[Target, ...] = ()
    seen: tuple[Target, ...] = ()


MAPPED = (Target("below", 2.0),)
"""Milliseconds, whatever the size."""

BIG: dict[Wire, TreeTargets] = {
    "gloo": TreeTargets((Target("of floor", 0.85),)),
    "shm": TreeTargets((OF_MEMCPY,), mapped=MAPPED, seen=(Target("below", 30.0),)),
}
MANY: dict[Wire, TreeTargets] = {
    "gloo": TreeTargets((Target("of floor", 0.6),)),
    "shm": TreeTargets((), mapped=MAPPED),
}

NUM_READERS = 4
TOGETHER = Target("of floor", 0.9)
"""Of one link: all of them share two cores, or one wire."""

POLICY_SHAPE = (16, MIB)
VISIBLE: dict[Wire, tuple[Target, ...]] = {"gloo": (Target("below", 5.0),), "shm": (Target("below", 1.0),)}
"""Milliseconds."""

MAX_FIRST_ROUNDS = 3
"""First publishes leave whole fresh files behind: a few are enough."""


@dataclass
class WeightsTree:
    """One tree under test. ``number`` is stamped into the content and grows with every change."""

    stage: Stage
    shape: tuple[int, int]
    targets: TreeTargets
    number: int = 0
    version: int = 0

    def __post_init__(self) -> None:
        self.data = content.weights(*self.shape)
        self.out = self.data.clone()

    @property
    def name(self) -> str:
        """Of the store."""
        return f"weights-{self.shape[0]}"

    @property
    def nbytes(self) -> int:
        """Payload of one version."""
        return content.total_nbytes(self.data)

    @property
    def label(self) -> str:
        """For the figures' names."""
        num_tensors, nbytes = self.shape
        return f"{nbytes // MIB} MiB in {num_tensors}"

    @property
    def scale(self) -> Scale:
        """Gigabytes per second."""
        return Scale("GB/s", gigabytes(self.nbytes))

    @property
    def pacing(self) -> Pacing:
        """At least two operations a round: they take up to a tenth of a second each."""
        return Pacing(self.stage.sizes.round_s, min_ops=2)

    def change(self) -> None:
        """Gives the content the next number; not part of any timing."""
        self.number += 1
        content.stamp(self.data, self.number)

    def publish(self) -> None:
        """One publish."""
        self.version = self.stage.client.publish(self.name, self.data)

    def renew(self) -> None:
        """A version that shares no tensor with the one before: all of it travels to whoever has that."""
        if self.stage.wire == "gloo":
            self.change()
            self.publish()

    def check(self, found: TensorDictBase) -> None:
        """Compares with what was published last."""
        content.check_equal(found, self.data, what=f"weights {self.name}, version {self.version}")


def measure_weights(stage: Stage) -> Iterator[Figure]:
    """A tree of few large and one of many small tensors."""
    with closing(Watcher(stage.address, stage.wire)) as watcher:
        for shape, targets in ((stage.sizes.big_tree, BIG), (stage.sizes.many_tree, MANY)):
            tree = WeightsTree(stage, shape, targets[stage.wire])
            yield _publish_first(tree)
            tree.change()
            for _ in range(VERSIONS_KEPT + 1):
                tree.publish()
            yield _publish_recycled(tree)
            yield _latest_into(tree)
            yield _latest_fresh(tree)
            if stage.wire == "shm":
                yield _latest_mapped(tree)
            if stage.wire == "gloo" and targets is BIG:
                yield _latest_together(tree)
            yield _until_seen(tree, watcher)
            stage.client.delete(tree.name)
    policy = WeightsTree(stage, POLICY_SHAPE, MANY[stage.wire])
    yield _until_visible(policy)
    stage.client.delete(policy.name)


def newest(stage: Stage, name: str, *, copy: bool = True) -> TensorDictBase:
    """What was published last; StoreNotFoundError when that is nothing."""
    found = stage.client.latest(name) if copy else stage.client.latest(name, copy=False)
    if found is None:
        raise StoreNotFoundError(name=name)
    data: TensorDictBase = found.data
    return data


def _publish_first(tree: WeightsTree) -> Figure:
    """Version 1 of a store that nobody knew: its file and its pages are new."""
    stage = tree.stage
    names = (f"{tree.name}-first-{i}" for i in count())

    def put() -> str:
        name = next(names)
        stage.client.publish(name, tree.data)
        return name

    def check(name: str) -> None:
        tree.check(newest(stage, name))
        stage.client.delete(name)

    once = Pacing(0.0, min_ops=1, max_ops=1)
    floors = {**_gloo_floors(tree, once, is_read=False), **_fresh_memcpy_floor(tree.nbytes, once)}
    subject = Task(lambda: timed_round(put, once), check)
    return _measure(tree, "first publish", subject, floors, max_rounds=MAX_FIRST_ROUNDS)


def _publish_recycled(tree: WeightsTree) -> Figure:
    subject = Task(
        lambda: timed_round(tree.publish, tree.pacing, before=tree.change),
        lambda _: tree.check(newest(tree.stage, tree.name)),
    )
    floors = {**_gloo_floors(tree, tree.pacing, is_read=False), MEMCPY: memcpy_touched(tree.nbytes, tree.pacing)}
    return _measure(tree, "publish, recycled", subject, floors, targets=tree.targets.moved)


def _latest_into(tree: WeightsTree) -> Figure:
    def run_round() -> Round:
        tree.out.zero_()  # so that the check sees what this round has brought
        return timed_round(lambda: tree.stage.client.latest(tree.name, out=tree.out), tree.pacing, before=tree.renew)

    floors = {**_gloo_floors(tree, tree.pacing, is_read=True), MEMCPY: memcpy_touched(tree.nbytes, tree.pacing)}
    subject = Task(run_round, lambda _: tree.check(tree.out))
    return _measure(tree, "latest(out=)", subject, floors, targets=tree.targets.moved)


def _latest_fresh(tree: WeightsTree) -> Figure:
    floors = {**_gloo_floors(tree, tree.pacing, is_read=True), **_fresh_memcpy_floor(tree.nbytes, tree.pacing)}
    subject = Task(
        lambda: timed_round(lambda: newest(tree.stage, tree.name), tree.pacing, before=tree.renew), tree.check
    )
    return _measure(tree, "latest()", subject, floors)


def _latest_together(tree: WeightsTree) -> Figure:
    """Several readers of one version at once, beside as many payloads over one link."""
    stage = tree.stage
    outs = [tree.data.clone() for _ in range(NUM_READERS)]
    once = Pacing(0.0, min_ops=1, max_ops=1)
    floor = GlooFloors(stage.link, Pacing(0.0, min_ops=NUM_READERS, max_ops=NUM_READERS)).fetch(tree.nbytes)

    def one_link() -> Round:
        done = floor.run_round()
        return Round((done.elapsed_s,), done.elapsed_s)

    with ExitStack() as stack:
        readers = [stack.enter_context(connect(stage.address, transport="gloo")) for _ in outs]
        threads = stack.enter_context(ThreadPoolExecutor(NUM_READERS))

        def pull() -> None:
            list(threads.map(lambda reader, out: reader.latest(tree.name, out=out), readers, outs))

        def check(_: None) -> None:
            for out in outs:
                tree.check(out)

        subject = Task(lambda: timed_round(pull, once, before=tree.renew), check)
        scale = Scale("GB/s", gigabytes(NUM_READERS * tree.nbytes))
        name = f"latest(out=), {NUM_READERS} at once"
        return _measure(tree, name, subject, {"gloo, one link": Task(one_link)}, targets=(TOGETHER,), scale=scale)


def _latest_mapped(tree: WeightsTree) -> Figure:
    """The version's own memory, nothing copied."""
    pull = partial(newest, tree.stage, tree.name, copy=False)
    subject = Task(lambda: timed_round(pull, tree.pacing), tree.check)
    return _measure(tree, "latest(copy=False)", subject, {}, targets=tree.targets.mapped, scale=Scale("ms"))


def _until_visible(tree: WeightsTree) -> Figure:
    """A policy of usual size: when the call returns, everybody sees the version."""
    stage = tree.stage
    subject = Task(
        lambda: timed_round(tree.publish, stage.pacing, before=tree.change),
        lambda _: tree.check(newest(stage, tree.name)),
    )
    floors = _gloo_floors(tree, stage.pacing, is_read=False)
    floors = floors or {MEMCPY: memcpy_touched(tree.nbytes, stage.pacing)}
    targets = VISIBLE[stage.wire]
    return _measure(tree, "publish until visible", subject, floors, targets=targets, scale=Scale("ms"))


def _until_seen(tree: WeightsTree, watcher: Watcher) -> Figure:
    """From the start of a publish until a waiting process has the version whole."""

    def before() -> None:
        tree.change()
        watcher.watch(tree.name, tree.version)

    def put() -> None:
        tree.publish()
        watcher.wait()

    floors = {"gloo, there and back": GlooFloors(tree.stage.link, tree.pacing).echo(tree.nbytes)}
    if tree.stage.wire == "shm":
        floors = {MEMCPY: memcpy_touched(tree.nbytes, tree.pacing)}
    subject = Task(
        lambda: timed_round(put, tree.pacing, before=before), lambda _: watcher.check(*tree.shape, tree.number)
    )
    name = "publish until seen elsewhere"
    return _measure(tree, name, subject, floors, targets=tree.targets.seen, scale=Scale("ms"))


def _gloo_floors(tree: WeightsTree, pacing: Pacing, *, is_read: bool) -> dict[str, Task]:
    """One message, and for large payloads 64 MiB messages too; none where no wire is between."""
    if tree.stage.wire != "gloo":
        return {}
    gloo, nbytes = GlooFloors(tree.stage.link, pacing), tree.nbytes
    floor = gloo.fetch if is_read else gloo.store
    floors = {"gloo, one message": floor(nbytes)}
    if nbytes > MESSAGE_NBYTES:
        floors["gloo, 64 MiB messages"] = floor(nbytes, message_nbytes=MESSAGE_NBYTES)
    return floors


def _fresh_memcpy_floor(nbytes: int, pacing: Pacing) -> dict[str, Task]:
    """Only for large payloads: smaller ones get memory back from the heap, with its pages, and show nothing."""
    return {"memcpy, fresh pages": memcpy_fresh(nbytes, pacing)} if nbytes > MESSAGE_NBYTES else {}


def _measure(
    tree: WeightsTree,
    name: str,
    subject: Task,
    floors: Mapping[str, Task],
    *,
    targets: tuple[Target, ...] = (),
    scale: Scale | None = None,
    max_rounds: int | None = None,
) -> Figure:
    """Gigabytes per second by default. The fastest gloo floor comes first: a target that names none means that one."""
    figure = tree.stage.measure(
        "weights",
        f"{tree.label}: {name}",
        scale or tree.scale,
        subject,
        floors,
        targets=targets,
        max_rounds=max_rounds,
    )
    gloo_first = sorted(figure.floors, key=lambda floor: -floor.value if floor.name.startswith("gloo") else 0.0)
    return replace(figure, floors=tuple(gloo_first))
