"""The arguments of a data worker's process."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from tdserve.base.config import ServerConfig


@dataclass(frozen=True)
class WorkerArguments:
    """The arguments of a data worker's process, on their way from control through the fork server.

    Attributes:
        number: Number of the worker, from 0 to ``--workers`` - 1.
        transfer_timeout_s: As in ``ServerConfig``.
        memory_limit_bytes: As in ``ServerConfig``.
        device: GPU for content that travels by NCCL; "" for none.
        interface: Network interface of NCCL; "" lets NCCL choose.
        checks_pages: Whether it follows the pages of environments when it opens them: a damaged one may have ended the
            last process.
    """

    number: int
    transfer_timeout_s: float = ServerConfig.transfer_timeout_s
    memory_limit_bytes: int = ServerConfig.memory_limit_bytes
    device: str = ""
    interface: str = ""
    checks_pages: bool = False

    def to_json(self) -> dict[str, Any]:
        """Returns what stands for it in a message of JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> WorkerArguments:
        """Returns what ``to_json`` was called of."""
        return cls(**found)
