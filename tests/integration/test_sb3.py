from __future__ import annotations

import gc
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch

gym = pytest.importorskip("gymnasium")
pytest.importorskip("stable_baselines3")

from gymnasium import spaces  # noqa: E402
from stable_baselines3 import DQN  # noqa: E402
from stable_baselines3.common.buffers import DictReplayBuffer, ReplayBuffer  # noqa: E402

import tdserve  # noqa: E402
from tdserve.client.session.finalizing import wait_for_all  # noqa: E402
from tdserve.sb3 import TDServeReplayBuffer  # noqa: E402
from tests.processes import wait_for  # noqa: E402

pytestmark = pytest.mark.integration

VECTOR = spaces.Box(-1.0, 1.0, (3,), np.float32)
SPACES: dict[str, spaces.Space[Any]] = {
    "vector": VECTOR,
    "image": spaces.Box(0, 255, (2, 4, 4), np.uint8),
    "number": spaces.Discrete(5),
    "dict": spaces.Dict({"pixels": spaces.Box(0, 255, (4,), np.uint8), "speed": VECTOR}),
}
ACTIONS: dict[str, spaces.Space[Any]] = {
    "discrete": spaces.Discrete(4),
    "float64": spaces.Box(-1.0, 1.0, (2,), np.float64),
}
NUM_ENVS = 3

_NUMBERS = count()


@pytest.fixture(params=["shm", "gloo"])
def options(server: tdserve.Server, request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"address": server.address, "transport": request.param, "name": f"sb3 {next(_NUMBERS)}"}


def observe(space: spaces.Space[Any], number: int) -> Any:
    """Makes an observation of every environment that shows the number of the step."""
    if isinstance(space, spaces.Dict):
        return {key: observe(each, number) for key, each in space.items()}
    if isinstance(space, spaces.Discrete):
        return np.full(NUM_ENVS, number, np.int64)
    assert isinstance(space, spaces.Box)
    return np.full((NUM_ENVS, *space.shape), number, space.dtype)


def step(observation: spaces.Space[Any], action: spaces.Space[Any], number: int) -> tuple[Any, ...]:
    """Makes a step: all of it shows its number; the second environment ends, the third runs out of time."""
    chosen = np.stack([np.asarray(action.sample()) for _ in range(NUM_ENVS)])
    infos = [{}, {}, {"TimeLimit.truncated": True}]
    done = np.array([False, True, True])
    seen, then = observe(observation, number), observe(observation, number + 1)
    return seen, then, chosen, np.full(NUM_ENVS, number, np.float64), done, infos


@pytest.mark.slow
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("observation", SPACES)
def test_sample_when_steps_were_added_then_as_their_own_buffer_gives_it(
    options: dict[str, Any], observation: str, action: str
) -> None:
    spaces_of: tuple[Any, Any] = (SPACES[observation], ACTIONS[action])
    theirs = (DictReplayBuffer if observation == "dict" else ReplayBuffer)(12, *spaces_of, n_envs=NUM_ENVS)
    ours = TDServeReplayBuffer(12, *spaces_of, n_envs=NUM_ENVS, **options)
    for number in range(3):
        for buffer in (theirs, ours):
            buffer.add(*step(*spaces_of, number))
    expected, found = theirs.sample(600), ours.sample(600)  # so many that the share of any environment is sure
    assert type(found) is type(expected)
    assert (ours.size(), ours.pos, ours.full) == (theirs.size(), theirs.pos, theirs.full) == (3, 3, False)
    for mine, other in zip(_list_tensors(found), _list_tensors(expected), strict=True):
        assert (mine.shape, mine.dtype, mine.device) == (other.shape, other.dtype, other.device)
    assert set(found.rewards.flatten().tolist()) == {0.0, 1.0, 2.0}
    assert 0.2 < found.dones.mean() < 0.5, "one of three environments ended, another ran out of time"
    before, after = (_list_tensors((each,))[-1].flatten(1).float() for each in (found[0], found[2]))
    assert torch.equal(before[:, 0], found.rewards.flatten()), "the parts of a row belong together"
    assert torch.equal(after[:, 0], before[:, 0] + 1)
    ours.close()


def _list_tensors(samples: Any) -> list[torch.Tensor]:
    parts = [list(part.values()) if isinstance(part, dict) else [part] for part in samples if part is not None]
    return [tensor for part in parts for tensor in part]


def test_add_when_full_then_the_oldest_rows_go(options: dict[str, Any]) -> None:
    buffer = TDServeReplayBuffer(4 * NUM_ENVS, VECTOR, ACTIONS["discrete"], n_envs=NUM_ENVS, **options)
    for number in range(6):
        buffer.add(*step(VECTOR, ACTIONS["discrete"], number))
    assert (buffer.size(), buffer.full, buffer.pos) == (4, True, 2)
    assert set(buffer.sample(256).rewards.flatten().tolist()) == {2.0, 3.0, 4.0, 5.0}
    buffer.reset()
    assert (buffer.size(), buffer.full) == (0, False)
    buffer.close()


@pytest.mark.slow
@pytest.mark.parametrize("observation", ["vector", "dict"])
def test_sample_when_some_rows_are_not_sent_then_all_are_drawn_as_often(
    options: dict[str, Any], observation: str
) -> None:
    spaces_of: tuple[Any, Any] = (SPACES[observation], ACTIONS["discrete"])
    buffer = TDServeReplayBuffer(10_000, *spaces_of, n_envs=NUM_ENVS, **options)
    num_drawn = [0] * 20
    for number in range(20):
        buffer.add(*step(*spaces_of, number))
        found = buffer.sample(1)
        assert found.rewards.item() in range(number + 1)
    for _ in range(200):
        found = buffer.sample(50)
        before, after = (_list_tensors((each,))[-1].flatten(1).float() for each in (found[0], found[2]))
        assert torch.equal(before[:, 0], found.rewards.flatten()), "the parts of a row belong together"
        assert torch.equal(after[:, 0], before[:, 0] + 1)
        for number in found.rewards.flatten().int().tolist():
            num_drawn[number] += 1
        if not num_drawn[0] % 50:
            buffer.add(*step(*spaces_of, 0))  # some always wait
    assert min(num_drawn[1:]) > 0.6 * sum(num_drawn[1:]) / 19
    assert buffer.size() >= 20
    buffer.close()


def test_make_when_processes_have_other_numbers_of_environments_then_one_table(options: dict[str, Any]) -> None:
    few, many = (TDServeReplayBuffer(1000, VECTOR, ACTIONS["discrete"], n_envs=n, **options) for n in (1, NUM_ENVS))
    many.add(*step(VECTOR, ACTIONS["discrete"], 4))
    assert many.size() == 1
    assert few.size() == NUM_ENVS
    few.close()
    many.close()


def test_rows_when_two_buffers_have_one_name_then_shared_and_kept_by_a_pickle(options: dict[str, Any]) -> None:
    first, second = (TDServeReplayBuffer(30, VECTOR, ACTIONS["discrete"], n_envs=NUM_ENVS, **options) for _ in range(2))
    first.add(*step(VECTOR, ACTIONS["discrete"], 1))
    assert first.size() == second.size() == 1
    second.add(*step(VECTOR, ACTIONS["discrete"], 2))
    copy = pickle.loads(pickle.dumps(second))
    assert set(copy.sample(64).rewards.flatten().tolist()) == {1.0, 2.0}
    for buffer in (first, second, copy):
        buffer.close()


def test_make_when_memory_is_to_be_saved_then_refused_and_nothing_created(options: dict[str, Any]) -> None:
    with pytest.raises(tdserve.NotSupportedError, match="optimize_memory_usage"):
        TDServeReplayBuffer(30, VECTOR, ACTIONS["discrete"], optimize_memory_usage=True, **options)
    with tdserve.connect(options["address"]) as client:
        assert options["name"] not in client


@pytest.mark.slow
def test_learn_when_dqn_has_the_buffer_then_learns_from_its_rows(options: dict[str, Any]) -> None:
    model = DQN(
        "MlpPolicy",
        "CartPole-v1",
        learning_starts=50,
        replay_buffer_class=TDServeReplayBuffer,
        replay_buffer_kwargs=options,
        buffer_size=1000,
        seed=1,
    )
    before = [weight.clone() for weight in model.policy.parameters()]
    model.learn(200)
    assert model.replay_buffer is not None
    assert model.replay_buffer.size() == 200
    assert any(not torch.equal(*pair) for pair in zip(before, model.policy.parameters(), strict=True))
    model.replay_buffer.close()  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize("end", ["dropped", "process"])
def test_buffer_when_it_ends_without_a_flush_then_its_last_steps_are_stored(
    options: dict[str, Any], server: tdserve.Server, end: str
) -> None:
    program = f"""
import numpy as np
from gymnasium import spaces
from tdserve.sb3 import TDServeReplayBuffer

box, zeros = spaces.Box(-1.0, 1.0, (3,), np.float32), np.zeros((1, 3), np.float32)
buffer = TDServeReplayBuffer(100, box, box, **{options!r})
for _ in range(19):
    buffer.add(zeros, zeros, zeros, np.zeros(1), np.zeros(1), [{{}}])
"""
    if end == "process":
        subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    else:
        exec(program, {})
        gc.collect()
    with server.client() as client:
        wait_for(lambda: len(client.replay(options["name"])) == 19, "the last steps")


def test_sample_when_there_are_no_rows_then_an_error_at_once(options: dict[str, Any]) -> None:
    buffer = TDServeReplayBuffer(100, VECTOR, VECTOR, **options)
    with pytest.raises(tdserve.WrongStateError, match="has no rows"):
        buffer.sample(1)
    buffer.close()


def refuses_a_sample(buffer: TDServeReplayBuffer) -> bool:
    try:
        buffer.sample(8)
    except tdserve.WrongStateError as error:
        return "has no rows" in str(error)
    return False


def test_sample_when_others_have_removed_all_rows_then_an_error_or_the_rows_that_wait(options: dict[str, Any]) -> None:
    buffer, other = (TDServeReplayBuffer(400, VECTOR, VECTOR, n_envs=NUM_ENVS, **options) for _ in range(2))
    buffer.add(*step(VECTOR, VECTOR, 0))
    buffer.flush()
    buffer.sample(8)
    other.reset()
    buffer.add(*step(VECTOR, VECTOR, 1))
    assert buffer.sample(8).observations.eq(1).all()
    buffer.flush()
    buffer.sample(8)
    other.reset()
    wait_for(lambda: refuses_a_sample(buffer), "the end of what was drawn ahead")
    assert refuses_a_sample(buffer)
    buffer.add(*step(VECTOR, VECTOR, 2))
    assert buffer.sample(8).observations.eq(2).all()
    assert buffer.sample(0).observations.shape == (0, 3)
    other.close()
    buffer.close()


def test_add_when_an_array_is_transposed_then_refused_as_by_their_own_buffer(options: dict[str, Any]) -> None:
    buffer = TDServeReplayBuffer(100, VECTOR, VECTOR, n_envs=NUM_ENVS + 1, **options)
    zeros = np.zeros(NUM_ENVS + 1)
    wrong, right = np.zeros((3, NUM_ENVS + 1)), np.zeros((NUM_ENVS + 1, 3))
    with pytest.raises(ValueError, match="broadcast"):
        buffer.add(wrong, wrong, right, zeros, zeros, [{}] * (NUM_ENVS + 1))
    buffer.add(right, right, right, np.array(1.0), np.array(True), [{}] * (NUM_ENVS + 1))
    assert buffer.size() == 1
    assert buffer.sample(5).rewards.eq(1).all()
    buffer.close()


def test_buffers_when_they_are_dropped_then_their_connections_end(options: dict[str, Any]) -> None:
    def count_threads() -> int:
        gc.collect()
        return sum(thread.name.startswith("tdserve") for thread in threading.enumerate())

    before = count_threads()
    for _ in range(4):
        TDServeReplayBuffer(100, VECTOR, VECTOR, **options).reset()
    wait_for(lambda: count_threads() <= before, "the end of the connections")


def test_add_when_the_buffer_was_closed_then_an_error_at_once_and_nothing_is_stored(
    options: dict[str, Any], server: tdserve.Server
) -> None:
    buffer = TDServeReplayBuffer(100, VECTOR, ACTIONS["discrete"], n_envs=NUM_ENVS, **options)
    buffer.add(*step(VECTOR, ACTIONS["discrete"], 0))
    buffer.close()
    buffer.close()
    with pytest.raises(tdserve.ClosedError, match=f"the buffer on table '{options['name']}' is closed"):
        buffer.add(*step(VECTOR, ACTIONS["discrete"], 1))
    buffer.close()
    with server.client() as client:
        assert len(client.replay(options["name"])) == NUM_ENVS


def drop(held: list[TDServeReplayBuffer]) -> None:
    """Drops a buffer with nothing to store: no thread begins."""
    held.clear()
    gc.collect()
    assert threading.active_count() == 1


def add_and_drop(held: list[TDServeReplayBuffer]) -> None:
    held[0].add(*step(VECTOR, VECTOR, 7))
    held.clear()
    gc.collect()
    assert wait_for_all(20.0)


def add_and_flush(held: list[TDServeReplayBuffer]) -> None:
    held[0].add(*step(VECTOR, VECTOR, 7))
    held[0].flush(20.0)


@pytest.mark.parametrize("act", [drop, add_and_drop, add_and_flush])
def test_steps_when_a_forked_child_has_the_buffer_too_then_each_is_stored_once(
    options: dict[str, Any], act: Callable[[list[TDServeReplayBuffer]], None]
) -> None:
    held = [TDServeReplayBuffer(400, VECTOR, VECTOR, n_envs=NUM_ENVS, **options)]
    held[0].add(*step(VECTOR, VECTOR, 0))
    pid = os.fork()
    if not pid:
        try:
            act(held)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    is_added = act in (add_and_drop, add_and_flush)
    assert held[0].size() == 1 + is_added
    held[0].close()


def test_reset_when_rows_were_drawn_ahead_then_they_are_not_sampled_any_more(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tdserve.sb3.MAX_WAITING_S", 60.0)
    buffer, other = (TDServeReplayBuffer(400, VECTOR, VECTOR, n_envs=NUM_ENVS, **options) for _ in range(2))
    buffer.add(*step(VECTOR, VECTOR, 0))
    buffer.flush()
    for _ in range(3):  # the third draws for one more
        buffer.sample(1)
    buffer.reset()
    other.add(*step(VECTOR, VECTOR, 1))
    other.flush()
    assert buffer.sample(1).observations.eq(1).all()
    other.close()
    buffer.close()
