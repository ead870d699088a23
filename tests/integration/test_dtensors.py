"""Sharded weights between process groups of several sizes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from torch import nn

import tdserve
from tdserve import dtensor
from tdserve.dtensor import sharded_reads
from tests.integration.crashing import Crashing
from tests.integration.dtensor_roles import Net, is_same, make_state
from tests.integration.dtensor_runs import ROLES, finish, run, start
from tests.integration.forked_clients import ForkedClients

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def ranks() -> Iterator[ForkedClients]:
    with ForkedClients(*ROLES) as started:
        yield started


@pytest.mark.parametrize("is_thorough", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize("transport", ["gloo", "shm"])
def test_read_when_placements_and_world_size_are_others_then_each_bit_is_that_of_the_publisher(
    server: tdserve.Server, ranks: ForkedClients, tmp_path: Path, transport: str, is_thorough: bool
) -> None:
    name = f"{transport}-{is_thorough}"
    done = ["done", "6"]
    assert run(ranks, "publish_all", server.address, name, tmp_path, 4, transport=transport)[0][-1] == done
    found = run(ranks, "read_all", server.address, name, tmp_path, 2, transport=transport, is_thorough=is_thorough)
    assert [lines[-1] for lines in found] == [done] * 2


@pytest.mark.parametrize(
    ("dtype", "num_hidden", "sizes", "tp"),
    [("bfloat16", 7, (3, 2), (1, 1)), ("float32", 8, (4, 3), (2, 1)), ("float32", 8, (3, 4), (1, 2))],
)
@pytest.mark.parametrize("transport", ["gloo", "shm"])
def test_module_when_read_into_one_with_other_shards_then_it_and_its_optimizer_go_on(
    server: tdserve.Server,
    ranks: ForkedClients,
    tmp_path: Path,
    transport: str,
    dtype: str,
    num_hidden: int,
    sizes: tuple[int, int],
    tp: tuple[int, int],
) -> None:
    """Seven hidden units cannot be divided evenly among ranks. With ``tp`` the shards are sharded again."""
    for role, size, num_tp in zip(("train", "load"), sizes, tp, strict=True):
        name, options = f"{transport}-{sizes}-{tp}", {"dtype": dtype, "num_hidden": num_hidden, "transport": transport}
        found = run(ranks, role, server.address, name, tmp_path, size, tp=num_tp, **options)
        assert [lines[-1] for lines in found] == [["done"]] * size


def test_publish_when_a_rank_raises_then_all_do_and_the_last_version_stays_whole(
    server: tdserve.Server, ranks: ForkedClients, tmp_path: Path
) -> None:
    found = run(ranks, "fail", server.address, "failing", tmp_path, 3)
    for rank, lines in enumerate(found):
        said = [" ".join(line) for line in lines]
        failed, bad = said[:4], dict(zip(("sparse", "partial", "shapes", "numbers"), said[4:], strict=False))
        for line in failed:
            assert line.startswith("ClosedError" if rank == 1 else "TransferAbortedError")
            assert rank == 1 or "rank 1 has raised ClosedError" in line
        assert bad["sparse"].split()[1] == ("NotSupportedError" if rank == 1 else "TransferAbortedError")
        assert "'embedding'" in bad["sparse"]
        assert "NotSupportedError key 'sums' of weights 'failing'" in bad["partial"]
        assert "placement Partial (P(sum)): publish its .redistribute()" in bad["partial"]
        assert "SpecMismatchError store 'failing', key 'scale': expected a DTensor of float32[2]" in bad["shapes"]
        assert "at rank 2" in bad["shapes"]
        assert "key 3 below 'm.'" in bad["numbers"]
        assert said[-1] == "done"


def test_publish_when_the_answer_to_the_index_is_lost_then_errors_name_both_outcomes(
    ranks: ForkedClients, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server dies as soon as it has recorded the index, which follows two parts."""
    with monkeypatch.context() as patched:
        patched.setenv("TDSERVE_FAILPOINT", "publish.recorded:3")
        crashing = Crashing(tmp_path / "root")
    with crashing:
        found = run(ranks, "publish_unanswered", crashing.server.address, "w", tmp_path / "ranks", 2)
        first, second = (" ".join(lines[0]) for lines in found)
        said = "the version may be there all the same, or come yet: client.versions('w') lists it then"
        assert said in first
        assert second.startswith("TransferAbortedError")
        assert said in second
        crashing.start()
        with crashing.server.client() as client:
            into = {"a": torch.zeros(4)}
            assert dtensor.version(client, "w", 1, into=into).version == 1
            assert into["a"].tolist() == [1.0] * 4


def test_publish_when_a_rank_is_killed_then_the_other_raises_and_the_last_version_stays(
    server: tdserve.Server, ranks: ForkedClients, client: tdserve.Client, name: str, tmp_path: Path
) -> None:
    first, second = run(ranks, "die", server.address, name, tmp_path, 2)
    assert first == [["published", "1"], ["noticed"]]
    assert second == [["published", "1"]]
    into = {key: torch.zeros_like(full) for key, full in make_state(1).items()}
    found = dtensor.latest(client, name, into=into)
    assert found is not None
    assert found.version == 1
    assert all(is_same(into[key], full) for key, full in make_state(1).items())


def test_plan_when_a_rank_has_changed_then_all_make_a_new_one_and_each_version_is_right(
    server: tdserve.Server, ranks: ForkedClients, name: str, tmp_path: Path
) -> None:
    numbers = [1, 1, 2, 3, 4, 5, 5, 6]
    expected = [[str(at), str(made), *(["1.0", "1.0"] if at > 5 else [])] for at, made in enumerate(numbers, 1)]
    assert run(ranks, "publish_changes", server.address, name, tmp_path, 2) == [expected] * 2


def test_publish_when_a_dtype_is_given_then_each_rank_converts_its_shards_and_all_agree_on_it(
    server: tdserve.Server, ranks: ForkedClients, client: tdserve.Client, name: str, tmp_path: Path
) -> None:
    found = [
        [" ".join(line) for line in lines]
        for lines in run(ranks, "publish_converted", server.address, name, tmp_path, 2)
    ]
    assert "expected a DTensor of bfloat16[7, 5] as at rank 0, got a DTensor of float16[7, 5] at rank 1" in found[0][0]
    assert "expected a DTensor of bfloat16[7, 5] as at rank 0, got a DTensor of float16[7, 5] at rank 1" in found[1][0]
    for first, second in zip(found[0][1:], found[1][1:], strict=True):
        assert first.startswith("TransferAbortedError")
        assert "rank 1 has raised InvalidRequestError: invalid dtype" in first
        assert second.startswith("InvalidRequestError invalid dtype")
    for version in (1, 2):
        into = {key: torch.zeros_like(full) for key, full in make_state(1).items()}
        dtensor.version(client, name, version, into=into)
        for key, full in make_state(1).items():
            is_converted = version == 1 and full.is_floating_point()
            assert is_same(into[key], full.bfloat16().to(full.dtype) if is_converted else full), key
        parts = [client.version(f"{name}.part-{rank}", version, numpy=False).data for rank in range(2)]
        sent = {leaf.dtype for part in parts for leaf in part.values()}
        assert sent == (
            {torch.bfloat16, torch.int64} if version == 1 else {full.dtype for full in make_state(1).values()}
        )


def test_read_when_versions_are_published_meanwhile_then_none_is_mixed_with_another(
    server: tdserve.Server,
    ranks: ForkedClients,
    client: tdserve.Client,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each version is retired as soon as the next is there, and each leaf takes a request of its own."""
    monkeypatch.setattr(sharded_reads, "READ_NBYTES", 1)
    num_versions = 30
    options = {"num_versions": num_versions, "keep": 1}
    children = start(ranks, "publish_numbers", server.address, name, tmp_path, 3, **options)
    seen = [0]
    while seen[-1] < num_versions:
        into = {key: torch.zeros(16, 300) for key in "abc"}
        found = dtensor.latest(client, name, into=into, newer_than=seen[-1], timeout_s=60.0)
        assert found is not None
        assert {number for leaf in into.values() for number in leaf.flatten().tolist()} == {float(found.version)}
        seen.append(found.version)
    assert seen == sorted({*seen})
    assert finish(children) == [[["done", str(num_versions)]]] * 3


def test_parts_when_ranks_become_fewer_then_deleted_once_no_version_needs_them(
    server: tdserve.Server, ranks: ForkedClients, client: tdserve.Client, name: str, tmp_path: Path
) -> None:
    run(ranks, "publish_numbers", server.address, name, tmp_path / "3", 3, num_versions=2, keep=2)
    assert [len(client.versions(f"{name}.part-{rank}")) for rank in range(3)] == [2, 2, 2]
    for number, num_parts in ((3, 3), (4, 1)):
        into = {key: torch.zeros(16, 300) for key in "abc"}
        assert dtensor.publish(client, name, {key: leaf + number for key, leaf in into.items()}) == number
        assert client.stores(name) == [name, *(f"{name}.part-{rank}" for rank in range(num_parts))]
        assert dtensor.version(client, name, number - 1, into=into).version == number - 1
        assert all(bool((leaf == number - 1).all()) for leaf in into.values())


def test_parts_when_their_index_was_deleted_then_fewer_ranks_or_delete_remove_them(
    server: tdserve.Server, ranks: ForkedClients, client: tdserve.Client, name: str, tmp_path: Path
) -> None:
    run(ranks, "publish_numbers", server.address, name, tmp_path / "3", 3, num_versions=1, keep=1)
    client.delete(name)
    client.publish(f"{name}.part-3", {"own": torch.ones(1)})
    parts = [f"{name}.part-{rank}" for rank in range(4)]
    assert client.stores(name) == parts
    dtensor.publish(client, name, {"a": torch.ones(2)})
    assert client.stores(name) == [name, parts[0], parts[3]]
    dtensor.delete(client, name)
    assert client.stores(name) == [parts[3]]
    with pytest.raises(tdserve.StoreNotFoundError):
        dtensor.delete(client, name)


def test_publisher_of_the_whole_when_read_into_shards_then_each_rank_gets_its_own(
    server: tdserve.Server, ranks: ForkedClients, client: tdserve.Client, name: str, tmp_path: Path
) -> None:
    torch.manual_seed(5)
    client.publish(f"{name}-net", Net(torch.bfloat16, 7), metadata={"step": 4})
    client.publish(f"{name}-flat", TensorDict(make_state(1)))
    assert run(ranks, "read_plain", server.address, name, tmp_path, 2) == [[["done"]]] * 2


def test_restored_copy_when_the_original_goes_on_then_reads_and_deletes_its_own_parts(
    server: tdserve.Server, ranks: ForkedClients, client: tdserve.Client, name: str, tmp_path: Path
) -> None:
    leaf = {"a": torch.zeros(16, 300)}
    run(ranks, "publish_numbers", server.address, name, tmp_path / "ranks", 2, num_versions=1, keep=1)
    names = [name, *(f"{name}.part-{rank}" for rank in range(2))]
    client.checkpoint(str(tmp_path / "place"))
    client.restore(str(tmp_path / "place"), names=names, prefix="old-")
    for number in (2, 3, 4):
        dtensor.publish(client, name, {"a": leaf["a"] + number}, keep=1)
    into = {key: torch.zeros(11, 300) for key in "abc"}
    assert dtensor.latest(client, f"old-{name}", into=into) is not None
    assert all(bool((each == 1).all()) for each in into.values())
    dtensor.publish(client, f"old-{name}", leaf, keep=1)
    assert client.stores(f"old-{name}") == [f"old-{each}" for each in names[:2]]


def test_newest_version_when_a_part_of_it_was_not_restored_then_latest_reads_the_newest_that_is_whole(
    client: tdserve.Client, name: str, tmp_path: Path
) -> None:
    dtensor.publish(client, name, {"a": torch.ones(2)})
    client.checkpoint(str(tmp_path / "place"))
    dtensor.publish(client, name, {"a": torch.ones(2) * 2})
    client.delete(f"{name}.part-0")
    client.restore(str(tmp_path / "place"), names=[f"{name}.part-0"])
    into = {"a": torch.zeros(2)}
    found = dtensor.latest(client, name, into=into)
    assert found is not None
    assert found.version == 1
    assert into["a"].tolist() == [1.0, 1.0]
    with pytest.raises(tdserve.VersionNotFoundError):
        dtensor.latest(client, name, into=into, newer_than=1, timeout_s=0.1)
    assert dtensor.publish(client, name, {"a": torch.ones(2) * 3}) == 3
    assert dtensor.latest(client, name, into=into) is not None
    assert into["a"].tolist() == [3.0, 3.0]


def test_tied_destination_when_version_is_untied_then_has_the_last_name_as_a_whole(
    server: tdserve.Server, ranks: ForkedClients, client: tdserve.Client, name: str, tmp_path: Path
) -> None:
    """Part 1 has rows of ``tied.a`` and comes after part 0, which has all of ``tied.b``."""
    run(ranks, "publish_untied", server.address, name, tmp_path, 2)
    for names in (("a", "b"), ("b", "a")):
        tied = nn.Module()
        for each in names:
            tied.register_parameter(
                each, nn.Parameter(torch.zeros(4, 2)) if each == names[0] else tied.get_parameter(names[0])
            )
        assert dtensor.latest(client, name, into={"tied": tied}) is not None
        assert tied.get_parameter("a").tolist() == [[2.0, 2.0]] * 4
