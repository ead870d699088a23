"""Texts of strangers as values of labels: short, printable, and different for different texts."""

from __future__ import annotations

import hashlib

MAX_CHARACTERS = 128
"""Length of a label; names of stores have up to 200 bytes, and few more than 60 characters."""


OTHER = "__other__"
"""Label of what is summed up, so that the number of series stays bounded."""


def make_label(text: str) -> str:
    """Returns a text as it is if it is printable, short and not ``OTHER``; else what can be shown of it, with a part of
    its hash."""
    if text.isprintable() and len(text) <= MAX_CHARACTERS and text != OTHER:
        return text
    shown = "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text[: MAX_CHARACTERS - 10])
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:8]
    return f"{shown}\N{HORIZONTAL ELLIPSIS}#{digest}"
