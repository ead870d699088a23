from __future__ import annotations

import numpy as np
import pytest

from tdserve.examples.demo.rollout import Observations, Rollout, StepJoiner, Transition, to_transition_rows

GAMMA = 0.5


def observation(value: float) -> Observations:
    return np.full(1, value, np.float32)


def drive(num_steps: int, num_joined: int, *, terminated: bool = False, done: bool = False) -> list[Transition]:
    """Makes steps 0, 1, 2... whose action and reward are their number; the last one may end the episode."""
    window = StepJoiner(num_joined, GAMMA)
    rows = []
    for step in range(num_steps):
        is_last = step == num_steps - 1
        rows += window.step(
            observation(step), step, float(step), after=observation(step + 1),
            terminated=terminated and is_last, done=(done or terminated) and is_last,
        )  # fmt: skip
    return rows


def facts(row: Transition) -> tuple[float, int, float, float, float]:
    return float(row.observation[0]), row.action, float(row.next_observation[0]), row.reward, row.discount


def test_steps_within_an_episode_are_joined_once_there_are_enough() -> None:
    assert [facts(row) for row in drive(4, 3)] == [
        (0, 0, 3, 0 + 1 * 0.5 + 2 * 0.25, 0.125),
        (1, 1, 4, 1 + 2 * 0.5 + 3 * 0.25, 0.125),
    ]


def test_a_terminated_episode_leaves_no_step_behind_and_bootstraps_nothing() -> None:
    assert [facts(row) for row in drive(2, 3, terminated=True)] == [(0, 0, 2, 0.5, 0.0), (1, 1, 2, 1.0, 0.0)]


def test_an_episode_that_was_cut_short_bootstraps_from_its_last_observation() -> None:
    assert [facts(row) for row in drive(2, 3, done=True)] == [(0, 0, 2, 0.5, 0.25), (1, 1, 2, 1.0, 0.5)]


def test_an_episodes_steps_are_not_joined_with_the_next_ones() -> None:
    window = StepJoiner(2, GAMMA)
    window.step(observation(0), 0, 1.0, after=observation(1), terminated=True, done=True)
    assert window.step(observation(5), 0, 1.0, after=observation(6), terminated=False, done=False) == []


def rollout(seed: int = 0, num_envs: int = 2) -> Rollout:
    return Rollout("CartPole-v1", num_envs, np.random.default_rng(seed))


def test_collect_yields_every_step_once() -> None:
    transitions, returns = rollout().collect(200, lambda seen: np.ones(len(seen), np.int64), epsilon=0.0)
    # steps that are still in the two windows have not been joined yet
    assert 2 * 200 - 2 * 2 <= len(transitions) <= 2 * 200
    assert returns
    assert sum(returns) <= 2 * 200


def test_collect_with_a_constant_policy_ends_episodes_early_and_terminated() -> None:
    transitions, returns = rollout().collect(50, lambda seen: np.zeros(len(seen), np.int64), epsilon=0.0)
    assert all(8 <= episode_return <= 11 for episode_return in returns)
    assert any(transition.discount == 0.0 for transition in transitions)
    assert {transition.action for transition in transitions} == {0}


def test_collect_explores_when_asked() -> None:
    transitions, _ = rollout().collect(50, lambda seen: np.zeros(len(seen), np.int64), epsilon=1.0)
    assert {transition.action for transition in transitions} == {0, 1}


@pytest.mark.parametrize(("seeds", "is_equal"), [((3, 3), True), ((3, 4), False)])
def test_a_seed_fixes_what_is_collected(seeds: tuple[int, int], is_equal: bool) -> None:
    first, second = (
        rollout(seed).collect(30, lambda seen: np.zeros(len(seen), np.int64), epsilon=0.5)[0] for seed in seeds
    )
    same = [facts(row) for row in first] == [facts(row) for row in second]
    assert same is is_equal


def test_rows_keep_their_observation_when_the_environment_goes_on() -> None:
    transitions, _ = rollout(num_envs=1).collect(6, lambda seen: np.arange(len(seen)) % 2, epsilon=0.0)
    observations = [tuple(row.observation) for row in transitions]
    assert len(set(observations)) == len(observations)
    # with three joined steps, row k leads to where row k + 3 begins
    assert tuple(transitions[0].next_observation) == observations[3]


def test_to_transition_rows_makes_one_row_per_transition() -> None:
    rows = to_transition_rows(drive(4, 3), policy_version=7)
    assert rows.batch_size == (2,)
    assert rows["policy_version"].tolist() == [7, 7]
    assert rows["next", "observation"].tolist() == [[3.0], [4.0]]
    assert rows["next", "discount"].tolist() == [0.125, 0.125]
