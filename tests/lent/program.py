"""Runs a program of the tests in a process that has imported what a client needs.

``python -m tests.lent.program MODULE ARGUMENTS`` and ``python -m tests.lent.program -c CODE ARGUMENTS`` do what
``python -m MODULE ARGUMENTS`` and ``python -c CODE ARGUMENTS`` do. In a test run a lender forks the process; its end
is that of the program, without what the interpreter does at its end.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence

import tdserve.client.client  # noqa: F401 (what takes long: each program needs it)


def main(arguments: Sequence[str]) -> None:
    """Runs the program."""
    if arguments[0] == "-c":
        code, sys.argv = arguments[1], ["-c", *arguments[2:]]
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = list(arguments)
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
