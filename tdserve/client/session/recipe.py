"""How to make an equivalent client in another process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tdserve.base.config import TransportName
from tdserve.base.tls import TLS


@dataclass(frozen=True)
class Recipe:
    """Address and settings of a client; equal recipes make equivalent clients."""

    kind: type[Any]
    address: str
    transport: TransportName
    token: str | None = field(repr=False)
    timeout_s: float
    allow_pickle: bool
    root: str | None
    device: Any
    numpy: bool = False
    tls: TLS | None = None

    def make(self) -> Any:
        """Makes a client, which connects when it is first used."""
        return self.kind(
            self.address,
            transport=self.transport,
            token=self.token,
            timeout_s=self.timeout_s,
            allow_pickle=self.allow_pickle,
            root=self.root,
            device=self.device,
            numpy=self.numpy,
            tls=self.tls,
        )
