"""The tags of content on a channel."""

from __future__ import annotations

_NUM_TAGS = 2**31 - 1


def make_tag(request: int) -> int:
    """Returns the tag of a request's content on the channel. 0 is reserved for the end of the channel."""
    return 1 + request % _NUM_TAGS
