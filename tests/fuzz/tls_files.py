"""Random damage of the PEM files of a server and of a client: each is refused by name, in one line, or serves."""

from __future__ import annotations

import socket
import ssl
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc

from tdserve.base.errors import InvalidRequestError
from tdserve.base.tls import ALPN, TLS
from tdserve.cli.serving.certs import make_authority, make_certificate
from tdserve.control.credentials import ServerCertificates, open_grpc_channel
from tests.fuzz.inputs import Inputs

TIMEOUT_S = 10.0

HOST = "127.0.0.1"
"""One address: of the two that a name has, another process may have taken the port of one."""

SERVER_FILES = ("server.pem", "server.key", "ca.pem")
CLIENT_FILES = ("client.pem", "client.key", "ca.pem")


class TLSCampaign:
    """Damages PEM files, one after the other.

    Args:
        seed: Decides what is damaged.

    Attributes:
        faults: What was neither refused by name in one line nor works.
        outcomes: How often what has happened.
    """

    def __init__(self, seed: int) -> None:
        self.inputs = Inputs(seed)
        self.faults: list[str] = []
        self.outcomes: Counter[str] = Counter()

    def run(self, num_inputs: int) -> None:
        """Damages files of a server and of a client in turn."""
        with TemporaryDirectory(prefix="tdserve-fuzz-") as made:
            folder = Path(made)
            make_authority(folder, 2)
            make_certificate(folder, "server", ["localhost"], 2)
            make_certificate(folder, "client", [], 2)
            for number in range(num_inputs):
                is_server = number % 2 == 0
                name = self.inputs.rng.choice(SERVER_FILES if is_server else CLIENT_FILES)
                path, whole = folder / name, (folder / name).read_bytes()
                try:
                    path.write_bytes(self._spoil(whole, folder))
                    self._try(name, path, lambda: (_serve if is_server else _connect)(folder), is_server=is_server)  # noqa: B023
                finally:
                    path.write_bytes(whole)

    def _spoil(self, content: bytes, folder: Path) -> bytes:
        kind = self.inputs.rng.randrange(6)
        if kind == 0:
            return (folder / self.inputs.rng.choice((*SERVER_FILES, *CLIENT_FILES))).read_bytes()
        return content + self.inputs.make_bytes() if kind == 1 else self.inputs.mutate(content)

    def _try(self, name: str, path: Path, use: Callable[[], str], *, is_server: bool) -> None:
        end = "server" if is_server else "client"
        try:
            outcome = use()
        except InvalidRequestError as error:
            outcome = "refused"
            if "\n" in str(error) or str(path) not in str(error):
                self.faults.append(f"{end}: {name}: {error}: {path.read_bytes()!r}")
        except BaseException as fault:  # noqa: BLE001 (it is what this looks for)
            outcome = f"fault: {type(fault).__name__}"
            self.faults.append(f"{end}: {name}: {fault!r}: {path.read_bytes()!r}")
        self.outcomes[f"{end}: {name}: {outcome}"] += 1


def _serve(folder: Path) -> str:
    """Serves with the files; returns what a handshake ends as, which trusts any certificate."""
    cert, key, ca = (str(folder / name) for name in SERVER_FILES)
    certificates = ServerCertificates(cert, key, ca)
    with ThreadPoolExecutor(1) as threads:
        server: Any = grpc.server(threads)
        port = certificates.bind(server, f"{HOST}:0")
        server.start()
        try:
            return _shake_hands(port, folder)
        finally:
            server.stop(0).wait()


def _shake_hands(port: int, folder: Path) -> str:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(ALPN)
    context.load_cert_chain(folder / "client.pem", folder / "client.key")
    with (
        socket.create_connection((HOST, port), TIMEOUT_S) as plain,
        context.wrap_socket(plain, server_hostname="localhost"),
    ):
        return "serves"


def _connect(folder: Path) -> str:
    """Opens a channel with the files."""
    cert, key, ca = (folder / name for name in CLIENT_FILES)
    open_grpc_channel("localhost:1", TLS(ca, cert, key), []).close()
    return "opens"
