"""Ranks of process groups that publish again and again, and readers that follow, each in a process of its own."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

import tdserve
from tdserve import dtensor
from tdserve.base import failpoints
from tdserve.dtensor import publish_plan, sharded_publish
from tests.integration.dtensor_roles import (
    TIMEOUT_S,
    Net,
    Say,
    is_same,
    join,
    make_group,
    make_mesh,
    make_net,
    make_state,
    shard,
)
from tests.processes import wait_for


def pass_and_follow(say: Say, address: str, name: str, *, folder: str, rank: int, size: int) -> None:
    """Waits for a version in a thread; meanwhile a pass of the module gathers its parameters."""
    with join(folder, rank, size), tdserve.connect(address, timeout_s=TIMEOUT_S) as client:
        net, plain, x = make_net(8, 1, torch.float32, 7), Net(torch.float32, 7), torch.ones(1, 4)
        client.publish(name, plain)
        with dtensor.subscribe(client, name, into=net, newer_than=1) as versions, ThreadPoolExecutor(1) as thread:
            later = thread.submit(next, versions)
            wait_for(lambda: client.describe(name).num_waiting, "a request")
            with torch.no_grad():
                net(x)
            client.publish(name, plain)
            assert later.result(TIMEOUT_S).version == 2
        with torch.no_grad():
            torch.testing.assert_close(net(x), plain(x))
    say("done")


def publish_changes(say: Say, address: str, name: str, *, folder: str, rank: int, size: int) -> None:
    """Publishes versions; some ranks change in between. Prints how many plans were made up to each version."""
    made: list[str] = []

    def make_plan(*arguments: Any, **named: Any) -> Any:
        made.append(name)
        return publish_plan.make_plan(*arguments, **named)

    pytest.MonkeyPatch().setattr(sharded_publish, "make_plan", make_plan)
    with join(folder, rank, size), tdserve.connect(address) as client, tdserve.connect(address) as second:
        mesh, other = make_mesh((-1,)), second if rank else client
        rows, columns = [Shard(0)], [Shard(1)]
        more = {"more": torch.ones(2)}
        steps: list[tuple[tdserve.Client, list[Any], dict[str, Any]]] = [
            (client, rows, {}),
            (client, rows, {}),  # nothing has changed
            (other, rows, {}),  # one rank has no plan
            (client, rows, {}),  # the plans are of two publishes
            (client, columns, {}),
            (client, columns, more if rank else {}),  # one rank has another leaf
            (client, columns, more if rank else {}),
            (client, columns, {} if rank else more),
        ]
        for number, (user, placements, added) in enumerate(steps, 1):
            dtensor.publish(user, name, {**shard(make_state(number), mesh, placements), **added})
            into = {key: torch.zeros_like(full) for key, full in make_state(1).items()}
            into.update({"more": torch.zeros(2)} if number > 5 else {})
            assert dtensor.version(client, name, number, into=into).version == number
            assert all(is_same(into[key], full) for key, full in make_state(number).items())
            say(number, len(made), *(into["more"].tolist() if number > 5 else ()))
            dist.barrier()


def publish_converted(say: Say, address: str, name: str, *, folder: str, rank: int, size: int) -> None:
    """Publishes a version in bfloat16, and others with a dtype that is wrong in a rank; prints the errors."""
    with join(folder, rank, size), tdserve.connect(address, timeout_s=TIMEOUT_S) as client:
        state = shard(make_state(1), make_mesh((-1,)), [Shard(0)])
        assert dtensor.publish(client, name, state, dtype=torch.bfloat16) == 1
        assert all(
            is_same(each, shard(make_state(1), make_mesh((-1,)), [Shard(0)])[key]) for key, each in state.items()
        )
        wrong: tuple[Any, ...] = (torch.float16, torch.int64, "bfloat16")
        for each in wrong:
            try:
                dtensor.publish(client, name, state, dtype=each if rank else torch.bfloat16)
            except tdserve.TDServeError as error:
                say(type(error).__name__, error)
        assert dtensor.publish(client, name, state) == 2


def die_amid(say: Say, address: str, name: str, *, folder: str, rank: int, size: int, victim: int, step: str) -> None:
    """Publishes a version; then a rank is killed at a step of the next one: ``before`` or ``after`` a method."""
    with tdserve.connect(address, timeout_s=TIMEOUT_S) as client:
        make_group(folder, rank, size)
        mesh = make_mesh((-1,))
        say("published", dtensor.publish(client, name, shard(make_state(1), mesh, [Shard(0)])))
        when, _, method = step.partition(" ")
        perform = getattr(sharded_publish.ShardedPublish, method, None)

        def die(*arguments: Any) -> None:
            if when == "after" and perform is not None:
                perform(*arguments)
            os.kill(os.getpid(), signal.SIGKILL)

        if rank == victim and perform is None:
            failpoints.arm(method)
        elif rank == victim:
            pytest.MonkeyPatch().setattr(sharded_publish.ShardedPublish, method, die)
        try:
            dtensor.publish(client, name, shard(make_state(2), mesh, [Shard(0)]))
        except RuntimeError:  # of torch, whose group has lost a rank
            say("noticed")
        os._exit(0)  # a group that has lost a rank does not end well
