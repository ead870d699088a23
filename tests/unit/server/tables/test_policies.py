from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tdserve.base.deadline import Deadline
from tdserve.base.errors import InvalidRequestError, InvalidSpecError, WrongStateError
from tdserve.rules.replay.eligibility.conditions import PLAIN
from tdserve.rules.replay.eligibility.staleness import UNKNOWN
from tdserve.rules.replay.limiter import Queue
from tdserve.rules.replay.plans import PLAIN_ARRIVAL
from tdserve.rules.replay.samplers.order import Fifo
from tdserve.rules.replay.settings import Settings
from tdserve.rules.replay.table_state import TableState
from tdserve.server.catalog import descriptions
from tdserve.server.catalog.seals import Seal
from tdserve.server.kinds.policies import refresh_staleness, wake_followers
from tdserve.server.moves.sealing import Sealing
from tdserve.server.open_store.opened_store import OpenedStore
from tdserve.server.tables.arrivals import decode_extend_columns
from tdserve.server.tables.discarding import Discarding
from tdserve.server.tables.policy_versions import ExtendPolicyVersions, adopt_reported_policy
from tdserve.structure.captures.capture import capture
from tdserve.structure.trees import codec
from tdserve.v1 import control_pb2
from tests.errors import raises
from tests.unit.server.replaying import create, extend, extending, in_line, rows, sample, sampling
from tests.unit.server.world import Loop, World, content_of

WEIGHTS = TensorDict({"w": torch.zeros(2)}, [])


def publishing() -> control_pb2.PublishRequest:
    """A version of ``p``."""
    spec, content = codec.encode(capture(WEIGHTS).spec), content_of(WEIGHTS, is_packed=True)
    return control_pb2.PublishRequest(store="p", spec=spec, content=content)


def publish(world: World, run: Loop, num_versions: int = 1) -> None:
    """Versions of ``p``."""
    for _ in range(num_versions):
        run(world.publishing.publish(world.session(), 1, publishing()))


def versions(*numbers: int) -> control_pb2.RowColumn:
    """Encodes versions as messages have them."""
    return control_pb2.RowColumn(data=np.array(numbers, "<i8").tobytes())


def policy_versions(world: World, store: OpenedStore, asked: control_pb2.ExtendRequest) -> ExtendPolicyVersions:
    """The policy versions that made the rows of a request."""
    return ExtendPolicyVersions(world.stores, store, asked, decode_extend_columns(store, bytes(16), asked))


def described(world: World, store: OpenedStore) -> control_pb2.StoreDescription:
    """What is said of a store."""
    return descriptions.describe(world.stores, store, with_spec=False)


@pytest.fixture
def made(world: World, run: Loop) -> OpenedStore:
    """A replay whose rows are made by ``p``."""
    return create(world, run, policy="p")


def test_follow_when_versions_come_and_the_store_goes_then_counts_from_what_there_is(
    world: World, run: Loop, made: OpenedStore
) -> None:
    staleness = refresh_staleness(world.stores, made)
    assert staleness is not None
    assert (staleness.uid, staleness.newest) == ("", 0)
    publish(world, run, 2)
    assert staleness.newest == 0
    refresh_staleness(world.stores, made)
    assert (staleness.uid, staleness.newest) == (world.stores.get("p").record.uid, 2)
    run(world.creation.delete("p"))
    refresh_staleness(world.stores, made)
    assert (staleness.uid, staleness.newest) == ("", 0)


def test_policy_when_deleted_and_the_server_is_started_again_then_its_rows_stay_without_a_version(
    world: World, run: Loop, made: OpenedStore
) -> None:
    extend(world, run, made, rows(0, 4))
    publish(world, run)
    refresh_staleness(world.stores, made)
    run(world.creation.delete("p"))
    refresh_staleness(world.stores, made)
    world.reopen()
    again = world.stores.get(made.name)
    staleness = refresh_staleness(world.stores, again)
    assert staleness is not None
    assert staleness.get_versions(np.arange(4)).tolist() == [UNKNOWN] * 4


def test_extend_when_versions_are_given_then_checked_and_kept(world: World, run: Loop, made: OpenedStore) -> None:
    publish(world, run, 2)
    extend(world, run, made, rows(0), policy_versions=versions(2, 0, 1))
    extend(world, run, made, rows(3), request=2, policy_versions=versions(1))
    extend(world, run, made, rows(6, 1), request=3)
    assert made.get_table().columns.get_array("policy_version", np.int64)[:7].tolist() == [2, 0, 1, 1, 1, 1, 2]
    for bad in (versions(3), versions(-1), versions(1, 1), control_pb2.RowColumn(data=b"\0\0")):
        with raises(InvalidRequestError, argument="policy_version"):
            extend(world, run, made, rows(7, 1), request=4, policy_versions=bad)
    assert len(made.get_table()) == 7
    assert made.get_table().ring.num_reserved == 0


def test_extend_when_the_table_has_no_policy_then_refused(world: World, run: Loop) -> None:
    plain = create(world, run)
    with pytest.raises(InvalidRequestError, match="without a policy"):
        extend(world, run, plain, rows(0), policy_versions=versions(0))
    with pytest.raises(InvalidRequestError, match="without a policy"):
        sample(world, run, plain, 1, max_lag=0)
    assert refresh_staleness(world.stores, plain) is None


def test_settle_when_the_policy_was_made_anew_meanwhile_then_the_version_is_unknown(
    world: World, run: Loop, made: OpenedStore
) -> None:
    publish(world, run, 2)
    asked = extending(made, rows(0), policy_versions=versions(1))
    before, unaware = (
        policy_versions(world, made, asked),
        policy_versions(world, made, extending(made, rows(0))),
    )
    run(world.creation.delete("p"))
    publish(world, run, 3)
    settled = before.settle(PLAIN_ARRIVAL).policy_versions
    assert settled is not None
    assert settled.tolist() == [-1, -1, -1]
    assert unaware.settle(PLAIN_ARRIVAL).policy_versions is None
    assert policy_versions(world, made, asked).settle(PLAIN_ARRIVAL).policy_versions.tolist() == [1, 1, 1]  # type: ignore[union-attr]


def test_sample_when_a_lag_is_asked_for_then_rows_that_are_too_old_are_left_out(
    world: World, run: Loop, made: OpenedStore
) -> None:
    publish(world, run, 2)
    extend(world, run, made, rows(0), policy_versions=versions(1))
    extend(world, run, made, rows(3), request=2)
    assert set(sample(world, run, made, 50, max_lag=0)["a"]) == {3, 4, 5}
    assert set(sample(world, run, made, 50, max_lag=1)["a"]) == {0, 1, 2, 3, 4, 5}
    publish(world, run)
    found = sample(world, run, made, 50, max_lag=1)
    assert (set(found["a"]), set(found["policy_version"])) == ({3, 4, 5}, {2})
    lags = described(world, made).lags
    assert (lags.min, lags.mean, lags.max) == (1, 1.5, 2)


def test_sample_when_only_the_newest_version_is_asked_for_then_the_answer_has_it(
    world: World, run: Loop, made: OpenedStore
) -> None:
    publish(world, run, 3)
    done = run(
        world.samples.sample(world.session(), 1, control_pb2.SampleRequest(store="r", asks_newest=True, max_lag=1))
    )
    assert done is not None
    assert (done.newest_policy_version, done.oldest_policy_version) == (3, 2)
    plain = create_plain(world, run)
    done = run(world.samples.sample(world.session(), 1, control_pb2.SampleRequest(store=plain.name, asks_newest=True)))
    assert done is not None
    assert done.newest_policy_version == 0


def create_plain(world: World, run: Loop) -> OpenedStore:
    """A replay without a policy."""
    return run(world.create_replay("plain", rows(0)[0], 4))


@pytest.mark.parametrize("event", ["publish", "delete"])
def test_publish_when_a_taker_and_a_writer_wait_for_each_other_then_it_discards_and_both_go_on(
    world: World, run: Loop, event: str
) -> None:
    made = create(world, run, capacity=4, sampler=Fifo(), limiter=Queue(4), is_queue=True, policy="p")
    publish(world, run)
    extend(world, run, made, rows(0, 3))

    async def exchange() -> tuple[Any, Any]:
        writing = asyncio.create_task(
            world.extends.extend(world.session(2), 1, extending(made, rows(3, 4), timeout_s=20.0))
        )
        await in_line(made)
        asked = sampling(4, max_lag=0, is_lease=True, timeout_s=20.0)
        taking = asyncio.create_task(world.samples.sample(world.session(), 1, asked))
        await in_line(made, 2)
        if event == "delete":
            await world.creation.delete("p")
        else:
            await world.publishing.publish(world.session(3), 1, publishing())
        return await asyncio.gather(taking, writing)

    taken, _ = run(exchange())
    assert taken.accepted.num_rows == 4
    assert described(world, made).num_discarded == 3


def test_discards_when_a_seal_comes_amid_them_then_it_waits_for_their_end(
    world: World, run: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TableState, "step_rows", 1)
    table = create(world, run, capacity=4, sampler=Fifo(), limiter=Queue(4), is_queue=True, policy="p")
    publish(world, run)
    extend(world, run, table, rows(0, 4))
    publish(world, run)
    sealing, seal, rules = Sealing(world.stores), Seal(3, f"{7:032x}"), table.get_table()

    async def scenario() -> None:
        assert not Discarding(world.stores).refresh(table, 0, PLAIN)  # they go on, even if the sample gives up
        assert rules.departures.count_too_old(0) == 4
        sealing.begin(table, seal)
        await sealing.wait_at_rest(table, seal, Deadline.after(20.0))
        assert not rules.departures.count_too_old(0)
        sealing.end(table.name, seal)

    run(scenario())


def test_followers_when_a_table_is_deleted_then_it_is_forgotten(world: World, run: Loop, made: OpenedStore) -> None:
    refresh_staleness(world.stores, made)
    assert world.stores.followers == {"p": {"r"}}
    run(world.creation.delete("r"))
    assert world.stores.followers == {}
    wake_followers(world.stores, "p")


def test_create_when_the_policy_is_no_weights_store_then_refused(world: World, run: Loop) -> None:
    run(world.create_replay("other", rows(0)[0], 4))
    with pytest.raises(WrongStateError, match="weights"):
        create(world, run, policy="other")
    with pytest.raises(InvalidRequestError, match="itself"):
        create(world, run, policy="r")
    keyed = rows(0)[0].set("policy_version", torch.tensor(1))
    fields = {"kind": control_pb2.STORE_KIND_REPLAY, "capacity": 4}
    with pytest.raises(InvalidSpecError, match="policy_version"):
        run(world.create("r", keyed, settings=Settings(policy="p").to_json(), **fields))
    assert world.stores.find("r") is None
    assert run(world.create("r", keyed, **fields)).table is not None  # which has no such column


def test_describe_when_the_policys_name_is_taken_by_another_store_then_still_described(
    world: World, run: Loop, made: OpenedStore
) -> None:
    publish(world, run, 2)
    extend(world, run, made, rows(0))
    run(world.creation.delete("p"))
    run(world.create_replay("p", rows(0)[0], 4))
    assert described(world, made).num_rows == 3
    with pytest.raises(WrongStateError, match="weights"):
        extend(world, run, made, rows(3), request=2)
    with pytest.raises(WrongStateError, match="weights"):
        sample(world, run, made, 1, max_lag=3)
    assert len(sample(world, run, made, 1)["a"]) == 1


# ---------------------------------------------------------------- a policy on another server


def news(uid: str, newest: int, created_s: float = 1.0, gone: str = "") -> control_pb2.ExtendRequest:
    """What a client says of the policy."""
    said = control_pb2.PolicyNews(uid=uid, newest=newest, created_s=created_s, gone=gone)
    return control_pb2.ExtendRequest(policy_news=said)


@pytest.mark.parametrize(
    ("heard", "uid", "newest"),
    [
        ([news("a", 3)], "a", 3),
        ([news("a", 3), news("a", 2)], "a", 3),
        ([news("a", 3), news("b", 1, 2.0)], "b", 1),
        ([news("b", 1, 2.0), news("a", 3)], "b", 1),
        ([news("b", 1, 2.0), news("", 0, 0.0, gone="a")], "b", 1),
        ([news("a", 3), news("", 0, 0.0, gone="a")], "", 0),
        ([news("a", 3), news("", 0, 0.0, gone="a"), news("b", 1, 2.0)], "b", 1),
    ],
)
def test_news_when_of_different_incarnations_then_the_newest_counts(
    world: World, made: OpenedStore, heard: list[control_pb2.ExtendRequest], uid: str, newest: int
) -> None:
    for asked in heard:
        adopt_reported_policy(world.stores, made, asked)
    staleness = refresh_staleness(world.stores, made)
    assert staleness is not None
    assert (staleness.uid, staleness.newest) == (uid, newest)


def test_news_when_this_server_has_the_policy_then_ignored(world: World, run: Loop, made: OpenedStore) -> None:
    publish(world, run, 2)
    adopt_reported_policy(world.stores, made, news("other", 9, 9e9))
    assert described(world, made).newest_policy_version == 2


@pytest.mark.parametrize("asked", [news("a", 1 << 40), news("a" * 300, 1), news("a", 1, math.nan)])
def test_news_when_impossible_then_refused(world: World, made: OpenedStore, asked: control_pb2.ExtendRequest) -> None:
    with raises(InvalidRequestError, argument="policy_news"):
        adopt_reported_policy(world.stores, made, asked)
