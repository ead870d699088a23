"""The program ``tdserve``, also as ``python -m tdserve``."""

from __future__ import annotations

import sys

from tdserve.base.config import QUIET_GRPC, set_variables

set_variables(QUIET_GRPC)  # grpc, which the next line imports, reads them only then

from tdserve.cli.main import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
