"""The guide's table of kinds and operations, made of what the suite asserts.

``python -m tests.conformance.kind_groups`` prints it.
"""

from __future__ import annotations

import re
import sys

from tests.conformance.kinds import KINDS
from tests.conformance.operations import OPERATIONS
from tests.conformance.refused import NOTES, REFUSED

GROUPS: tuple[tuple[str, str], ...] = (
    ("`LazyStackedTensorDict`, of `TensorClass`es too", r"lazy stack|LazyStacked"),
    ("`UnbatchedTensor`", r"UnbatchedTensor"),
    ("`TypedTensorDict`", r"TypedTensorDict"),
    ("`History`, `IFEvalScoreData` of torchrl", r"History|IFEvalScoreData"),
    ("`PersistentTensorDict`, memory-mapped, shared, consolidated, sub-tensordicts, any strides",
     r"HDF5|memory-mapped|consolidated|shared memory|sub-tensordict|lazy view|strides|any order"),
    ("`TensorDictParams`, `from_module(s)`, parameters, buffers, `requires_grad`",
     r"TensorDictParams|from_module|parameters|grad|computed"),
    ("jagged and strided nested tensors", r"jagged|nested$|^strided"),
    ("`NonTensorData`, `NonTensorStack`", r"non-tensor data"),
    ("`TensorClass` in all flavours, nested in one another",
     r"(?i)tensorclass|autocast|nocast|tensor_only|frozen|shadow|subclass|fields that|__post_init__"),
    ("`TensorDict`: nested, names, device, locked, empty",
     r"^dense|^without batch|on a device|two batch|^no rows|locked|a dense stack"),
)  # fmt: skip
"""Rows of the table, and the kinds that are in them: the first pattern that is found in a kind's name."""

SHOWN = (-1, -2, 0, -3, -4, 5, 1, 2, 3, 4)
"""The order of the rows in the table, as numbers in ``GROUPS``."""

COLUMN_NOTES = {
    "replay, queue": "A table keeps content only: no locks, parameters or `requires_grad`. A sample has additional"
    " keys, so instances come back as TensorDicts; `replay[index]` returns instances.",
    "weights": "Weights keep content only: parameters and buffers come back as plain tensors; `init_remote` preserves"
    " their kind.",
    "keyed entries": "Entries of keyed stores keep content only, as weights do: no locks, parameters or"
    " `requires_grad`.",
    "`map()`": "`map()` needs shared memory; over a network it raises `NotSupportedError`.",
}
"""Statements that hold for every kind."""

TORCHRL = ("History", "IFEvalScoreData")
"""Kinds of a process of their own."""


def group_of(kind: str) -> str:
    """The row of a kind.

    Raises:
        KeyError: There is none: ``GROUPS`` must say.
    """
    for title, pattern in GROUPS:
        if re.search(pattern, kind):
            return title
    raise KeyError(kind)


def table() -> str:
    """The table and its notes, in Markdown."""
    columns = list(dict.fromkeys(operation.column for operation in OPERATIONS.values()))
    notes: list[str] = []
    heads = [column + _marks([COLUMN_NOTES[column]] if column in COLUMN_NOTES else [], notes) for column in columns]
    lines = [f"| | {' | '.join(heads)} |", "|---" * (len(columns) + 1) + "|"]
    for title in (GROUPS[number][0] for number in SHOWN):
        kinds = [kind for kind in (*KINDS, *TORCHRL) if group_of(kind) == title]
        lines.append(f"| {title} | {' | '.join(_cell(kinds, column, notes) for column in columns)} |")
    return "\n".join([*lines, "", *(f"{number}. {text}" for number, text in enumerate(notes, 1))])


def _cell(kinds: list[str], column: str, notes: list[str]) -> str:
    names = [name for name, operation in OPERATIONS.items() if operation.column == column]
    words = [word for kind in kinds for name in names if (word := REFUSED.get(kind, {}).get(name))]
    is_never = len(words) == len(kinds) * len(names)
    return ("no" if is_never else "yes") + _marks([NOTES[word].text for word in dict.fromkeys(words)], notes)


def _marks(texts: list[str], notes: list[str]) -> str:
    """References to notes. Notes get numbers in the order in which they occur."""
    notes.extend(text for text in texts if text not in notes)
    return "".join(f" [{notes.index(text) + 1}]" for text in texts)


if __name__ == "__main__":
    sys.stdout.write(table() + "\n")
