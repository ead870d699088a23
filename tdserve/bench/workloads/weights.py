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
from tdserve.bench.figures import Figure, Scale, to_gigabytes
from tdserve.bench.floor_link import REQUEST_NBYTES
from tdserve.bench.floors import MEMCPY, make_fresh_memcpy, make_touched_memcpy
from tdserve.bench.measure import Pacing, Round, Task, make_task, time_round
from tdserve.bench.options import MIB
from tdserve.bench.stage import Stage
from tdserve.bench.watcher import Watcher
from tdserve.client.client import connect

MESSAGE_NBYTES = 64 * MIB
"""Gloo is fastest in messages of about this size. A large payload's floor is the better of one message and these."""

VERSIONS_KEPT = 2
"""tdserve's default. From two publishes later on, the files of retired versions are recycled."""

NUM_READERS = 4

POLICY_SHAPE = (16, MIB)

MAX_FIRST_ROUNDS = 3
"""First publishes leave whole fresh files behind: a few are enough."""

ONCE = Pacing(0.0, min_ops=1, max_ops=1)


@dataclass
class WeightsTree:
    """One tree under test. ``number`` is stamped into the content and grows with every change."""

    stage: Stage
    shape: tuple[int, int]
    number: int = 0
    version: int = 0

    def __post_init__(self) -> None:
        self.data = content.make_weights(*self.shape)
        self.out = self.data.clone()
        self.name = f"weights-{self.shape[0]}"
        self.nbytes = content.compute_total_nbytes(self.data)

    def change(self) -> None:
        """Gives the content the next number. No timing includes this."""
        self.number += 1
        content.stamp(self.data, self.number)

    def publish(self) -> None:
        """Publishes the content once."""
        self.version = self.stage.client.publish(self.name, self.data)

    def renew(self) -> None:
        """Publishes a version that has no tensor in common with the one before: all of it travels to its readers."""
        if self.stage.wire == "gloo":
            self.change()
            self.publish()

    def pull(self, name: str = "", *, copy: bool = True) -> TensorDictBase:
        """Returns what was published last; of this tree, if no name is given.

        Raises:
            StoreNotFoundError: Nothing was published.
        """
        found = self.stage.client.latest(name or self.name, copy=copy)
        if found is None:
            raise StoreNotFoundError(name=name or self.name)
        data: TensorDictBase = found.data
        return data

    def check(self, found: TensorDictBase) -> None:
        """Compares with what was published last."""
        content.check_equal(found, self.data, what=f"weights {self.name}, version {self.version}")

    def check_published(self, _: object) -> None:
        """Reads what was published last, and compares."""
        self.check(self.pull())

    def make_floors(self, *, is_read: bool, is_fresh: bool = False) -> dict[str, Task]:
        """Returns raw gloo where a wire is between, and memcpy.

        Fresh pages are only a floor of large payloads. Smaller ones get memory back from the heap, with its pages.
        """
        stage, nbytes = self.stage, self.nbytes
        is_large = nbytes > MESSAGE_NBYTES
        floors = {}
        if stage.wire == "gloo":
            out, back = (REQUEST_NBYTES, nbytes) if is_read else (nbytes, REQUEST_NBYTES)
            gloo = partial(stage.make_gloo_floor, out=out, back=back)
            floors["gloo, one message"] = gloo()
            if is_large:
                floors["gloo, 64 MiB messages"] = gloo(message_nbytes=MESSAGE_NBYTES)
        if not is_fresh:
            floors[MEMCPY] = make_touched_memcpy(nbytes)
        elif is_large:
            floors["memcpy, fresh pages"] = make_fresh_memcpy(nbytes)
        return floors

    def measure(
        self,
        name: str,
        subject: Task,
        floors: Mapping[str, Task],
        *,
        scale: Scale | None = None,
        pacing: Pacing | None = None,
        max_rounds: int | None = None,
    ) -> Figure:
        """Measures the subject, by default in gigabytes per second.

        The fastest gloo floor comes first: a target that names no floor means that one.
        """
        num_tensors, nbytes = self.shape
        label, scale = (
            f"{nbytes // MIB} MiB in {num_tensors}: {name}",
            scale or Scale("GB/s", to_gigabytes(self.nbytes)),
        )
        figure = self.stage.measure("weights", label, scale, subject, floors, pacing=pacing, max_rounds=max_rounds)
        gloo_first = sorted(figure.floors, key=lambda floor: -floor.median if floor.name.startswith("gloo") else 0.0)
        return replace(figure, floors=tuple(gloo_first))


def measure_weights(stage: Stage) -> Iterator[Figure]:
    """Measures a tree of few large tensors, a tree of many small ones, and a policy of usual size."""
    with closing(Watcher(stage.address, stage.wire)) as watcher:
        for shape in (stage.sizes.big_tree, stage.sizes.many_tree):
            tree = WeightsTree(stage, shape)
            yield _publish_first(tree)
            tree.change()
            for _ in range(VERSIONS_KEPT + 1):
                tree.publish()
            publishes = make_task(tree.publish, tree.check_published, before=tree.change)
            yield tree.measure("publish, recycled", publishes, tree.make_floors(is_read=False))
            yield _measure_latest_into(tree)
            pulls = make_task(tree.pull, tree.check, before=tree.renew)
            yield tree.measure("latest()", pulls, tree.make_floors(is_read=True, is_fresh=True))
            if stage.wire == "shm":  # the version's own memory, nothing copied
                maps = make_task(partial(tree.pull, copy=False), tree.check)
                yield tree.measure("latest(copy=False)", maps, {}, scale=Scale("ms"))
            elif shape == stage.sizes.big_tree:
                yield _measure_latest_together(tree)
            yield _publish_until_seen(tree, watcher)
            stage.client.delete(tree.name)
    policy = WeightsTree(stage, POLICY_SHAPE)
    publishes = make_task(policy.publish, policy.check_published, before=policy.change)
    floors = policy.make_floors(is_read=False)
    if stage.wire == "gloo":
        del floors[MEMCPY]
    # when the call returns, everybody sees the version
    yield policy.measure("publish until visible", publishes, floors, scale=Scale("ms"))
    stage.client.delete(policy.name)


def _publish_first(tree: WeightsTree) -> Figure:
    """Measures version 1 of a new store: its file and its pages are new."""
    client = tree.stage.client
    names = (f"{tree.name}-first-{i}" for i in count())

    def put() -> str:
        name = next(names)
        client.publish(name, tree.data)
        return name

    def check(name: str) -> None:
        tree.check(tree.pull(name))
        client.delete(name)

    floors = tree.make_floors(is_read=False, is_fresh=True)
    return tree.measure("first publish", make_task(put, check), floors, pacing=ONCE, max_rounds=MAX_FIRST_ROUNDS)


def _measure_latest_into(tree: WeightsTree) -> Figure:
    """Measures reads into existing tensors."""
    client = tree.stage.client

    def run_round(pacing: Pacing) -> Round:
        tree.out.zero_()  # so that the check sees what this round has brought
        return time_round(lambda: client.latest(tree.name, out=tree.out), pacing, before=tree.renew)

    subject = Task(run_round, lambda _: tree.check(tree.out))
    return tree.measure("latest(out=)", subject, tree.make_floors(is_read=True))


def _measure_latest_together(tree: WeightsTree) -> Figure:
    """Measures several readers of one version at once, beside as many payloads over one link."""
    stage, nbytes = tree.stage, tree.nbytes
    outs = [tree.data.clone() for _ in range(NUM_READERS)]
    floor = stage.make_gloo_floor(out=REQUEST_NBYTES, back=nbytes)

    def one_link(_: Pacing) -> Round:
        done = floor.run_round(Pacing(0.0, min_ops=NUM_READERS, max_ops=NUM_READERS))
        return Round((done.elapsed_s,), done.elapsed_s)

    with ExitStack() as stack:
        readers = [stack.enter_context(connect(stage.address, transport="gloo")) for _ in outs]
        threads = stack.enter_context(ThreadPoolExecutor(NUM_READERS))

        def pull() -> None:
            list(threads.map(lambda reader, out: reader.latest(tree.name, out=out), readers, outs))

        def check(_: None) -> None:
            for out in outs:
                tree.check(out)

        name, scale = f"latest(out=), {NUM_READERS} at once", Scale("GB/s", to_gigabytes(NUM_READERS * nbytes))
        subject = make_task(pull, check, before=tree.renew)
        return tree.measure(name, subject, {"gloo, one link": Task(one_link)}, scale=scale, pacing=ONCE)


def _publish_until_seen(tree: WeightsTree, watcher: Watcher) -> Figure:
    """Measures from the start of a publish until a waiting process has the whole version."""
    stage, nbytes = tree.stage, tree.nbytes

    def before() -> None:
        tree.change()
        watcher.watch(tree.name, tree.version)

    def put() -> None:
        tree.publish()
        watcher.wait()

    floors = {"gloo, there and back": stage.make_gloo_floor(out=nbytes, back=nbytes)}
    if stage.wire == "shm":
        floors = {MEMCPY: make_touched_memcpy(nbytes)}
    subject = make_task(put, lambda _: watcher.check(*tree.shape, tree.number), before=before)
    return tree.measure("publish until seen elsewhere", subject, floors, scale=Scale("ms"))
