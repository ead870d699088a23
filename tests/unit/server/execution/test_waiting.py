from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tdserve.base.deadline import Deadline
from tdserve.base.errors import DeadlineExceededError, StoreNotFoundError
from tdserve.server.execution.waiting import MAX_ATTEMPTS, Waiters
from tests.unit.server.world import Loop, outside


def nothing() -> int | None:
    """A state that does not come."""
    return None


def test_wait_when_the_state_is_there_then_returns_at_once_even_without_time(run: Loop) -> None:
    assert run(Waiters().wait_for(lambda: 0, Deadline.after(0), lambda: "")) == 0


def test_wait_when_woken_then_tries_again(run: Loop) -> None:
    async def scenario() -> tuple[int, list[int]]:
        waiters, attempts, state = Waiters(), [0], [0]

        def attempt() -> int | None:
            attempts[0] += 1
            return state[0] if state[0] > 1 else None

        waiting = asyncio.create_task(waiters.wait_for(attempt, Deadline.never, lambda: ""))
        for _ in range(2):
            await asyncio.sleep(0)
            state[0] += 1
            waiters.wake()
        return await waiting, attempts

    assert run(scenario()) == (2, [3])


def test_wait_when_time_is_over_then_the_error_names_the_event_and_the_timeout(run: Loop) -> None:
    with pytest.raises(DeadlineExceededError, match=r"a miracle did not happen within 0\.01 s"):
        run(Waiters().wait_for(lambda: None, Deadline.after(0.01), lambda: "a miracle"))


def test_wait_when_the_state_changes_unseen_then_found_in_the_last_moment(run: Loop) -> None:
    attempts = iter([None, "found"])
    assert run(Waiters().wait_for(lambda: next(attempts), Deadline.after(0.01), lambda: "")) == "found"


def test_wait_when_cancelled_then_no_call_waits_any_more(run: Loop) -> None:
    async def scenario() -> list[int]:
        waiters = Waiters()
        waiting = [
            asyncio.create_task(waiters.wait_for(nothing, Deadline.never, lambda: "", line=line))
            for line in ("one", "one", "another")
        ]
        await asyncio.sleep(0)
        counts = [waiters.num_waiting]
        for each in waiting:
            each.cancel()
            await asyncio.wait([each])
            counts.append(waiters.num_waiting)
        return counts

    assert run(scenario()) == [3, 2, 1, 0]


def test_wake_when_ten_thousand_wait_then_all_return(run: Loop) -> None:
    async def scenario() -> int:
        waiters, state = Waiters(), [False]
        waits = [waiters.wait_for(lambda: state[0] or None, Deadline.never, lambda: "") for _ in range(10_000)]
        tasks = [asyncio.create_task(wait) for wait in waits]
        await asyncio.sleep(0)
        state[0] = True
        waiters.wake()
        return sum(await asyncio.gather(*tasks))

    assert run(scenario()) == 10_000


def test_delete_when_a_call_waits_then_it_and_later_ones_get_the_error(run: Loop) -> None:
    async def scenario() -> list[str]:
        waiters = Waiters()
        waiting = asyncio.create_task(waiters.wait_for(nothing, Deadline.never, lambda: ""))
        await asyncio.sleep(0)
        waiters.delete("x")
        later = asyncio.create_task(waiters.wait_for(lambda: 1, Deadline.never, lambda: ""))
        errors = await asyncio.gather(waiting, later, return_exceptions=True)
        return [error.name for error in errors if isinstance(error, StoreNotFoundError)]

    assert run(scenario()) == ["x", "x"]


class Stock:
    """Things that are granted to one waiter each. All waiters stand in one line."""

    def __init__(self) -> None:
        self.waiters = Waiters()
        self.num_left = 0
        self.num_attempts = 0
        self.served: list[str] = []

    def attempt(self) -> int | None:
        self.num_attempts += 1
        if not self.num_left:
            return None
        self.num_left -= 1
        return self.num_left

    def give_back(self, granted: int) -> None:
        self.num_left += 1

    def put(self, num: int) -> None:
        self.num_left += num
        self.waiters.wake()

    def taker(self, name: str, line: Any = "line", deadline: Deadline = Deadline.never) -> asyncio.Task[None]:
        async def take() -> None:
            await self.waiters.wait_for(self.attempt, deadline, lambda: "a thing", line=line, give_back=self.give_back)
            self.served.append(name)

        return asyncio.create_task(take())


async def turns(num: int = 5) -> None:
    """Lets whatever is due run."""
    for _ in range(num):
        await asyncio.sleep(0)


def test_line_when_things_come_one_by_one_then_served_in_order(run: Loop) -> None:
    async def scenario() -> list[str]:
        stock = Stock()
        tasks = [stock.taker(name) for name in "abcd"]
        await turns()
        for num in (1, 2, 1):
            stock.put(num)
            await turns()
        await asyncio.gather(*tasks)
        return stock.served

    assert run(scenario()) == ["a", "b", "c", "d"]


def test_line_when_a_thousand_wait_then_a_change_costs_one_attempt_more_than_it_grants(run: Loop) -> None:
    async def scenario() -> None:
        stock = Stock()
        tasks = [stock.taker(str(number)) for number in range(1000)]
        await turns()
        assert stock.num_attempts == 1  # who comes behind others need not try
        for _ in range(20):
            before = stock.num_attempts
            stock.waiters.wake()
            await turns()
            assert stock.num_attempts == before + 1
        before = stock.num_attempts
        stock.put(3)
        await turns()
        assert stock.num_attempts <= before + 5
        assert stock.served == ["0", "1", "2"]
        stock.put(997)
        await asyncio.gather(*tasks)
        assert stock.served == [str(number) for number in range(1000)]

    run(scenario())


def test_lines_when_there_are_several_then_one_that_must_wait_does_not_keep_the_others(run: Loop) -> None:
    async def scenario() -> list[str]:
        stock = Stock()
        waiters = stock.waiters
        stuck = asyncio.create_task(waiters.wait_for(nothing, Deadline.never, lambda: "", line="stuck"))
        tasks = [stock.taker("a", "1"), stock.taker("b", "2"), stock.taker("c", None), stock.taker("d", None)]
        await turns()
        stock.put(4)
        await asyncio.gather(*tasks)
        assert waiters.has_line("stuck")
        stuck.cancel()
        await turns()
        assert (waiters.num_waiting, waiters.has_line("stuck")) == (0, False)
        return sorted(stock.served)

    assert run(scenario()) == ["a", "b", "c", "d"]


def test_line_when_what_one_is_granted_frees_what_another_waits_for_then_both_in_one_wake(run: Loop) -> None:
    async def scenario() -> list[str]:
        waiters, state, order = Waiters(), {"rows": 0, "room": 0}, []

        def swap(wanted: str, given: str) -> Callable[[], str | None]:
            def attempt() -> str | None:
                if not state[wanted]:
                    return None
                state[wanted] -= 1
                state[given] += 1
                order.append(wanted)
                return wanted

            return attempt

        writer = asyncio.create_task(waiters.wait_for(swap("room", "more"), Deadline.never, str, line="write"))
        state["more"] = 0
        reader = asyncio.create_task(waiters.wait_for(swap("rows", "room"), Deadline.never, str, line="read"))
        await turns()
        state["rows"] = 1
        waiters.wake()
        await asyncio.gather(writer, reader)
        return order

    assert run(scenario()) == ["rows", "room"]


def test_newcomer_when_others_wait_in_its_line_then_stands_behind_them(run: Loop) -> None:
    async def scenario() -> list[str]:
        stock = Stock()
        first = stock.taker("first")
        await turns()
        stock.num_left = 1  # and nobody was woken yet
        second = stock.taker("second")
        await turns()
        assert stock.served == []
        stock.put(1)
        await asyncio.gather(first, second)
        return stock.served

    assert run(scenario()) == ["first", "second"]


def test_newcomer_when_the_last_of_its_line_was_just_served_then_tries_itself(run: Loop) -> None:
    async def scenario() -> list[str]:
        stock = Stock()
        first = stock.taker("first")
        await turns()
        stock.num_left = 2

        def come() -> asyncio.Task[None]:  # the first is granted, and has not gone on yet
            assert not stock.waiters.has_line("line")
            assert not first.done()
            return stock.taker("second")

        stock.waiters.wake()
        second = await outside(come)
        await asyncio.gather(first, second)
        return sorted(stock.served)

    assert run(scenario()) == ["first", "second"]


def test_first_when_it_gives_up_then_the_next_tries_at_once(run: Loop) -> None:
    async def scenario() -> list[str]:
        stock = Stock()
        first, second = stock.taker("first"), stock.taker("second")
        await turns()
        stock.num_left = 1  # of a change that only the first was to see
        first.cancel()
        await second
        return stock.served

    assert run(scenario()) == ["second"]


def test_first_when_its_time_is_over_then_the_next_is_served_by_the_next_change(run: Loop) -> None:
    async def scenario() -> list[str]:
        stock = Stock()
        first = stock.taker("first", deadline=Deadline.after(0.005))
        await turns()
        second = stock.taker("second")
        with pytest.raises(DeadlineExceededError):
            await first
        stock.put(1)
        await second
        return stock.served

    assert run(scenario()) == ["second"]


def test_granted_when_cancelled_in_that_moment_then_given_back_and_the_next_has_it(run: Loop) -> None:
    async def scenario() -> list[str]:
        stock = Stock()
        first, second = stock.taker("first"), stock.taker("second")
        await turns()
        stock.num_left = 1

        def cancel() -> None:  # its grant is in its future, and it has not gone on yet
            assert stock.num_left == 0
            first.cancel()

        stock.waiters.wake()
        await outside(cancel)
        await second
        assert first.cancelled()
        assert stock.num_left == 0
        return stock.served

    assert run(asyncio.wait_for(scenario(), 5.0)) == ["second"]


def test_granted_when_no_call_is_cancelled_then_nothing_is_given_back(run: Loop) -> None:
    async def scenario() -> int:
        stock = Stock()
        task = stock.taker("first")
        await turns()
        stock.put(1)
        await task
        return stock.num_left

    assert run(scenario()) == 0


def test_attempt_when_it_fails_then_only_its_own_caller_gets_the_error(run: Loop) -> None:
    async def scenario() -> list[str]:
        stock, is_broken = Stock(), [False]

        def broken() -> int | None:
            if is_broken[0]:
                raise ZeroDivisionError
            return None

        failing = asyncio.create_task(stock.waiters.wait_for(broken, Deadline.never, str, line="line"))
        await turns()
        second = stock.taker("second")
        await turns()
        is_broken[0] = True
        stock.put(1)
        with pytest.raises(ZeroDivisionError):
            await failing
        await second
        return stock.served

    assert run(scenario()) == ["second"]


@pytest.mark.parametrize("line", ["one", None])
def test_wake_when_very_many_wait_then_others_get_their_turn_between(run: Loop, line: str | None) -> None:
    async def scenario() -> tuple[list[int], int]:
        waiters, attempts, state = Waiters(), [0], [nothing()]

        def attempt() -> int | None:
            attempts[0] += 1
            return state[0]

        waiting = [
            asyncio.create_task(waiters.wait_for(attempt, Deadline.never, lambda: "", line=line))
            for _ in range(5 * MAX_ATTEMPTS)
        ]
        await asyncio.sleep(0)
        assert waiters.num_waiting == 5 * MAX_ATTEMPTS
        state[0] = 1
        waiters.wake()
        at_turns = []
        while waiters.num_waiting:
            before = attempts[0]
            await asyncio.sleep(0)
            at_turns.append(attempts[0] - before)
        assert await asyncio.gather(*waiting) == [1] * len(waiting)
        return at_turns, waiters.num_waiting

    at_turns, num_waiting = run(scenario())
    assert max(at_turns) <= MAX_ATTEMPTS
    assert (sum(at_turns), num_waiting) == (5 * MAX_ATTEMPTS, 0)


def test_tallies_when_calls_wait_for_rows_then_counted_by_what_they_wait_for(run: Loop) -> None:
    async def scenario() -> Waiters:
        waiters = Waiters()
        lines = [("sample", 4), ("sample", 4), ("share", 1), ("extend", 2), None, "relays"]
        assert await waiters.wait_for(lambda: 1, Deadline.never, lambda: "", line=lines[0]) == 1  # did not wait
        waiting = [
            asyncio.create_task(waiters.wait_for(nothing, Deadline.never, lambda: "", line=line)) for line in lines
        ]
        await asyncio.sleep(0)
        kinds = {kind: (tally.num_waits, tally.num_waiting) for kind, tally in waiters.tallies.items()}
        assert kinds == {"sample": (3, 3), "extend": (1, 1), "other": (2, 2)}
        assert all(tally.sum_s == 0 for tally in waiters.tallies.values())
        assert 0 < waiters.find_longest_s("sample") < 60
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        return waiters

    waiters = run(scenario())
    assert [tally.num_waiting for tally in waiters.tallies.values()] == [0, 0, 0]
    assert waiters.tallies["sample"].sum_s > 0
    assert waiters.find_longest_s("sample") == 0
