"""What a call costs: seconds of CPU of each process, from a fit or as assumed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CallCosts:
    """Seconds of CPU for one request.

    Attributes:
        control_s: CPU time of control, for any request.
        worker_s: CPU time of a data worker, for a request with rows.
        worker_s_per_byte: CPU time of a data worker, for each byte of rows.
        num_workers: Data workers of a server.
    """

    control_s: float = 80e-6
    worker_s: float = 120e-6
    worker_s_per_byte: float = 0.4e-9
    num_workers: int = 2
