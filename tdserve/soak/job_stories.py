"""The story of a job that was consumed twice: all calls that have named it, so that the fault explains itself.

Two rows with the job mean that an extend was stored twice; one row that was had twice has come back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tdserve.soak.history import Call, History, read_histories

MAX_STORIES = 3
"""Jobs whose calls are described: the others were mostly doubled together with these."""

ROLES = ("produce", "consume")


def describe_job(job: int, folder: Path, rows_left: Sequence[tuple[int, int]]) -> str:
    """Returns a line for each call that has named a job, in the order in which they began, with its rows.

    Args:
        folder: Folder of the histories.
        rows_left: Number and generation of each row that the queue had of it in the end.
    """
    calls = sorted(_find_calls(job, folder), key=lambda found: found[2].begun_s)
    ends = [f"    in the end: {_name_row(*row)}" for row in rows_left]
    return "\n".join([f"  job {job}:", *(_describe_call(job, *found) for found in calls), *ends])


def _find_calls(job: int, folder: Path) -> Iterator[tuple[History, int, Call]]:
    """Yields the calls that have named a job, each with its history and its number there."""
    for role in ROLES:
        for history in read_histories(folder, role):
            for number, call in enumerate(history.calls):
                if job in call.fields["jobs"]:
                    yield history, number, call


def _describe_call(job: int, history: History, number: int, call: Call) -> str:
    where = f"    {history.path.stem}, call {number} of {len(history.calls)}, at {call.begun_s:.3f} s"
    outcome = "no answer came"
    if call.failure is not None:
        outcome = f"failed after {call.ended_s - call.begun_s:.3f} s: {call.failure}"
    elif call.is_acknowledged:
        outcome = f"acknowledged after {call.ended_s - call.begun_s:.3f} s"
    return f"{where}: jobs {call.fields['jobs']}{_find_rows(job, call)}: {outcome}"


def _find_rows(job: int, call: Call) -> str:
    """Returns the rows of a job in a call, as far as its history has them."""
    places = [place for place, each in enumerate(call.fields["jobs"]) if each == job]
    written: Any = (call.answer or {}).get("answer")
    numbers = call.fields.get("index", written)
    generations = call.fields.get("generation", ())
    if not isinstance(numbers, list):
        return ""
    return ", " + " and ".join(_name_row(numbers[place], *generations[place : place + 1]) for place in places)


def _name_row(number: int, generation: int | None = None) -> str:
    return f"row {number}" if generation is None else f"row {number} of generation {generation}"
