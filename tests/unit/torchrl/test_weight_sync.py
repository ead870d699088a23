from __future__ import annotations

import gc
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from threading import Event
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn

import tdserve
import tdserve.torchrl
from tests.processes import wait_for
from tests.roots import make_quick_root

pytest.importorskip("torchrl")

from torchrl.weight_update.weight_sync_schemes import WeightSyncScheme

from tdserve.torchrl.weight_sync import TDServeWeightSyncScheme

TIMEOUT_S = 20.0

MakeScheme = Callable[..., TDServeWeightSyncScheme]


@pytest.fixture(scope="module")
def server() -> Iterator[tdserve.Server]:
    with make_quick_root() as root, tdserve.Server(root, grace_s=1.0) as started:
        yield started


@pytest.fixture(params=[pytest.param("shm", marks=pytest.mark.full), "gloo"])
def make_scheme(server: tdserve.Server, request: pytest.FixtureRequest) -> Iterator[MakeScheme]:
    """Makes schemes of weights that no other test has."""
    made: list[TDServeWeightSyncScheme] = []

    def make(**arguments: Any) -> TDServeWeightSyncScheme:
        given = {"name": request.node.name, "transport": request.param, "timeout_s": TIMEOUT_S, **arguments}
        made.append(TDServeWeightSyncScheme(server.address, **given))
        return made[-1]

    yield make
    for scheme in made:
        scheme.shutdown()


class Policy(nn.Module):
    """A policy with a parameter, a buffer and a nested module."""

    def __init__(self, number: float = 0.0, num_outputs: int = 2) -> None:
        super().__init__()
        self.layer = nn.Linear(3, num_outputs)
        self.register_buffer("scale", torch.zeros(1))
        self.fill(number)

    def fill(self, number: float) -> Policy:
        """Sets everything to one number."""
        for tensor in self.state_dict().values():
            tensor.fill_(number)
        return self

    def find_numbers(self) -> set[float]:
        """Returns all numbers in it."""
        return {number for tensor in self.state_dict().values() for number in tensor.flatten().tolist()}

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        passed: torch.Tensor = self.layer(value) * self.scale
        return passed


def publish(scheme: TDServeWeightSyncScheme, policy: nn.Module, num_workers: int = 0) -> TDServeWeightSyncScheme:
    """Makes a scheme the publisher of a policy."""
    scheme.init_on_sender(model_id="policy", model=policy, num_workers=num_workers)
    scheme.connect()
    return scheme


def follow(scheme: TDServeWeightSyncScheme, policy: nn.Module, worker: int | None = None) -> TDServeWeightSyncScheme:
    """Makes a scheme a receiver."""
    scheme.init_on_receiver(model_id="policy", model=policy, worker_idx=worker)
    scheme.connect()
    return scheme


def has_version(receiver: TDServeWeightSyncScheme, version: int) -> bool:
    return receiver.version == version


def test_scheme_when_named_as_backend_then_it_is_made(server: tdserve.Server) -> None:
    scheme = WeightSyncScheme.from_backend("tdserve", address=server.address, name="other")
    assert type(scheme) is tdserve.torchrl.TDServeWeightSyncScheme
    assert scheme.name == "other"
    assert "TDServeWeightSyncScheme" in dir(tdserve.torchrl)
    with pytest.raises(AttributeError, match="no_such_name"):
        tdserve.torchrl.no_such_name  # noqa: B018 (the access raises)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["tensordict", "state_dict"])
@pytest.mark.filterwarnings("ignore:state_dict strategy is experimental")
def test_send_when_it_returns_then_the_workers_have_the_weights(make_scheme: MakeScheme, strategy: str) -> None:
    policy, followers = Policy(1.0), [Policy(), Policy()]
    sender = publish(make_scheme(strategy=strategy), policy, num_workers=2)
    receivers = [follow(make_scheme(strategy=strategy), each, worker) for worker, each in enumerate(followers)]
    places = [parameter.data_ptr() for each in followers for parameter in each.parameters()]
    assert [each.find_numbers() for each in followers] == [{1.0}] * 2
    for number in (2.0, 3.0):
        policy.fill(number)
        sender.send()
        assert [each.find_numbers() for each in followers] == [{number}] * 2
        assert [receiver.version for receiver in receivers] == [sender.version] * 2 == [int(number)] * 2
    assert places == [parameter.data_ptr() for each in followers for parameter in each.parameters()]
    sender.send(Policy(9.0), worker_ids=1)
    assert followers[1].find_numbers() == {9.0}


def test_receiver_when_its_policy_is_on_meta_then_it_gets_real_weights(make_scheme: MakeScheme) -> None:
    publish(make_scheme(), Policy(4.0))
    with torch.device("meta"):
        policy = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    source = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    sender = publish(make_scheme(name="meta", sync=False), source)
    receiver = follow(make_scheme(name="meta"), policy)
    assert receiver.version == sender.version
    assert policy.state_dict().keys() == source.state_dict().keys()
    assert all(tensor.equal(source.state_dict()[name]) for name, tensor in policy.state_dict().items())
    assert all(parameter.requires_grad for parameter in policy.parameters())


@pytest.mark.slow
def test_receivers_when_they_are_many_then_each_follows(make_scheme: MakeScheme, server: tdserve.Server) -> None:
    policies = [Policy() for _ in range(3)]
    sender = publish(make_scheme(sync=False), Policy(1.0))
    receivers = [follow(make_scheme(), policy) for policy in policies]
    with server.client() as client:  # anybody may publish
        version = client.publish(sender.name, Policy(5.0))
    for receiver, policy in zip(receivers, policies, strict=True):
        wait_for(partial(has_version, receiver, version), "the version")
        assert policy.find_numbers() == {5.0}
        assert receiver.age_s < TIMEOUT_S


def test_worker_when_it_cannot_apply_a_version_then_the_sender_and_the_state_show_why(make_scheme: MakeScheme) -> None:
    policy = Policy(1.0)
    sender = publish(make_scheme(), policy, num_workers=1)
    follower = Policy()
    receiver = follow(make_scheme(), follower, worker=0)
    assert sender.receivers()["0"].last_error == receiver.last_error == ""
    with pytest.raises(tdserve.WrongStateError, match="not applied by worker 0"):
        sender.send(Policy(2.0, num_outputs=7))
    state = sender.receivers()["0"]
    assert state.version == receiver.version == 1
    assert state.last_error == receiver.last_error != ""
    assert follower.find_numbers() == {1.0}
    sender.send(policy.fill(3.0))
    assert follower.find_numbers() == {3.0}
    state = sender.receivers()["0"]
    assert (state.version, state.last_error, receiver.last_error) == (3, "", "")
    assert state.age_s < TIMEOUT_S


def test_send_when_a_worker_is_gone_then_the_error_names_it(make_scheme: MakeScheme) -> None:
    sender = publish(make_scheme(), Policy(1.0), num_workers=2)
    receiver = follow(make_scheme(), follower := Policy(), worker=0)
    sender.timeout_s = 1.0
    with pytest.raises(tdserve.DeadlineExceededError, match=r"version 2 of .* in workers (0, )?1\b"):
        sender.send(Policy(2.0))
    wait_for(partial(has_version, receiver, 2), "the version")
    assert follower.find_numbers() == {2.0}


def test_worker_when_an_earlier_publisher_left_versions_then_it_waits_for_its_own(make_scheme: MakeScheme) -> None:
    publish(make_scheme(), Policy(1.0)).shutdown()
    sender = make_scheme()
    policy = Policy(2.0)
    sender.init_on_sender(model_id="policy", model=policy, num_workers=1)
    receiver, follower = pickle.loads(pickle.dumps(sender)), Policy()
    with ThreadPoolExecutor(1) as thread:
        following = thread.submit(follow, receiver, follower, 0)
        sender.connect()
        following.result(TIMEOUT_S)
    assert follower.find_numbers() == {2.0}
    receiver.shutdown()


def test_receiver_when_its_model_is_replaced_then_the_new_one_has_the_weights(make_scheme: MakeScheme) -> None:
    sender = publish(make_scheme(), Policy(1.0), num_workers=1)
    receiver = follow(make_scheme(), Policy(), worker=0)
    receiver.model = replaced = Policy(8.0)
    assert replaced.find_numbers() == {1.0}
    sender.send(Policy(2.0))
    assert replaced.find_numbers() == {2.0}


def test_receiver_when_its_model_is_replaced_while_a_version_is_applied_then_the_new_one_has_that_version(
    make_scheme: MakeScheme, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = publish(make_scheme(sync=False), Policy(1.0))
    receiver = follow(make_scheme(), follower := Policy())
    is_applying, may_end, apply_weights = Event(), Event(), receiver._strategy.apply_weights

    def apply_slowly(model: Any, weights: Any, **options: Any) -> None:
        is_applying.set()
        assert may_end.wait(TIMEOUT_S)
        apply_weights(model, weights, **options)

    monkeypatch.setattr(receiver._strategy, "apply_weights", apply_slowly)
    replaced = Policy(8.0)
    with ThreadPoolExecutor(1) as thread:
        sender.send(Policy(2.0))
        assert is_applying.wait(TIMEOUT_S)
        replacing = thread.submit(setattr, receiver, "model", replaced)
        wait([replacing], 0.3)  # so that it has begun
        may_end.set()
        replacing.result(TIMEOUT_S)
    assert receiver.version == 2
    assert (replaced.find_numbers(), follower.find_numbers()) == ({2.0}, {2.0})


def test_receiver_when_its_model_is_gone_then_the_error_shows(make_scheme: MakeScheme) -> None:
    sender = publish(make_scheme(), Policy(1.0), num_workers=1)
    receiver = follow(make_scheme(), Policy(), worker=0)  # a scheme does not keep its model
    gc.collect()
    with pytest.raises(tdserve.WrongStateError, match=r"worker 0: .*the model 'policy' is gone"):
        sender.send(Policy(2.0))
    assert receiver.version == 1


def test_scheme_when_weights_are_converted_on_the_way_then_they_come_back_in_their_dtype(
    make_scheme: MakeScheme,
) -> None:
    publish(make_scheme(dtype=torch.bfloat16), Policy(1.0 + 2**-12))
    follow(make_scheme(), follower := Policy())
    assert follower.find_numbers() == {1.0}
    assert follower.layer.weight.dtype == torch.float32


def test_receive_when_asked_then_a_newer_version_is_applied_once(make_scheme: MakeScheme) -> None:
    sender = publish(make_scheme(sync=False), Policy(1.0))
    receiver = follow(make_scheme(), follower := Policy())
    assert receiver.receive() is None
    assert receiver.receive(timeout=0.01) is None
    sender.send(Policy(2.0))
    receiver.receive(timeout=TIMEOUT_S)  # or the receiver's thread was faster
    wait_for(lambda: receiver.version == 2, "the version")
    assert follower.find_numbers() == {2.0}


def test_connect_when_only_the_scheme_holds_the_model_then_its_weights_are_published(make_scheme: MakeScheme) -> None:
    sender = make_scheme()
    sender.init_on_sender(model_id="policy", model=Policy(3.0), num_workers=1)
    gc.collect()
    sender.connect()
    follower = Policy()
    receiver = follow(make_scheme(), follower, worker=0)
    wait_for(partial(has_version, receiver, 1), "the version")
    assert follower.find_numbers() == {3.0}


def test_send_when_not_connected_or_without_a_model_then_wrong_state(make_scheme: MakeScheme) -> None:
    scheme = make_scheme()
    scheme.init_on_sender(model_id="policy")
    with pytest.raises(tdserve.WrongStateError, match="connect"):
        scheme.send(Policy())
    with pytest.raises(tdserve.WrongStateError, match="no model 'policy'"):
        scheme.connect()
    scheme.connect(weights=TensorDict({"w": torch.ones(1)}, []))
    assert scheme.version == 1
    scheme.shutdown()
    with pytest.raises(tdserve.ClosedError):
        scheme.receivers()


@pytest.mark.slow
def test_receiver_when_the_server_is_away_then_the_error_shows_and_it_goes_on_afterwards(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    root = tmp_path_factory.mktemp("restarted")
    with tdserve.Server(root, grace_s=1.0) as first:
        address = first.address
        sender = publish(TDServeWeightSyncScheme(address, sync=False), Policy(1.0))
        receiver = follow(TDServeWeightSyncScheme(address, timeout_s=2.0), follower := Policy())
    wait_for(lambda: receiver.last_error, "an error")
    assert receiver.age_s < float("inf")
    with tdserve.Server(root, port=int(address.rpartition(":")[2]), grace_s=1.0):
        sender.send(Policy(2.0))
        wait_for(lambda: receiver.version == 2, "the version")
        assert follower.find_numbers() == {2.0}
        assert receiver.last_error == ""
        receiver.shutdown()
        sender.shutdown()


def test_send_when_the_weights_were_deleted_then_it_returns_when_the_worker_has_the_new_ones(
    make_scheme: MakeScheme, server: tdserve.Server
) -> None:
    policy, followed = Policy(1.0), Policy()
    sender = publish(make_scheme(), policy, num_workers=1)
    receiver = follow(make_scheme(), followed, 0)
    for number in (2.0, 3.0):
        sender.send(policy.fill(number))
    with server.client() as client:
        client.delete(sender.name)
    for number in (4.0, 5.0):
        sender.send(policy.fill(number))
        assert followed.find_numbers() == {number}
        assert receiver.version == sender.version == int(number)
