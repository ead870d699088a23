"""The program ``tdserve``, also as ``python -m tdserve``."""

from __future__ import annotations

import signal
import sys

try:
    from tdserve.base.config import QUIET_GRPC, set_variables

    set_variables(QUIET_GRPC)  # grpc, which the next line imports, reads them only then

    from tdserve.cli.main import main
except KeyboardInterrupt:  # the imports take long enough for a Ctrl-C, which ends them as it does a command
    sys.stderr.write("\n")
    sys.exit(128 + signal.SIGINT)

if __name__ == "__main__":
    sys.exit(main())
