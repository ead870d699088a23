"""Exit codes of the commands, by the code of an error: the guide's page ``command-line`` lists them."""

from __future__ import annotations

from tdserve.base.errors import InvalidRequestError, TDServeError

FAILED = 1
"""After any other error, and of a server that cannot start."""

NO_ANSWER = 3
NOT_FOUND = 4
REFUSED = 5
CONFLICT = 6
NO_ROOM = 7
DAMAGED = 8

INTERRUPTED = 130
"""After Ctrl-C, as shells expect it: 128 + SIGINT."""

EXIT_CODES = {
    "UNAVAILABLE": NO_ANSWER,
    "DEADLINE_EXCEEDED": NO_ANSWER,
    "NOT_FOUND": NOT_FOUND,
    "OUT_OF_RANGE": NOT_FOUND,
    "UNAUTHENTICATED": REFUSED,
    "PERMISSION_DENIED": REFUSED,
    "ALREADY_EXISTS": CONFLICT,
    "FAILED_PRECONDITION": CONFLICT,
    "RESOURCE_EXHAUSTED": NO_ROOM,
    "DATA_LOSS": DAMAGED,
}


TOKEN_ARGUMENTS = ("--token-file", "TDSERVE_TOKEN_FILE")
"""What names the file of the token: one that cannot be read is a missing token."""


def find_exit_code(error: TDServeError) -> int:
    """Returns the exit code of a command that an error has ended."""
    if isinstance(error, InvalidRequestError) and error.argument in TOKEN_ARGUMENTS:
        return REFUSED
    return EXIT_CODES.get(error.code, FAILED)
