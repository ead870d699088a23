"""Scanner of words that have another meaning in English, or make a reader guess: source or documents in, findings out,
like the scanners in ``house``."""

from __future__ import annotations

import re
from collections.abc import Mapping

_GAP = r"(?:\s+(?:#:?|//|\*)?\s*)"
_SINCE = re.compile(rf"\bas{_GAP}of{_GAP}", re.IGNORECASE)
"""It means "since" or "at the time of"; for "like" it is "as in", "as for" or "see"."""

_MOMENTS = re.compile(
    r"one moment|now\b|(?:the|its|their) last\b|the (?:same )?moment\b|an? (?:earlier|sync\b)|different moments"
    r"|that (?:sync|moment)\b|tensordict \d"
)

_REFUSED = re.compile(
    rf"\b(?:(?:that|which|[Ii]t|[Vv]alue){_GAP}(?:is|are){_GAP}none|[Ii]n{_GAP}vain|[Bb]ut{_GAP}for)\b"
    r"|^ +[a-z_]+(?:, [a-z_]+)*: (?:Of|That of|That at|The same\.|See above)(?!\w)",
    re.MULTILINE,
)
"""Write "invalid", "missing" or "not a ..." for the first, "failed", "timed out" or "wasted" for the second, and
"except" for the third. An attribute or argument is described by a noun: "Name of the table.", not "Of the table."
"""

_PERSONS = re.compile(r"\b(?:nobody|somebody|everybody|whoever|wants?)\b", re.IGNORECASE)
"""Programs have clients, servers, processes and callers, which need or ask for things."""


def word_faults(texts: Mapping[str, str]) -> list[str]:
    """Returns where a text has "since" for "like", or words that are refused.

    Args:
        texts: Texts by name of their file.
    """
    faults = []
    for name, text in texts.items():
        for match in _SINCE.finditer(text):
            follows = re.sub(_GAP, " ", text[match.end() : match.end() + 80])
            if not _MOMENTS.match(follows):
                line = text.count("\n", 0, match.start()) + 1
                faults.append(f"{name}:{line}: {' '.join(match.group().split())} {follows[:30].strip()}")
        for match in _REFUSED.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            faults.append(f"{name}:{line}: {' '.join(match.group().split())}")
    return faults


def person_faults(texts: Mapping[str, str]) -> list[str]:
    """Returns where a text has a word of persons; arguments as in :func:`word_faults`."""
    faults = []
    for name, text in texts.items():
        for match in _PERSONS.finditer(text):
            faults.append(f"{name}:{text.count(chr(10), 0, match.start()) + 1}: {match.group()}")
    return faults
