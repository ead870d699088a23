"""Certificates that tests make."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import tdserve
from tdserve.cli.serving.certs import make_authority, make_certificate

HOSTS = ["localhost", "127.0.0.1"]


class Certificates:
    """A folder with an authority, a server's certificate and a client's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        make_authority(folder, 2)
        self.make("server")
        self.make("client", hosts=[])

    def make(self, stem: str, *, hosts: list[str] = HOSTS) -> None:
        make_certificate(self.folder, stem, hosts, 2)

    def make_expired(self, stem: str) -> None:
        """Signs a server's certificate anew, until yesterday."""
        self.make(stem)
        cert, key, asked = (self.folder / f"{stem}.{ending}" for ending in ("pem", "key", "csr"))
        names = self.folder / "names"
        names.write_text("subjectAltName=DNS:localhost,IP:127.0.0.1")
        authority = [
            "-extfile",
            names,
            "-CA",
            self.folder / "ca.pem",
            "-CAkey",
            self.folder / "ca.key",
            "-CAcreateserial",
        ]
        commands = (
            ["openssl", "x509", "-x509toreq", "-in", cert, "-signkey", key, "-out", asked],
            ["openssl", "x509", "-req", "-in", asked, *authority, "-days", "-1", "-out", cert],
        )
        for command in commands:
            subprocess.run([str(part) for part in command], check=True, capture_output=True)

    @property
    def server(self) -> dict[str, Any]:
        return self.find("server")

    def find(self, stem: str) -> dict[str, Any]:
        """The settings of a server with this certificate."""
        return {"tls_cert": str(self.folder / f"{stem}.pem"), "tls_key": str(self.folder / f"{stem}.key")}

    @property
    def trusting(self) -> tdserve.TLS:
        return tdserve.TLS(ca=self.folder / "ca.pem")

    @property
    def proving(self) -> tdserve.TLS:
        return tdserve.TLS(self.folder / "ca.pem", self.folder / "client.pem", self.folder / "client.key")
