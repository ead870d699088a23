"""The lines by which a server process reports its start to the process that has started it."""

from __future__ import annotations

READY_PREFIX = "tdserve ready at "
"""Start of the one line that a server prints once it accepts connections; the address follows."""

FAILED_PREFIX = "tdserve failed: "
"""Start of the line by which a parent process gets the reason why the server did not start; JSON follows."""
