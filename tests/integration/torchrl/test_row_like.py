"""Tables that know the structure of their rows before any come: from environments, collectors and specs."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

import tdserve

pytest.importorskip("torchrl")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it deprecates its own classes when it is imported
    from torchrl.collectors import Collector
    from torchrl.data import Composite, TensorDictReplayBuffer, Unbounded
    from torchrl.envs import SerialEnv

from tdserve.torchrl import TDServeStorage
from tests.torchrl_environment import TellingEnvironment

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


@pytest.fixture
def policy() -> TensorDictModule:
    """One that writes more than the action."""
    module = torch.nn.Linear(1, 2)
    return TensorDictModule(
        lambda observation: module(observation).split(1, -1), in_keys=["observation"], out_keys=["action", "score"]
    )


def structure_of(row: Any) -> dict[Any, tuple[tuple[int, ...], torch.dtype]]:
    return {key: (tuple(leaf.shape), leaf.dtype) for key, leaf in row.items(True, True)}


@pytest.mark.parametrize("num_environments", [1, 3])
def test_row_like_when_of_an_environment_then_what_a_rollout_has_and_no_step_is_made(
    policy: TensorDictModule, num_environments: int
) -> None:
    environment = SerialEnv(num_environments, TellingEnvironment) if num_environments > 1 else TellingEnvironment()
    row = tdserve.Client.row_like(environment, policy)
    rollout = environment.rollout(2, policy, break_when_any_done=False)
    assert row.batch_size == ()
    assert structure_of(row) == structure_of(rollout.reshape(-1)[0])
    assert "score" not in tdserve.Client.row_like(environment)


def test_storage_when_a_collector_is_given_as_like_then_the_rows_of_its_random_phase_and_later_ones_are_stored(
    server: tdserve.Server, policy: TensorDictModule
) -> None:
    collector = Collector(TellingEnvironment, policy, frames_per_batch=8, total_frames=16)
    storage = TDServeStorage(100, address=server.address, name="told", like=collector)
    buffer = TensorDictReplayBuffer(storage=storage, batch_size=16)
    first, second = (rows.clone() for rows in collector)
    assert structure_of(tdserve.Client.row_like(collector)) == structure_of(second[0])
    buffer.extend(first.exclude("score"))  # as where the policy has not been asked yet
    assert not buffer.sample()["score"].any()
    buffer.extend(second)
    assert (buffer[8:]["score"] == second["score"]).all()
    collector.shutdown()


def test_row_like_when_a_collector_has_environments_elsewhere_then_one_is_made_to_look_at(
    policy: TensorDictModule,
) -> None:
    class Elsewhere:
        create_env_fn = (TellingEnvironment, TellingEnvironment)
        track_traj_ids = False

    elsewhere: Any = Elsewhere()
    elsewhere.policy = policy
    expected = structure_of(tdserve.Client.row_like(TellingEnvironment(), policy))
    assert structure_of(tdserve.Client.row_like(elsewhere)) == expected


def test_row_like_when_of_a_spec_then_its_zeros() -> None:
    spec = Composite(
        a=Unbounded((5, 3)), nested=Composite(b=Unbounded((5,), dtype=torch.int64), shape=(5,)), shape=(5,)
    )
    expected = TensorDict({"a": torch.zeros(3), "nested": {"b": torch.tensor(0)}}, [])
    assert structure_of(tdserve.Client.row_like(spec)) == structure_of(expected)


def test_row_like_when_of_a_rollout_then_its_first_row() -> None:
    rollout = SerialEnv(2, TellingEnvironment).rollout(3, break_when_any_done=False)
    row = tdserve.Client.row_like(rollout)
    assert row.batch_size == ()
    assert (row == rollout[0, 0]).all()
    assert (tdserve.Client.row_like(row) == row).all()


def test_storage_when_a_row_of_like_is_a_batch_itself_then_rows_are_batches(server: tdserve.Server) -> None:
    rollout = TellingEnvironment().rollout(3, break_when_any_done=False)
    storage = TDServeStorage(10, address=server.address, name="batches", like=rollout)
    buffer = TensorDictReplayBuffer(storage=storage, batch_size=2)
    buffer.extend(torch.stack([rollout, rollout]))
    assert buffer.sample().batch_size == (2, 3)
    with pytest.raises(tdserve.SpecMismatchError, match=r"\.flatten\(0, 1\)"):
        buffer.extend(torch.stack([rollout, rollout])[None])


def test_extend_when_rows_are_in_several_dimensions_then_the_remedy_is_one_of_torchrl(server: tdserve.Server) -> None:
    environment = SerialEnv(2, TellingEnvironment)
    storage = TDServeStorage(100, address=server.address, name="flat", like=environment)
    buffer = TensorDictReplayBuffer(storage=storage, batch_size=2)
    rollout = environment.rollout(5, break_when_any_done=False)
    with pytest.raises(tdserve.SpecMismatchError, match=r"\[2, 5\] \(\.reshape\(-1\) makes") as caught:
        buffer.extend(rollout)
    assert "flatten=" not in str(caught.value)
    assert not len(buffer)
    assert len(buffer.extend(rollout.reshape(-1))) == 10


def test_row_like_when_of_an_environment_of_gymnasium_then_refused_with_what_wraps_it() -> None:
    class Space:
        """Has what those of Gymnasium have."""

        action_space = observation_space = None

    class Wrapper(Space):
        env = Space()

    for source in (Space(), Wrapper()):
        with pytest.raises(tdserve.InvalidRequestError, match=r"torchrl\.envs\.GymWrapper"):
            tdserve.Client.row_like(source)


def test_row_like_when_of_something_else_then_refused_by_its_name() -> None:
    with pytest.raises(tdserve.InvalidRequestError, match="int is no environment"):
        tdserve.Client.row_like(3)
