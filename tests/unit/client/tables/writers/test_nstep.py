from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tdserve.base.errors import InvalidRequestError
from tdserve.client.tables.writers.nstep import NStep
from tdserve.structure.captures.capture import capture
from tdserve.structure.captures.rows import RowReader

Trajectory = list[tuple[float, bool]]
"""Reward and done of each step."""


def flat(number: int, reward: float, done: bool = False, more: dict[str, Any] | None = None) -> TensorDict:
    """A row as small loops make them: reward and done at the root."""
    following = {"observation": torch.tensor([number + 1.0])}
    return TensorDict(
        {
            "observation": torch.tensor([float(number)]),
            "reward": torch.tensor(reward, dtype=torch.float64),
            "done": torch.tensor(done),
            "next": following,
            **(more or {}),
        }
    )


def nested(number: int, reward: float, done: bool = False, truncated: bool = False) -> TensorDict:
    """A row as torchrl's collectors make them."""
    following = {
        "observation": torch.tensor([number + 1.0]),
        "reward": torch.tensor([reward]),
        "done": torch.tensor([done or truncated]),
        "terminated": torch.tensor([done]),
        "truncated": torch.tensor([truncated]),
    }
    td = {"observation": torch.tensor([float(number)]), "done": torch.tensor([False]), "next": following}
    return TensorDict(td)


def turned(setting: NStep, rows: list[TensorDict], *, end: bool = True) -> list[TensorDict]:
    """The rows that come out, in order; also checks that they are complete as soon as they can be, and not before."""
    spec = capture(rows[0]).spec
    window = setting.make_window(spec)
    reader = RowReader(spec, store="s")
    rows = [row.clone() for row in rows]
    num_complete = 0
    for number, row in enumerate(rows):
        before = window.num_open
        leaves, values = reader.read(row)
        more, has_ended = window.push(leaves, list(values))
        assert more == (before + 1 if has_ended else int(before + 1 == setting.n))
        assert window.num_open < setting.n
        num_complete += more
        assert num_complete == number + 1 - window.num_open
    if end:
        assert window.end() == len(rows) - num_complete
        num_complete = len(rows)
    return rows[:num_complete]


def brute_force(n: int, gamma: float, steps: Trajectory) -> list[tuple[float, int]]:
    """Reward and horizon of each row, by the definition."""
    found = []
    for start in range(len(steps)):
        total, horizon = 0.0, 0
        while horizon < n and start + horizon < len(steps):
            total += gamma**horizon * steps[start + horizon][0]
            horizon += 1
            if steps[start + horizon - 1][1]:
                break
        found.append((total, horizon))
    return found


def random_steps(seed: int, num_steps: int = 60) -> Trajectory:
    """Several trajectories behind one another, some of them a single step long."""
    rng = np.random.default_rng(seed)
    return [(float(rng.standard_normal()), bool(rng.random() < 0.2)) for _ in range(num_steps)]


@pytest.mark.parametrize("n", [1, 2, 3, 5, 100])
@pytest.mark.parametrize("gamma", [0.0, 0.9, 0.997, 1.0])
def test_window_when_trajectories_are_random_then_exactly_as_defined(n: int, gamma: float) -> None:
    for seed in range(3):
        steps = random_steps(seed)
        rows = turned(NStep(n, gamma), [flat(number, *step) for number, step in enumerate(steps)])
        for number, (row, (total, horizon)) in enumerate(zip(rows, brute_force(n, gamma, steps), strict=True)):
            assert row["reward"].item() == total
            assert row["next", "observation"].item() == number + horizon
            assert row["done"].item() == steps[number + horizon - 1][1]
            assert row["observation"].item() == number


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_window_when_rewards_are_narrow_then_summed_in_float64_and_rounded_once(dtype: torch.dtype) -> None:
    steps = [(float(torch.tensor(reward).to(dtype)), done) for reward, done in random_steps(7)]
    rows = [flat(number, *step) for number, step in enumerate(steps)]
    for row in rows:
        row["reward"] = row["reward"].to(dtype)
    for row, (total, _) in zip(turned(NStep(4, 0.99), rows), brute_force(4, 0.99, steps), strict=True):
        assert row["reward"].dtype == dtype
        assert row["reward"].item() == torch.tensor(total, dtype=torch.float64).to(dtype).item()


def test_window_when_a_sum_exceeds_its_type_then_infinite() -> None:
    rows = [flat(number, 60_000.0) for number in range(2)]
    for row in rows:
        row["reward"] = row["reward"].half()
    assert turned(NStep(2, 1.0), rows)[0]["reward"].item() == float("inf")


def test_window_when_rewards_have_a_shape_then_each_element_is_summed() -> None:
    rows = [flat(number, 0.0).set("reward", torch.tensor([[1.0, number], [2.0, -number]])) for number in range(4)]
    found = turned(NStep(2, 0.5), rows)
    assert found[1]["reward"].tolist() == [[1.5, 1 + 0.5 * 2], [3.0, -1 - 0.5 * 2]]
    assert found[3]["reward"].tolist() == [[1.0, 3.0], [2.0, -3.0]]


def test_window_when_flags_lie_under_next_then_those_of_the_last_step_and_the_roots_stay() -> None:
    rows = [nested(number, 1.0, done=number == 2) for number in range(3)]
    rows += [nested(3, 1.0), nested(4, 1.0, truncated=True), nested(5, 1.0)]
    found = turned(NStep(3, 0.5), rows)
    assert [row["next", "reward"].item() for row in found] == [1.75, 1.5, 1.0, 1.5, 1.0, 1.0]
    assert [row["next", "terminated"].item() for row in found] == [True] * 3 + [False] * 3
    assert [row["next", "truncated"].item() for row in found] == [False] * 3 + [True] * 2 + [False]
    assert [row["next", "done"].item() for row in found] == [True] * 5 + [False]
    assert [row["next", "observation"].item() for row in found] == [3, 3, 3, 5, 5, 6]
    assert not any(row["done"].item() for row in found)


@pytest.mark.parametrize("flag", ["terminated", "truncated"])
def test_window_when_one_flag_of_several_is_set_then_the_trajectory_ends(flag: str) -> None:
    rows = [flat(number, 1.0, more={flag: torch.tensor(number == 1)}) for number in range(4)]
    found = turned(NStep(3, 1.0), rows)
    assert [row["reward"].item() for row in found] == [2, 1, 2, 1]
    assert [row[flag].item() for row in found] == [True, True, False, False]


def test_window_when_open_then_the_last_rows_are_held_back() -> None:
    rows = [flat(number, 1.0) for number in range(5)]
    assert len(turned(NStep(3, 1.0), rows, end=False)) == 3
    assert [row["reward"].item() for row in turned(NStep(3, 1.0), rows)] == [3, 3, 3, 2, 1]


def test_window_when_ended_then_the_next_trajectory_is_another() -> None:
    spec = capture(flat(0, 0.0)).spec
    window, reader = NStep(3, 1.0).make_window(spec), RowReader(spec, store="s")
    rows = [flat(number, 1.0) for number in range(4)]
    for row in rows[:2]:
        window.push(reader.read(row)[0], [])
    assert window.end() == 2
    assert window.end() == 0
    for row in rows[2:]:
        window.push(reader.read(row)[0], [])
    assert window.end() == 2
    assert [row["reward"].item() for row in rows] == [2, 1, 2, 1]
    assert [row["next", "observation"].item() for row in rows] == [2, 2, 4, 4]


def test_window_when_n_is_one_then_rows_stay_as_they_are() -> None:
    rows = [nested(number, 0.1 * number, done=number == 1) for number in range(4)]
    assert all((new == old).all() for new, old in zip(turned(NStep(1, 0.5), rows, end=False), rows, strict=True))


def test_window_when_rows_have_the_extra_keys_then_written() -> None:
    extra = {
        "steps_to_next_obs": torch.tensor([0]),
        "gamma": torch.tensor([0.0]),
        "original_reward": torch.tensor(0.0, dtype=torch.float64),
    }
    rows = [
        flat(number, float(number), more={key: value.clone() for key, value in extra.items()}) for number in range(4)
    ]
    found = turned(NStep(3, 0.5), rows)
    assert [row["steps_to_next_obs"].item() for row in found] == [3, 3, 2, 1]
    assert [row["gamma"].item() for row in found] == [0.125, 0.125, 0.25, 0.5]
    assert [row["original_reward"].item() for row in found] == [0, 1, 2, 3]
    assert [row["reward"].item() for row in found] == [1.0, 2.75, 3.5, 3.0]


def test_window_when_extra_keys_are_something_else_then_left_alone() -> None:
    rows = [flat(number, 1.0, more={"gamma": "mine", "original_reward": torch.tensor(7)}) for number in range(3)]
    spec = capture(rows[0]).spec
    window, reader = NStep(2, 0.5).make_window(spec), RowReader(spec, store="s")
    for row in rows:
        leaves, values = reader.read(row)
        window.push(leaves, list(values))
    assert [row["original_reward"].item() for row in rows] == [7] * 3


def test_window_when_values_lie_under_next_then_they_move_too() -> None:
    spec = capture(flat(0, 1.0, more={"note": "x", "next": {"observation": torch.ones(1), "note": "x"}})).spec
    window, reader = NStep(2, 0.5).make_window(spec), RowReader(spec, store="s")
    assert [path for path, _ in spec.values] == [("next", "note"), ("note",)]
    kept = []
    for number in range(3):
        following = {"observation": torch.ones(1), "note": f"next {number}"}
        td = flat(number, 1.0, more={"note": f"here {number}", "next": following})
        leaves, values = reader.read(td)
        kept.append(list(values))
        window.push(leaves, kept[-1])
    assert kept == [["next 1", "here 0"], ["next 2", "here 1"], ["next 2", "here 2"]]


def test_window_when_keys_are_given_then_those() -> None:
    def row(number: int) -> TensorDict:
        agent = {"payoff": torch.tensor(float(number)), "over": torch.tensor(number == 2), "done": torch.tensor(True)}
        return TensorDict({"agent": agent, "after": torch.tensor(number), "done": torch.tensor(True)})

    setting = NStep(2, 1.0, reward_key=("agent", "payoff"), done_key=("agent", "over"), next_key="after")
    found = turned(setting, [row(number) for number in range(5)])
    assert [each["agent", "payoff"].item() for each in found] == [1, 3, 2, 7, 4]
    assert [each["agent", "over"].item() for each in found] == [False, True, True, False, False]
    assert [each["after"].item() for each in found] == [1, 2, 2, 4, 4]


def test_window_when_rows_have_no_flags_then_only_end_ends() -> None:
    rows = [flat(number, 1.0).exclude("done") for number in range(4)]
    assert [row["reward"].item() for row in turned(NStep(2, 1.0), rows)] == [2, 2, 2, 1]


@pytest.mark.parametrize(
    "arguments", [(0, 0.9), (1.5, 0.9), (True, 0.9), (3, -0.1), (3, 1.1), (3, float("nan")), (3, "x")]
)
def test_nstep_when_numbers_are_out_of_range_then_error(arguments: Any) -> None:
    with pytest.raises(InvalidRequestError):
        NStep(*arguments)


@pytest.mark.parametrize(
    ("setting", "changes", "hint"),
    [
        (NStep(2, 0.9), {"reward": None}, "reward_key"),
        (NStep(2, 0.9), {"reward": torch.tensor(1)}, "int64"),
        (NStep(2, 0.9), {"next": None}, "next_key"),
        (NStep(2, 0.9), {"done": torch.zeros(2)}, "2 elements"),
        (NStep(2, 0.9, reward_key="payoff"), {}, "payoff"),
        (NStep(2, 0.9, done_key=("next", "done")), {}, "('next', 'done')"),
        (NStep(2, 0.9, next_key="after"), {}, "after"),
        (NStep(2, 0.9, next_key=()), {}, "not a key"),
        (NStep(2, 0.9, reward_key=("a", 1)), {}, "not a key"),  # type: ignore[arg-type]
    ],
)
def test_window_when_rows_lack_what_it_needs_then_the_error_names_the_argument_that_helps(
    setting: NStep, changes: dict[str, Any], hint: str
) -> None:
    td = flat(0, 1.0)
    for key, value in changes.items():
        td = td.exclude(key) if value is None else td.set(key, value)
    with pytest.raises(InvalidRequestError) as raised:
        setting.make_window(capture(td).spec)
    assert hint in str(raised.value)
