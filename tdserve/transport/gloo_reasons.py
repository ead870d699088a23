"""What gloo's errors say, without what is of use only beside gloo's sources."""

from __future__ import annotations

import re

_PLACES = re.compile(r"\[[^\[\]]*\.(cc|cpp|h):\d+\] ")
"""Lines of gloo's sources."""

_PREFIX = "Gloo connectFullMesh failed with "

_ADVICE = ". This is typically caused by"
"""Begins advice for programs without a server, of which the other end has its own error."""

_MAX_LENGTH = 300


def get_reason(error: BaseException) -> str:
    """Returns the first line of an error that torch raises for gloo, without places in its sources and advice."""
    line = _PLACES.sub("", str(error).partition("\n")[0]).removeprefix(_PREFIX)
    return line.partition(_ADVICE)[0][:_MAX_LENGTH]
