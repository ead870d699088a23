"""What a client learns of a fault of the server."""

from __future__ import annotations

import logging

from tdserve.base.errors import LocalProtocolError, TDServeError
from tdserve.base.logs import name_request

_log = logging.getLogger("tdserve.server")


def to_error(fault: Exception, request_id: str) -> TDServeError:
    """Returns the error to send to a client for a fault: tdserve's own unchanged, any other logged and wrapped."""
    if isinstance(fault, TDServeError):
        return fault
    _log.exception("a request failed", exc_info=fault, extra=name_request(request_id))
    return LocalProtocolError(reason=f"{type(fault).__name__}: {fault}"[:500])
