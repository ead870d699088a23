"""``tdserve certs DIR``: certificates for trying TLS out, made by the openssl command."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import click

from tdserve.base.errors import InvalidRequestError, NotSupportedError
from tdserve.cli.screen.render import print_json

DAYS = 365
"""Long enough for a project, too short to be forgotten for ever."""

OPENSSL_TIMEOUT_S = 60.0
"""Time for one certificate; it takes some ten milliseconds."""

STEMS = ("ca", "server", "client")
"""Names of the files: ``STEM.pem`` is a certificate, ``STEM.key`` its private key."""

_CONFIG = "[req]\ndistinguished_name = name\n[name]\n"
_HOST_NAME = re.compile(r"[\w*][\w.*-]*")
_EVERYWHERE = ("localhost", "127.0.0.1", "::1")


@click.command()
@click.argument("folder", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
@click.option("--host", "hosts", multiple=True, metavar="NAME", help="Name or address of the server; repeatable.")
@click.option("--days", type=click.IntRange(1), default=DAYS, show_default=True, help="How long they are valid.")
@click.option("--force", is_flag=True, help="Replace the server's and the client's; the authority stays.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document: the files and the names.")
def certs(folder: Path, hosts: tuple[str, ...], days: int, force: bool, as_json: bool) -> None:
    """Make an authority, a certificate of a server and one of a client in DIR, to try TLS out.

    The server's is for localhost, this machine's name, and each --host. With ca.key anyone can make others: for
    production take your own authority.
    """
    for host in hosts:
        if not (_is_address(host) or _HOST_NAME.fullmatch(host)):
            reason = f"{host!r} is no name or address of a server (without a port)"
            raise InvalidRequestError(argument="--host", reason=reason)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    names = dict.fromkeys((*_EVERYWHERE, socket.gethostname(), *hosts))
    if not (folder / "ca.pem").exists():
        make_authority(folder, days)
    elif not force:
        reason = f"{folder} has certificates; --force replaces those of the server and the client"
        raise InvalidRequestError(argument="DIR", reason=reason)
    make_certificate(folder, "server", list(names), days)
    make_certificate(folder, "client", [], days)
    if as_json:
        files = {stem: {"cert": str(folder / f"{stem}.pem"), "key": str(folder / f"{stem}.key")} for stem in STEMS}
        print_json({**files, "hosts": list(names), "days": days})
        return
    click.echo(f"tdserve serve ... --tls-cert {folder}/server.pem --tls-key {folder}/server.key")
    click.echo(f"    and to ask clients for a certificate: --tls-client-ca {folder}/ca.pem")
    click.echo(f'tdserve.connect(..., tls=tdserve.TLS(ca="{folder}/ca.pem"))')
    click.echo(f'    and with one: cert="{folder}/client.pem", key="{folder}/client.key"')
    click.echo(f"commands: TDSERVE_TLS_CA={folder}/ca.pem TDSERVE_TLS_CERT=... TDSERVE_TLS_KEY=...")


def make_authority(folder: Path, days: int) -> None:
    """Makes ``ca.pem`` and ``ca.key`` in a folder; errors as in ``make_certificate``."""
    extensions = ["basicConstraints=critical,CA:TRUE", "keyUsage=critical,keyCertSign,cRLSign"]
    _make(folder, "ca", "tdserve development authority", [*extensions, "subjectKeyIdentifier=hash"], days, ())


def make_certificate(folder: Path, stem: str, hosts: Sequence[str], days: int) -> None:
    """Makes a certificate and its key, signed by the authority in the same folder.

    Args:
        folder: It gets ``STEM.pem`` and ``STEM.key``.
        stem: Its name, and the subject's.
        hosts: Names and addresses of a server; empty for a client.
        days: How long it is valid; at least 1.

    Raises:
        NotSupportedError: There is no openssl command, or it fails.
    """
    uses = "serverAuth,clientAuth" if hosts else "clientAuth"  # commands beside a server may use the server's
    alternatives = ",".join(f"{'IP' if _is_address(host) else 'DNS'}:{host}" for host in hosts) or f"DNS:{stem}"
    extensions = ["basicConstraints=CA:FALSE", f"extendedKeyUsage={uses}", f"subjectAltName={alternatives}"]
    signer = ("-CA", str(folder / "ca.pem"), "-CAkey", str(folder / "ca.key"))
    _make(folder, stem, f"tdserve {stem}", extensions, days, signer)


def _make(folder: Path, stem: str, name: str, extensions: Sequence[str], days: int, signer: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as unfinished:
        config, key, cert = (Path(unfinished) / each for each in ("config", "key", "cert"))
        config.write_text(_CONFIG)
        command = ["openssl", "req", "-x509", "-config", str(config), "-subj", f"/CN={name}", "-days", str(days)]
        command += ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", *signer]
        command += [part for extension in extensions for part in ("-addext", extension)]
        command += ["-keyout", str(key), "-out", str(cert)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=OPENSSL_TIMEOUT_S)
        except FileNotFoundError as fault:
            reason = "it needs the openssl command (apt install openssl)"
            raise NotSupportedError(feature="tdserve certs", reason=reason) from fault
        except subprocess.SubprocessError as fault:
            reason = f"openssl fails: {str(getattr(fault, 'stderr', '') or fault).strip()[-300:]}"
            raise NotSupportedError(feature="tdserve certs", reason=reason) from fault
        key.chmod(0o600)
        os.replace(key, folder / f"{stem}.key")
        os.replace(cert, folder / f"{stem}.pem")


def _is_address(host: str) -> bool:
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, host)
            return True
        except OSError:
            continue
    return False
