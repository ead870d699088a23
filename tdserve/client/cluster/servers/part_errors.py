"""Errors of a part of a shared store, as those of the store."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from tdserve.base.deadline import Deadline
from tdserve.base.errors import (
    ConnectError,
    CorruptDataError,
    DamagedRowError,
    DeadlineExceededError,
    Field,
    PeerLostError,
    SelectionError,
    StoreMovedError,
    TDServeError,
    TransportError,
)
from tdserve.rules.placement import find_whole


@contextmanager
def convert_part_errors(name: str, get_first_row: Callable[[int], int] = lambda _: 0) -> Iterator[None]:
    """Makes errors that a block raises about a part of a store name the store, and its rows by their numbers in the
    whole store: that is what the user knows.

    Args:
        name: Name of the store.
        get_first_row: Returns the number of a part's first row in the whole store, by shard.
    """
    try:
        yield
    except (StoreMovedError, TransportError):  # concerns this part only; callers find it again by name
        raise
    except TDServeError as error:
        shard = _find_shard(error, name)
        rows = {} if shard is None else _number_rows(error, get_first_row(shard))
        fields = {field: _name_whole(value, name) for field, value in {**error.fields, **rows}.items()}
        if fields == error.fields:
            raise
        raise error.with_fields(**fields) from error


def note_elsewhere(failure: TDServeError, done: str, shards: Iterable[int] = ()) -> TDServeError:
    """Returns the failure of one of several steps with what became of others: in its text if that has room for it, and
    in ``shards_done``.

    Args:
        done: What became of them; "" if there is nothing to add.
        shards: Where it happened.
    """
    if not done:
        return failure
    field = next((field for field in ("elsewhere", "reason", "state", "what") if field in failure.fields), None)
    if field is None:
        failure.shards_done = tuple(shards)
        return failure
    before = failure.fields[field]
    both = f"{before} ({done})" if field == "what" else f"{before}; {done}"
    noted = failure.with_fields(**{field: both if before else done})
    noted.shards_done = tuple(shards)
    noted.__cause__ = failure
    return noted


def merge_failures(failures: Mapping[int, TDServeError], name: str, address: str, deadline: Deadline) -> TDServeError:
    """Returns the error of a call that several shards of a store have failed: the first refusal, with the shards that
    did not answer beside it; if none has refused, as from ``make_unanswered_error``.

    Args:
        failures: By shard; at least one.
        name: Name of the store.
        address: Address of the cluster.
        deadline: Deadline of the call.
    """
    silent = {shard: each for shard, each in failures.items() if isinstance(each, TransportError)}
    others = f"shards {sorted(silent)} of {name!r} do not answer" if silent and len(failures) > 1 else ""
    for shard, failure in failures.items():
        if len(failures) == 1 or shard not in silent:
            return note_elsewhere(failure, others)
    return make_unanswered_error(silent, f"shards {sorted(silent)} of {name!r}", address, deadline)


def make_unanswered_error(
    failures: Mapping[int, TransportError], what: str, address: str, deadline: Deadline
) -> DeadlineExceededError | TransportError:
    """Returns the error of a call that several servers have not answered, all of which may be asked again. It is
    ConnectError only if none of them was sent anything.

    Args:
        failures: One error per server.
        what: The servers, or their shards.
        address: Address of the cluster.
        deadline: Deadline of the call.
    """
    made: DeadlineExceededError | TransportError
    if all(isinstance(each, ConnectError) for each in failures.values()):
        made = ConnectError(address=address, reason=f"{what} do not answer")
    elif deadline.expired:
        made = DeadlineExceededError(what=f"an answer of {what}", timeout_s=deadline.timeout_s)
    else:
        made = PeerLostError(peer=what, reason="they stopped answering during the call, which they may yet carry out")
    made.__cause__ = next(iter(failures.values()))
    return made


def _find_shard(error: TDServeError, name: str) -> int | None:
    """Returns the shard of the part that an error names; None if it names none, as once it was converted."""
    texts = (value for value in error.fields.values() if isinstance(value, str))
    found = (re.search(rf"(?<!\w){re.escape(name)}#(\d+)", text) for text in texts)
    return next((int(each[1]) for each in found if each), None)


def _number_rows(error: TDServeError, first_row: int) -> dict[str, Field]:
    """Returns the fields of an error that have row numbers of a part, with those of the whole store."""

    def shift(found: re.Match[str]) -> str:
        return str(int(found[0]) + first_row)

    if isinstance(error, SelectionError):
        return {"selection": re.sub(r"^\d+$", shift, str(error.fields["selection"]))}
    if isinstance(error, DamagedRowError):
        row = error.fields["row"]
        return {"row": row + first_row if isinstance(row, int) else row}
    if isinstance(error, CorruptDataError):  # its path may be that of a store, with the numbers of lost rows
        store, rows, numbers = str(error.fields["path"]).partition(", rows ")
        return {"path": store + rows + re.sub(r"\d+", shift, numbers)}
    return {}


def _name_whole(value: Field, name: str) -> Field:
    """Returns the field of an error: the name of a part, or a text with such names."""
    if not isinstance(value, str) or f"{name}#" not in value:
        return value
    if find_whole(value) == name:
        return name
    part = rf"'{re.escape(name)}#(\d+)'"
    return re.sub(part, repr(name), re.sub(f"store {part}", rf"shard \1 of store {name!r}", value))
