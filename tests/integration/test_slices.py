"""Slices of trajectories are consecutive steps of one writer, however the rows of several writers lie in the ring."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import tdserve
from tests import chi_square

pytestmark = pytest.mark.integration

NUM_WRITERS = 4
EPISODE = 100
"""Steps are numbered from 100 * episode on, so that steps of two episodes are never consecutive."""

Row = tuple[int, int]
"""Writer and step."""


def rows(*which: Row, is_end: bool = False) -> TensorDict:
    """Returns steps of writers; the last one may end its trajectory."""
    writer, step = torch.tensor(which, dtype=torch.int64).reshape(-1, 2).unbind(1)
    done = torch.zeros(len(which), 1, dtype=torch.bool)
    done[-1:] = is_end
    following = {"obs": step[:, None] + 1.0, "done": done, "truncated": torch.zeros_like(done)}
    episode = writer * 1000 + step // EPISODE
    return TensorDict({"writer": writer, "step": step, "episode": episode, "next": following}, [len(which)])


def which_of(td: Any) -> list[Row]:
    """Returns writer and step of each row; fails if a row is torn."""
    assert (td["next", "obs"][:, 0] == td["step"] + 1.0).all()
    return list(zip(td["writer"].tolist(), td["step"].tolist(), strict=True))


def slices_of(batch: Any, length: int) -> list[list[Row]]:
    """Returns the slices of a sample. Fails if one is invalid, or if its end is marked at another row than its last."""
    found = which_of(batch)
    slices = [found[start : start + length] for start in range(0, len(found), length)]
    for each in slices:
        writer, step = each[0]
        assert each == [(writer, step + offset) for offset in range(length)], "not consecutive steps of one writer"
    truncated = batch["next", "truncated"].reshape(-1, length)
    assert truncated[:, -1].all()
    assert not truncated[:, :-1].any()
    return slices


def starts_in(live: set[Row], length: int) -> list[Row]:
    """Searches the places where a slice can begin."""
    return sorted(row for row in live if all((row[0], row[1] + offset) in live for offset in range(length)))


@pytest.fixture
def writers(server: tdserve.Server) -> Iterator[list[tdserve.Client]]:
    """Four clients."""
    clients = [server.client(timeout_s=20.0) for _ in range(NUM_WRITERS)]
    yield clients
    for each in clients:
        each.close()


def write_in_turn(tables: list[Any], num_steps: int, *, by_hand: bool) -> None:
    """Lets every writer add one row at a time. Their episodes have different lengths: 7, 8, 9, 10."""
    steps = [0] * NUM_WRITERS
    for _ in range(num_steps):
        for writer, table in enumerate(tables):
            is_end = steps[writer] % EPISODE == 6 + writer
            more = {"ends": torch.tensor([is_end])} if by_hand else {}
            table.extend(rows((writer, steps[writer]), is_end=is_end), **more)
            steps[writer] += EPISODE - 6 - writer if is_end else 1


KEYS: dict[str, dict[str, Any]] = {
    "ends=": {},
    "end_key": {"end_key": ("next", "done")},
    "ids": {"trajectory_key": "episode"},
}


@pytest.mark.slow
@pytest.mark.parametrize("key", KEYS)
def test_slices_when_four_writers_write_a_row_each_in_turn_then_consecutive_and_equally_likely(
    client: tdserve.Client, writers: list[tdserve.Client], name: str, key: str
) -> None:
    length, capacity = 4, 61
    sampler = tdserve.Slices(slice_len=length, **KEYS[key])
    replay = client.create_replay(name, rows((0, 0))[0], capacity, sampler=sampler)
    write_in_turn([each.replay(name) for each in writers], 40, by_hand=key == "ends=")  # goes round twice and a half
    live = set(which_of(replay[:]))
    assert len(live) == capacity
    possible = starts_in(live, length)
    assert 10 < len(possible) < capacity - 10
    counts: Counter[Row] = Counter()
    for _ in range(20):
        counts.update(each[0] for each in slices_of(replay.sample(1000), length))
    assert set(counts) <= set(possible)
    drawn = np.array([counts[row] for row in possible])
    assert chi_square.statistic(drawn) < chi_square.limit(len(possible))
    assert not replay[:]["next", "truncated"].any(), "the table's own rows are as they were"


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["gloo", "shm"])
@pytest.mark.parametrize("key", KEYS)
def test_slices_when_very_many_rows_come_at_once_then_each_is_of_one_trajectory(
    server: tdserve.Server, name: str, key: str, transport: str
) -> None:
    length, num_rows = 7, 280_000
    step = torch.arange(num_rows)
    done = (step % length == length - 1)[:, None]
    following = {"obs": step[:, None] + 1.0, "done": done, "truncated": torch.zeros_like(done)}
    writer = torch.zeros_like(step)
    many = TensorDict({"writer": writer, "step": step, "episode": step // length, "next": following}, [num_rows])
    sampler = tdserve.Slices(slice_len=length, **KEYS[key])
    with server.client(transport=transport, timeout_s=60.0) as client:
        replay = client.create_replay(name, rows((0, 0))[0], num_rows, sampler=sampler)
        replay.extend(many, ends=done[:, 0] if key == "ends=" else None)
        found = slices_of(replay.sample(700), length)
    assert all(each[0][1] % length == 0 for each in found)


def test_slices_when_one_client_writes_for_many_then_their_numbers_distinguish_them(
    client: tdserve.Client, name: str
) -> None:
    replay = client.create_replay(name, rows((0, 0))[0], 40, sampler=tdserve.Slices(slice_len=3))
    for step in range(0, 20, 2):
        for writer in range(NUM_WRITERS):
            replay.extend(rows((writer, step), (writer, step + 1)), writer=writer)
    assert {each[0] for each in slices_of(replay.sample(3000), 3)} == set(starts_in(set(which_of(replay[:])), 3))


def test_slices_when_rows_are_deleted_then_none_goes_over_the_gap(client: tdserve.Client, name: str) -> None:
    replay = client.create_replay(name, rows((0, 0))[0], 20, sampler=tdserve.Slices(slice_len=3))
    replay.extend(rows(*((0, step) for step in range(20))))
    replay.delete([5, 11])
    replay.extend(rows((0, 20), (0, 21)))  # into the gaps
    live = set(which_of(replay[:]))
    assert {each[0] for each in slices_of(replay.sample(3000), 3)} == set(starts_in(live - {(0, 5), (0, 11)}, 3))


def test_slices_when_a_number_of_them_is_asked_for_then_their_length_follows(client: tdserve.Client, name: str) -> None:
    replay = client.create_replay(name, rows((0, 0))[0], 20, sampler=tdserve.Slices(num_slices=4))
    replay.extend(rows(*((0, step) for step in range(10))))
    for length in (1, 5, 10):
        assert len(slices_of(replay.sample(4 * length), length)) == 4
    with pytest.raises(tdserve.InvalidRequestError, match="4 slices"):
        replay.sample(10)
    with pytest.raises(tdserve.InvalidRequestError, match="20"):
        replay.sample(84)
    with pytest.raises(tdserve.DeadlineExceededError, match=name):
        replay.sample(44, timeout_s=0)


def test_slices_when_short_ones_count_then_whole_short_trajectories_come_too(client: tdserve.Client, name: str) -> None:
    sampler = tdserve.Slices(slice_len=4, end_key=("next", "done"), strict_length=False)
    replay = client.create_replay(name, rows((0, 0))[0], 40, sampler=sampler)
    replay.extend(rows((0, 0), (0, 1), is_end=True))
    replay.extend(rows(*((0, 100 + step) for step in range(5)), is_end=True))
    replay.extend(rows((0, 200)))  # goes on
    seen: set[tuple[Row, ...]] = set()
    for _ in range(20):
        batch = replay.sample(40)
        ends = batch["next", "truncated"].flatten().nonzero().flatten().tolist()
        starts = [0, *(end + 1 for end in ends[:-1])]
        found = which_of(batch)
        seen.update(tuple(found[start : end + 1]) for start, end in zip(starts, ends, strict=True))
        assert ends[-1] == len(batch) - 1
    short = ((0, 0), (0, 1))
    assert seen == {short, *(tuple((0, 100 + start + step) for step in range(4)) for start in range(2))}


@pytest.mark.slow
@pytest.mark.parametrize("with_iterator", [False, True])
def test_slices_when_the_ring_moves_on_meanwhile_then_every_slice_is_whole(
    server: tdserve.Server, client: tdserve.Client, name: str, with_iterator: bool
) -> None:
    length, capacity, num_steps = 8, 400, 160
    replay = client.create_replay(name, rows((0, 0))[0], capacity, sampler=tdserve.Slices(slice_len=length))
    replay.extend(rows(*((9, step) for step in range(capacity))), writer=9)

    def write() -> None:
        with server.client(timeout_s=20.0) as own:
            table = own.replay(name)
            for step in range(0, num_steps, 2):
                for writer in range(NUM_WRITERS):
                    table.extend(rows((writer, step), (writer, step + 1)), writer=writer)

    writing = client.run_later(write)
    num_sampled = 0
    batches: Any = replay.batches(16 * length) if with_iterator else iter(lambda: replay.sample(16 * length), None)
    while not writing.done() or num_sampled < 10:
        slices_of(next(batches), length)
        num_sampled += 1
    writing.result()
    if with_iterator:
        batches.close()
    assert {writer for writer, _ in which_of(replay[:])} == set(range(NUM_WRITERS))


def test_writer_when_trajectories_end_then_slices_stay_within_them(client: tdserve.Client, name: str) -> None:
    replay = client.create_replay(name, rows((0, 0))[0], 100, sampler=tdserve.Slices(slice_len=3))
    with replay.writer(batch=7) as writer:
        for episode in range(5):
            for step in range(6 + episode):
                writer.append(rows((0, EPISODE * episode + step))[0])
            writer.end_trajectory()
    live = set(which_of(replay[:]))
    assert len(live) == 40
    assert {each[0] for each in slices_of(replay.sample(3000), 3)} == set(starts_in(live, 3))


def test_extend_when_rows_lack_the_key_of_their_trajectory_then_refused(client: tdserve.Client, name: str) -> None:
    sampler = tdserve.Slices(slice_len=2, trajectory_key="episode")
    replay = client.create_replay(name, rows((0, 0))[0], 10, sampler=sampler)
    index = replay.extend(rows((0, 0), (0, 1)))
    calls: list[Callable[[], Any]] = [
        lambda: replay.extend(rows((0, 2)).exclude("episode")),
        lambda: replay.set_at_("episode", 7, index[:1]),
        lambda: replay.take(2, consumer="c"),
    ]
    for call in calls:
        with pytest.raises(tdserve.InvalidRequestError):
            call()
    assert slices_of(replay.sample(2), 2) == [[(0, 0), (0, 1)]]


def test_slices_when_a_row_lacks_a_leaf_then_none_holds_it_until_it_is_written(
    client: tdserve.Client, name: str
) -> None:
    replay = client.create_replay(name, rows((0, 0))[0], 20, sampler=tdserve.Slices(slice_len=3))
    replay.extend(rows(*((0, step) for step in range(4))))
    index = replay.extend(rows((0, 4)).exclude("episode"))
    replay.extend(rows(*((0, step) for step in range(5, 9))))

    def starts() -> set[int]:
        return {each[0][1] for each in slices_of(replay.sample(600), 3)}

    assert starts() == {0, 1, 5, 6}
    assert {each[0][1] for each in slices_of(replay.sample(600, require="step"), 3)} == set(range(7))
    replay.set_at_("episode", 0, index)
    assert starts() == set(range(7))
