"""Errors as a shell needs them: what they advise a program to call is said as a command."""

from __future__ import annotations

import re

_COMMANDS = (
    (re.compile(r"client\.stores\(\)"), "`tdserve ls`"),
    (re.compile(r"client\.keys\('([^']+)'\)"), r"`tdserve keys \1`"),
    (re.compile(r"pass exists_ok=True, delete it, or"), "delete it (`tdserve rm`), or"),
    (re.compile(r"replace it \(--force, replaces=True\)"), "--force replaces it"),
    (re.compile(r"\((--[a-z-]+), [a-z_]+=[^)]*\)"), r"(\1)"),
    (re.compile(r"pass tls=tdserve\.TLS\([^)]*\), or set"), "set"),
)
"""Advice in the texts of errors, and what a shell can do instead."""


def advise_shell(text: str) -> str:
    """Returns the text of an error with advice for a shell."""
    for advice, command in _COMMANDS:
        text = advice.sub(command, text)
    return text
