"""Whole trees of weights: published, read with and without ``out``, and seen by a second process that waits."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import lru_cache, partial
from itertools import count
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from tdserve.base.config import TransportName
from tdserve.base.errors import StoreNotFoundError
from tdserve.bench.bench_options import MIB
from tdserve.bench.child import Child, Pipe
from tdserve.bench.figures import Scale, to_gigabytes
from tdserve.bench.floor_link import REQUEST_NBYTES
from tdserve.bench.floors import MEMCPY, make_fresh_memcpy, make_memcpy
from tdserve.bench.grpc_link import GRPC_STREAM
from tdserve.bench.measure import Pacing, Round, Task, make_task, time_round
from tdserve.bench.stage import SERVER_ROOT, Case, Stage
from tdserve.bench.workload_data import check_equal, compute_nbytes, make_weights, stamp
from tdserve.client.client import Client
from tdserve.client.connecting import connect
from tdserve.store.disk.files import sync_file

MESSAGE_NBYTES = 64 * MIB
"""Gloo is fastest in messages of about this size. A large payload's floor is the better of one message and these."""

VERSIONS_KEPT = 2
"""tdserve's default. From two publishes later on, the files of retired versions are recycled."""

NUM_READERS = 4

POLICY_SHAPE = (16, MIB)

MAX_FIRST_ROUNDS = 3
"""First publishes leave whole fresh files behind: a few are enough."""

ONCE = Pacing(0.0, min_ops=1, max_ops=1)

NUM_NEW = 20
"""Publishes of new tensors in a round: one in twenty waited for a collection of all garbage."""

NUM_AFTER_PAUSES = Pacing(0.0, min_ops=4, max_ops=4)

TYPICAL = "their median"
"""What the slowest publish of a round is compared with."""

WATCH_TIMEOUT_S = 60.0


def measure_weights(stage: Stage) -> Generator[Case]:
    """Measures a tree of few large tensors, a tree of many small ones, and a policy of usual size."""
    with closing(Child(follow_versions, stage.address, stage.transport)) as follower:
        follower.recv()  # it is connected
        for shape in (stage.sizes.big_tree, stage.sizes.many_tree):
            tree = WeightsTree(stage, shape)
            yield tree.publish_first()
            tree.change()
            for _ in range(VERSIONS_KEPT + 1):
                tree.publish()
            yield tree.make_case("publish, recycled", tree.publishes, tree.make_floors())
            if stage.transport == "shm" and shape == stage.sizes.big_tree:
                yield tree.publish_after_pause()
            if shape == stage.sizes.many_tree:
                yield from tree.publish_new(stage.sizes.num_other_tensors)
            yield tree.read_into()
            pulls = make_task(tree.pull, tree.check, before=tree.renew)
            yield tree.make_case("latest()", pulls, tree.make_floors(is_read=True, is_fresh=True))
            if stage.transport == "shm":  # the version's own memory, nothing copied
                maps = make_task(partial(tree.pull, copy=False), tree.check)
                yield tree.make_case("latest(copy=False)", maps, {}, scale=Scale("ms"))
            elif shape == stage.sizes.big_tree:
                yield from tree.read_together()
            yield tree.publish_until_seen(follower)
            stage.client.delete(tree.name)
    policy = WeightsTree(stage, POLICY_SHAPE)
    floors = policy.make_floors()
    if stage.transport == "gloo":
        del floors[MEMCPY]
    # when the call returns, all clients see the version
    yield policy.make_case("publish until visible", policy.publishes, floors, scale=Scale("ms"))
    stage.client.delete(policy.name)


class WeightsTree:
    """One tree under test.

    Args:
        stage: What it stands on.
        shape: The number of tensors, and the bytes of all.
    """

    def __init__(self, stage: Stage, shape: tuple[int, int]) -> None:
        self.stage = stage
        self.shape = shape
        self.number = 0  # is stamped into the content, and grows with every change
        self.version = 0
        self.data = make_weights(*shape)
        self.name = f"weights-{shape[0]}"
        self.nbytes = compute_nbytes(self.data)
        self.publishes = make_task(self.publish, lambda _: self.check(self.pull()), before=self.change)

    def change(self) -> None:
        """Gives the content the next number. No timing includes this."""
        self.number += 1
        stamp(self.data, self.number)

    def publish(self) -> None:
        """Publishes the content once."""
        self.version = self.stage.client.publish(self.name, self.data)

    def renew(self) -> None:
        """Publishes a version that has no tensor in common with the one before: all of it travels to its readers."""
        if self.stage.transport == "gloo":
            self.change()
            self.publish()

    def pull(self, *, copy: bool = True) -> TensorDictBase:
        """Returns what was published last."""
        return fetch(self.stage.client, self.name, copy=copy)

    def check(self, *found: TensorDictBase) -> None:
        """Compares with what was published last."""
        for each in found:
            check_equal(each, self.data, what=f"weights {self.name}, version {self.version}")

    def make_floors(self, *, is_read: bool = False, is_fresh: bool = False) -> dict[str, Task]:
        """Returns raw gloo where a wire is between, and memcpy.

        Fresh pages are only a floor of large payloads. Smaller ones get memory back from the heap, with its pages.
        """
        nbytes, floors = self.nbytes, {}
        is_large = nbytes > MESSAGE_NBYTES
        if self.stage.transport == "gloo":
            out, back = (REQUEST_NBYTES, nbytes) if is_read else (nbytes, REQUEST_NBYTES)
            make_floor = partial(self.stage.link.make_floor, out=out, back=back)
            floors["gloo, one message"] = make_floor()
            if is_large:
                floors["gloo, 64 MiB messages"] = make_floor(message_nbytes=MESSAGE_NBYTES)
        elif self.stage.grpc_link is not None:
            # All bytes at once one way, as a stream; a request and an acknowledgement take a thousandth of that time.
            floors[GRPC_STREAM] = self.stage.grpc_link.make_floor(out=0 if is_read else nbytes, back=is_read * nbytes)
        if not is_fresh:
            floors[MEMCPY] = make_memcpy(nbytes)
        elif is_large:
            floors["memcpy, fresh pages"] = make_fresh_memcpy(nbytes)
        return floors

    def make_case(
        self, name: str, subject: Task, floors: dict[str, Task], *, scale: Scale | None = None, **pacing: Any
    ) -> Case:
        """Returns the case, by default in gigabytes per second."""
        num_tensors, nbytes = self.shape
        name = f"{nbytes // MIB} MiB in {num_tensors}: {name}"
        return Case(name, scale or Scale("GB/s", to_gigabytes(self.nbytes)), subject, floors, **pacing)

    def publish_first(self) -> Case:
        """Measures version 1 of a new store: its file and its pages are new."""
        client = self.stage.client
        names = (f"{self.name}-first-{i}" for i in count())

        def put() -> str:
            name = next(names)
            client.publish(name, self.data)
            return name

        def check(name: str) -> None:
            self.check(fetch(client, name))
            client.delete(name)

        floors = self.make_floors(is_fresh=True)
        return self.make_case("first publish", make_task(put, check), floors, pacing=ONCE, max_rounds=MAX_FIRST_ROUNDS)

    def publish_after_pause(self) -> Case:
        """Measures publishes into files that have reached the disk in a pause before."""
        versions = self.stage.folder / SERVER_ROOT / "stores" / self.name / "versions"

        def pause() -> None:
            self.change()
            for path in versions.iterdir():
                sync_file(path)
            time.sleep(self.stage.sizes.pause_s)

        publishes = make_task(self.publish, lambda _: self.check(self.pull()), before=pause)
        floors = self.make_floors()
        return self.make_case("publish after a pause", publishes, floors, scale=Scale("ms"), pacing=NUM_AFTER_PAUSES)

    def publish_new(self, num_others: int) -> Iterator[Case]:
        """Measures the slowest of several publishes of tensors that are new each time, beside their median.

        The process holds many other tensors, which every full garbage collection visits. No timing includes those that
        begin while the new tensors are made.
        """
        others = [torch.zeros(()) for _ in range(num_others)]
        last = Round((), 0.0)

        def renew() -> None:
            self.data = self.data.clone()
            self.change()

        def run_round(_: Pacing) -> Round:
            nonlocal last
            last = time_round(self.publish, Pacing(0.0, min_ops=NUM_NEW, max_ops=NUM_NEW), before=renew)
            return last

        def find_slowest(_: Pacing) -> Round:
            slowest_s = max(last.op_s)
            return Round((slowest_s,), slowest_s)

        name = f"publish of new tensors, the slowest of {NUM_NEW}"
        subject = Task(find_slowest, lambda _: self.check(self.pull()))
        yield self.make_case(name, subject, {TYPICAL: Task(run_round)}, scale=Scale("ms"))
        del others  # they have lived until here

    def read_into(self) -> Case:
        """Measures reads into existing tensors."""
        out, read = self.data.clone(), partial(fetch, self.stage.client, self.name)

        def run_round(pacing: Pacing) -> Round:
            out.zero_()  # so that the check sees what this round has brought
            return time_round(lambda: read(out=out), pacing, before=self.renew)

        return self.make_case(
            "latest(out=)", Task(run_round, lambda _: self.check(out)), self.make_floors(is_read=True)
        )

    def read_together(self) -> Iterator[Case]:
        """Measures several readers of one version at once, beside as many payloads over one link."""
        outs = [self.data.clone() for _ in range(NUM_READERS)]
        floor = self.stage.link.make_floor(out=REQUEST_NBYTES, back=self.nbytes)

        def run_one_link(_: Pacing) -> Round:
            done = floor.run_round(Pacing(0.0, min_ops=NUM_READERS, max_ops=NUM_READERS))
            return Round((done.elapsed_s,), done.elapsed_s)

        with ExitStack() as stack:
            readers = [stack.enter_context(connect(self.stage.address, transport="gloo")) for _ in outs]
            threads = stack.enter_context(ThreadPoolExecutor(NUM_READERS))

            def pull() -> None:
                list(threads.map(lambda reader, out: fetch(reader, self.name, out=out), readers, outs))

            scale = Scale("GB/s", to_gigabytes(NUM_READERS * self.nbytes))
            subject = make_task(pull, lambda _: self.check(*outs), before=self.renew)
            floors = {"gloo, one link": Task(run_one_link)}
            yield self.make_case(f"latest(out=), {NUM_READERS} at once", subject, floors, scale=scale, pacing=ONCE)

    def publish_until_seen(self, follower: Child) -> Case:
        """Measures from the start of a publish until a waiting process has the whole version."""

        def before() -> None:
            follower.send(("watch", self.name, self.version))
            self.change()

        def put() -> None:
            self.publish()
            follower.recv()

        link, nbytes = self.stage.link, self.nbytes
        if self.stage.transport == "shm":
            floors = {MEMCPY: make_memcpy(nbytes)}
        else:
            floors = {"gloo, there and back": link.make_floor(out=nbytes, back=nbytes)}
        subject = make_task(put, lambda _: follower.ask(("check", self.shape, self.number)), before=before)
        return self.make_case("publish until seen elsewhere", subject, floors, scale=Scale("ms"))


def fetch(client: Client, name: str, **options: Any) -> TensorDictBase:
    """Returns the newest version of some weights; options as in ``Client.latest``.

    Raises:
        StoreNotFoundError: Nothing was published.
    """
    found = client.latest(name, **options)
    if found is None:
        raise StoreNotFoundError(name=name)
    data: TensorDictBase = found.data
    return data


def follow_versions(pipe: Pipe, address: str, transport: TransportName) -> None:
    """Is a second client. It waits for versions, and compares the last one with what was published.

    On one machine the process has a version as soon as it has mapped it. Over a wire it receives a version into the
    tensors of the one before.
    """
    is_mapped = transport == "shm"
    followed = ""
    data: TensorDictBase = TensorDict({}, [])
    with connect(address, transport=transport) as client:
        pipe.send(None)
        while True:
            match pipe.recv():
                case "watch", name, newer_than:
                    out = None if is_mapped or name != followed else data
                    wanted = {"newer_than": newer_than, "timeout_s": WATCH_TIMEOUT_S, "copy": not is_mapped}
                    followed, data = name, fetch(client, name, out=out, **wanted)
                case "check", shape, number:
                    expected = _make_weights(*shape)
                    stamp(expected, number)
                    check_equal(data, expected, what="weights seen elsewhere")
            pipe.send(None)


_make_weights = lru_cache(maxsize=1)(make_weights)
