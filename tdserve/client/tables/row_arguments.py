"""Row numbers, generations and priorities, in the forms in which callers give them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tdserve.base.errors import InvalidRequestError, SelectionError
from tdserve.messages.content import GENERATION_KEY, INDEX_KEY
from tdserve.rules.replay.plans import check_priorities
from tdserve.structure.tensors.plain_tensors import to_host


def to_row_numbers(rows: Any, *, table: str = "") -> NDArray[np.int64]:
    """Returns row numbers that are given as a sampled batch, a tensor, an array, a list, or one number.

    Args:
        rows: The rows.
        table: Name of the table, for errors.

    Raises:
        InvalidRequestError: They cannot be row numbers.
        SelectionError: One is negative.
    """
    given = to_host(_get_numbers(rows))
    try:
        array = np.asarray(given)
    except (TypeError, ValueError, RuntimeError):  # such as a list of batches, or of lists that differ in length
        raise _make_kind_error(rows, np.dtype(object), table) from None
    if array.dtype == np.bool_ or (array.size and array.dtype.kind not in "iu"):
        raise _make_kind_error(rows, array.dtype, table)
    numbers = np.ascontiguousarray(array.reshape(-1).astype(np.int64))
    if len(numbers) and int(numbers.min()) < 0:  # negative numbers have another meaning in messages
        raise SelectionError(selection=str(int(numbers.min())), reason="row numbers begin at 0")
    return numbers


def flatten_row_dims(value: Any, rows: Any) -> Any:
    """Returns values of rows with one dimension for the rows, where their numbers have several, as those of
    ``extend(flatten=True)``."""
    shape = tuple(np.shape(_get_numbers(rows)))  # without a copy from another device
    if (
        len(shape) < 2
        or getattr(value, "is_nested", False)
        or tuple(getattr(value, "shape", ()))[: len(shape)] != shape
    ):
        return value
    return value.reshape(-1, *value.shape[len(shape) :])


def _get_numbers(rows: Any) -> Any:
    """Returns the numbers in a sampled batch; anything else as it is."""
    if not is_batch(rows):
        return rows
    found = rows.get(INDEX_KEY, None)  # a lazy stack does not list it among its keys
    if found is None:
        raise InvalidRequestError(argument="rows", reason=f"a batch without {INDEX_KEY!r} was not sampled")
    return found


def _make_kind_error(rows: Any, dtype: np.dtype[Any], table: str) -> InvalidRequestError:
    """Returns the error for what cannot be row numbers, with what may be given instead of it."""
    what, remedy = f"{dtype}", "give integers"
    if isinstance(rows, slice):
        what, remedy = f"{rows}", "give torch.arange(start, stop)"
    elif dtype == np.bool_:
        what, remedy = "a bool mask", "give batch['index'][mask], or mask.nonzero() of a mask over the table's rows"
    where = f" of table {table!r}" if table else ""
    return InvalidRequestError(argument="rows", reason=f"{what} cannot be row numbers{where}; {remedy}")


def to_generations(rows: Any, generation: Any, num_rows: int) -> NDArray[np.uint32]:
    """Returns the lower halves of the rows' generations, which suffice and keep messages short; none if none are given.

    Args:
        rows: A batch contains them.
        generation: Generation of each row, if ``rows`` is not a batch.

    Raises:
        InvalidRequestError: Their number differs from that of the rows.
    """
    if generation is None and is_batch(rows):
        generation = rows.get(GENERATION_KEY, None)
    if generation is None:
        return np.zeros(0, "<u4")
    generations = to_row_numbers(generation).astype("<u4")
    if len(generations) not in (1, num_rows):
        raise _make_number_error(len(generations), num_rows)
    is_one = len(generations) > 0 and bool((generations == generations[0]).all())
    return generations[:1] if is_one else generations


def spread_generations(generation: Any, num_rows: int) -> NDArray[np.int64] | None:
    """Returns the generation of each row, of one for each or one for all; None if none is given.

    Raises:
        InvalidRequestError: Their number differs from that of the rows.
    """
    if generation is None:
        return None
    found = to_row_numbers(generation)
    if len(found) not in (1, num_rows):
        raise _make_number_error(len(found), num_rows)
    return np.full(num_rows, found[0]) if len(found) == 1 else found


def to_whole_generations(rows: Any, generation: Any) -> NDArray[np.int64]:
    """Returns the generation of each row; negative ones are those of rows that were not live.

    Args:
        rows, generation: As in ``to_generations``.

    Raises:
        InvalidRequestError: There is not one for each row.
    """
    num_rows = len(to_row_numbers(rows))
    found = rows.get(GENERATION_KEY, None) if generation is None and is_batch(rows) else generation
    array = np.asarray(to_host(found))
    if found is None or array.dtype.kind not in "iu" or array.size != num_rows:
        reason = "none is given" if found is None else f"{array.size} of {array.dtype} for {num_rows} rows"
        raise InvalidRequestError(argument="generation", reason=reason)
    return array.reshape(-1).astype(np.int64)


def _make_number_error(num_generations: int, num_rows: int) -> InvalidRequestError:
    return InvalidRequestError(argument="generation", reason=f"{num_generations} generations for {num_rows} rows")


def is_batch(rows: Any) -> bool:
    """Returns whether rows are given as a sampled batch."""
    return hasattr(rows, "keys") and not isinstance(rows, (np.ndarray, list, tuple))


def spread_priorities(priority: Any, num_rows: int) -> NDArray[np.float64]:
    """Returns the checked priority of each row, of one for each or one for all; errors as in ``to_priorities``."""
    found = to_priorities(priority, num_rows)
    return found if len(found) == num_rows else np.full(num_rows, found[0])


def to_priorities(priority: Any, num_rows: int) -> NDArray[np.float64]:
    """Returns checked priorities: one per row, or a single one.

    Raises:
        InvalidRequestError: Their number differs from that of the rows, or one is negative or not finite. Nothing was
            sent.
    """
    given = to_host(priority)
    given = given.double() if hasattr(given, "double") else given  # NumPy has no bfloat16
    try:
        array = np.asarray(given, dtype=np.float64).reshape(-1)
    except (TypeError, ValueError) as fault:
        raise InvalidRequestError(argument="priority", reason=f"{priority!r} is not a number") from fault
    if len(array) != num_rows and np.ndim(given) > 0:
        raise InvalidRequestError(argument="priority", reason=f"{len(array)} priorities for {num_rows} rows")
    check_priorities(array)
    return array
