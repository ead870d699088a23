"""One transaction decides each kind of change. Before it nobody sees anything, after it everything is there, whatever
does not fit on the disk, and whenever the process is killed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import pytest

from tdserve.base.errors import CapacityError
from tests.unit.server.decisions import (
    KINDS,
    LOST,
    Killed,
    Kind,
    session_of,
    watching_others,
    watching_writes,
)
from tests.unit.server.world import Loop, World
from tests.unit.store.short_files import no_page_can_be_written

each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)

MAX_TRANSACTIONS = 10


@pytest.mark.slow
@each_kind
def test_change_when_killed_before_or_behind_a_step_then_seen_and_on_record_or_neither(
    world: World, run: Loop, kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind.prepare(world, run)
    session = session_of(world)
    before = kind.look(world, run)
    killed: list[Killed] = []

    def keep() -> None:
        killed.append(Killed(world, tmp_path / f"killed-{len(killed)}"))

    @contextmanager
    def keep_both() -> Iterator[None]:
        keep()
        yield
        keep()

    with watching_writes(monkeypatch, keep_both), watching_others(monkeypatch, keep):
        kind.change(world, run, session)
    keep()
    after = kind.look(world, run)
    assert after != before
    found = [each.look(run, kind, session.client_id) for each in killed]
    assert found[0] == (before, False) or kind.is_repeatable
    assert found[-1] == (after, kind.is_answered)
    for state, is_recorded in found:
        assert state in (before, after) or (state == LOST and not is_recorded)
        if kind.is_answered and not kind.is_repeatable:
            assert is_recorded == (state == after)


@pytest.mark.slow
@each_kind
def test_change_when_a_transaction_finds_no_room_then_refused_and_unseen_or_done(
    world: World, run: Loop, kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_refused = 0
    for number in range(MAX_TRANSACTIONS):
        run_world = World(tmp_path / f"root-{number}", world.worker)
        kind.prepare(run_world, run)
        session, before, num_writes = session_of(run_world), kind.look(run_world, run), 0

        def refuse(number: int = number) -> AbstractContextManager[None]:
            nonlocal num_writes
            num_writes += 1
            return nullcontext() if num_writes <= number else no_page_can_be_written()

        is_refused = False
        with watching_writes(monkeypatch, refuse):
            try:
                kind.change(run_world, run, session)
            except CapacityError:
                is_refused = True
            seen = kind.look(run_world, run)
        if is_refused:
            num_refused += 1
            assert seen == before
        else:
            assert seen != before
        assert Killed(run_world, tmp_path / "killed").look(run, kind, session.client_id)[0] == seen
        run_world.close()
        if num_writes <= number:
            break
    else:
        raise AssertionError("it takes more transactions")
    assert num_refused or kind.is_repeatable
