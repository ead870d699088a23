"""Scanner of words that have another meaning in English: source or documents in, findings out, like the scanners in
``house``."""

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


def word_faults(texts: Mapping[str, str]) -> list[str]:
    """Returns where a text has the two words before something that is no moment.

    Args:
        texts: By name of the file.
    """
    faults = []
    for name, text in texts.items():
        for match in _SINCE.finditer(text):
            follows = re.sub(_GAP, " ", text[match.end() : match.end() + 80])
            if not _MOMENTS.match(follows):
                line = text.count("\n", 0, match.start()) + 1
                faults.append(f"{name}:{line}: {' '.join(match.group().split())} {follows[:30].strip()}")
    return faults
