"""TLS between real processes: who is refused and why, what a listener on the path sees, and new certificates."""

from __future__ import annotations

import os
import pickle
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from threading import Event, Thread
from typing import Any
from urllib.request import Request, urlopen

import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.cli.main import main
from tdserve.client.session.catalog.catalog_client import CatalogClient
from tests.integration.certificates import Certificates
from tests.integration.logged_server import run_server
from tests.processes import REPOSITORY
from tests.recording_proxy import recording
from tests.roots import make_quick_root

CERTIFICATE_REFUSED = "the server's certificate was refused"

SECRET = b"the words that nobody else may read, "
TOKEN = "a-token-that-nobody-else-may-read"


NEVER_S = 600.0
"""What a refused client would wait if it tried again."""


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def server(certificates: Certificates) -> Iterator[tdserve.Server]:
    """A server with TLS, which asks clients for no certificate."""
    with make_quick_root() as root, tdserve.Server(root, port=0, **certificates.server) as made:
        yield made


@pytest.fixture(scope="module")
def strict_server(certificates: Certificates) -> Iterator[tdserve.Server]:
    """A server that asks clients for certificates."""
    client_ca = str(certificates.folder / "ca.pem")
    with (
        make_quick_root() as root,
        tdserve.Server(root, port=0, tls_client_ca=client_ca, **certificates.server) as made,
    ):
        yield made


def make_secrets() -> TensorDict:
    secret = torch.frombuffer(bytearray(SECRET * 20_000), dtype=torch.uint8)
    return TensorDict({"large": secret, "small": secret[:100].clone(), "text": SECRET.decode()}, [])


@pytest.mark.slow
@pytest.mark.parametrize("is_encrypted", [True, False])
def test_content_when_recorded_on_the_way_then_unreadable_with_tls_alone(
    certificates: Certificates, tmp_path: Path, is_encrypted: bool
) -> None:
    token_file = tmp_path / "token"
    token_file.write_text(TOKEN)
    settings: dict[str, Any] = certificates.server if is_encrypted else {"one_port": True}
    tls = certificates.trusting if is_encrypted else None
    with (
        make_quick_root() as root,
        tdserve.Server(root, port=0, token_file=str(token_file), **settings) as served,
        recording(served.address) as proxy,
        tdserve.connect(proxy.address, transport="grpc", token=TOKEN, tls=tls) as client,
    ):
        secrets = make_secrets()
        client.init_remote(secrets, "secrets")
        found = client.from_remote_init("secrets")
        assert found is not None
        assert bool((found["large"] == secrets["large"]).all())
        replay = client.create_replay("rows", like=secrets, capacity=4)
        replay.extend(secrets.expand(2).clone())
        assert replay.sample(2)["text"][0] == SECRET.decode()
    assert len(proxy.recorded) > 2 * len(secrets["large"])
    for plain in (SECRET, TOKEN.encode(), b"secrets"):
        assert (plain in proxy.recorded) is not is_encrypted


def test_auto_when_the_server_has_tls_then_one_port_and_the_reason(
    server: tdserve.Server, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tdserve.client.session.channels.hello.read_boot_id", lambda: "another machine")
    with server.client(tls=certificates.trusting) as client:
        client.init_remote(TensorDict({"a": torch.arange(1_000_000)}, []), "auto")
        assert client["auto"]["a"][-1] == 999_999
        stats = client.stats()
        assert stats["transport"] == "grpc"
        assert "--trusted-network" in stats["why_not_gloo"]
        with pytest.raises(tdserve.NotSupportedError, match=r"group 'g'.*--trusted-network"):
            client.group("g", world_size=2, timeout_s=5.0)


@pytest.mark.slow
def test_gloo_when_the_server_has_tls_then_refused_by_name_but_in_a_trusted_network(
    server: tdserve.Server, certificates: Certificates
) -> None:
    with pytest.raises(tdserve.NotSupportedError, match=r"transport 'gloo'.*--trusted-network"):
        server.client(transport="gloo", tls=certificates.trusting)
    for trusted, transport in (("127.0.0.0/8", "gloo"), ("lo", "gloo"), ("10.0.0.0/8", "")):
        with (
            make_quick_root() as root,
            tdserve.Server(root, port=0, trusted_network=trusted, **certificates.server) as made,
        ):
            if not transport:
                with pytest.raises(tdserve.NotSupportedError, match=r"127\.0\.0\.1 does not come from"):
                    made.client(transport="gloo", tls=certificates.trusting)
                continue
            with made.client(transport="gloo", tls=certificates.trusting) as client:
                assert client.stats()["transport"] == transport


def test_local_client_when_the_server_has_tls_then_maps_its_files(
    server: tdserve.Server, certificates: Certificates
) -> None:
    with server.client(tls=certificates.trusting) as client:
        assert client.stats()["transport"] == "shm"


def test_client_when_the_authority_is_another_then_refused_with_the_reason(
    server: tdserve.Server, tmp_path: Path
) -> None:
    other = Certificates(tmp_path)
    with pytest.raises(tdserve.HandshakeRefusedError, match=CERTIFICATE_REFUSED):
        server.client(tls=other.trusting, timeout_s=NEVER_S)


@pytest.mark.slow
def test_client_when_the_name_is_another_then_refused_unless_it_is_expected(
    certificates: Certificates, tmp_path: Path
) -> None:
    certificates.make("elsewhere", hosts=["elsewhere.example"])
    with make_quick_root() as root, tdserve.Server(root, port=0, **certificates.find("elsewhere")) as made:
        with pytest.raises(tdserve.HandshakeRefusedError, match=CERTIFICATE_REFUSED):
            made.client(tls=certificates.trusting, timeout_s=NEVER_S)
        named = tdserve.TLS(certificates.folder / "ca.pem", server_name="elsewhere.example")
        with made.client(tls=named) as client:
            assert client.stores() == []


@pytest.mark.slow
def test_client_when_the_certificate_has_expired_then_refused_with_the_reason_and_the_server_logs_it(
    certificates: Certificates, tmp_path: Path
) -> None:
    certificates.make_expired("expired")
    cert, key = certificates.find("expired").values()
    with run_server(tmp_path / "log", "--tls-cert", cert, "--tls-key", key) as made:
        with pytest.raises(tdserve.HandshakeRefusedError, match="expired"):
            tdserve.connect(made.address, tls=certificates.trusting, timeout_s=NEVER_S)
        (line,) = [line for line in made.lines() if "will refuse the certificate" in line]
        assert line.endswith(f"{cert}: certificate has expired")
        certificates.make("expired")
        with tdserve.connect(made.address, tls=certificates.trusting) as client:
            assert client.stores() == []
        assert sum("will refuse" in line for line in made.lines()) == 1


def test_client_when_without_tls_then_refused_with_the_remedy(server: tdserve.Server) -> None:
    with pytest.raises(tdserve.HandshakeRefusedError, match=r"asks for TLS: pass tls=.*, or set TDSERVE_TLS_CA$"):
        server.client(timeout_s=NEVER_S)


@pytest.mark.slow
def test_client_when_its_own_certificate_is_missing_then_refused_with_the_remedy(
    strict_server: tdserve.Server, certificates: Certificates, tmp_path: Path
) -> None:
    with pytest.raises(tdserve.HandshakeRefusedError, match="asks for a client certificate"):
        strict_server.client(tls=certificates.trusting, timeout_s=NEVER_S)
    other = Certificates(tmp_path)
    foreign = tdserve.TLS(certificates.folder / "ca.pem", other.folder / "client.pem", other.folder / "client.key")
    with pytest.raises(tdserve.HandshakeRefusedError, match="client"):
        strict_server.client(tls=foreign, timeout_s=NEVER_S)
    with strict_server.client(tls=certificates.proving, transport="grpc") as client:
        assert client.stores() == []
        with pickle.loads(pickle.dumps(client)) as copy:
            assert copy.stores() == []


def test_commands_when_the_variables_name_the_files_then_they_connect(
    strict_server: tdserve.Server,
    certificates: Certificates,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TDSERVE_ADDRESS", strict_server.address)
    assert main(["health"]) == 1
    assert "asks for TLS" in capsys.readouterr().out
    monkeypatch.setenv("TDSERVE_TLS_CA", str(certificates.folder / "ca.pem"))
    monkeypatch.setenv("TDSERVE_TLS_CERT", str(certificates.folder / "client.pem"))
    monkeypatch.setenv("TDSERVE_TLS_KEY", str(certificates.folder / "client.key"))
    for command in (["health"], ["ls"], ["stats"]):
        assert main(command) == 0, capsys.readouterr().err
    with tdserve.connect(transport="grpc") as client:
        assert client.stores() == []


NO_TLS_LINE = "tdserve: no connection to {}: the server asks for TLS: set TDSERVE_TLS_CA\n"

NO_CERTIFICATE_LINE = (
    "tdserve: no connection to {}: the server asks for a client certificate: set TDSERVE_TLS_CA, TDSERVE_TLS_CERT and "
    "TDSERVE_TLS_KEY\n"
)

FOREIGN_LINE = f"tdserve: no connection to {{}}: {CERTIFICATE_REFUSED}: "


@pytest.mark.full
def test_commands_when_refused_then_one_line_names_the_variables(
    server: tdserve.Server, strict_server: tdserve.Server, certificates: Certificates, tmp_path: Path
) -> None:
    ca, other_ca = str(certificates.folder / "ca.pem"), str(Certificates(tmp_path).folder / "ca.pem")
    for address, variables, line in (
        (server.address, {}, NO_TLS_LINE),
        (strict_server.address, {"TDSERVE_TLS_CA": ca}, NO_CERTIFICATE_LINE),
        (server.address, {"TDSERVE_TLS_CA": other_ca}, FOREIGN_LINE),
    ):
        command = [sys.executable, "-m", "tdserve", "ls", "--address", address]
        environment = os.environ | variables
        done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode != 0
        assert done.stdout == ""
        assert done.stderr.startswith(line.format(address))
        assert done.stderr.count("\n") == 1, done.stderr


def test_catalog_when_the_handshake_is_refused_then_no_call_waits_for_its_deadline(
    strict_server: tdserve.Server, certificates: Certificates
) -> None:
    begun_s = time.monotonic()
    for tls in (None, certificates.trusting):
        with (
            CatalogClient(strict_server.address, tls=tls, timeout_s=300.0) as catalog,
            pytest.raises(tdserve.ConnectError, match=r"asks for .*TDSERVE_TLS_\w+$"),
        ):
            catalog.stores()
    assert time.monotonic() - begun_s < 100.0  # a third of one timeout


@pytest.mark.slow
def test_server_when_it_refuses_handshakes_then_its_log_stays_json(certificates: Certificates, tmp_path: Path) -> None:
    cert, key = certificates.server.values()
    options = ["--log-format", "json", "--tls-cert", cert, "--tls-key", key]
    with run_server(tmp_path / "log", *options, "--tls-client-ca", str(certificates.folder / "ca.pem")) as server:
        for tls in (None, certificates.trusting):
            with pytest.raises(tdserve.ConnectError, match="asks for"):
                tdserve.connect(server.address, tls=tls, timeout_s=2.0)
        with tdserve.connect(server.address, tls=certificates.proving) as client:
            assert client.stores() == []
        assert "serves" in server.entries()[0]["message"]  # every line is an entry


@pytest.mark.slow
def test_certificates_when_replaced_under_load_then_new_connections_get_them_and_no_call_fails(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    with (
        make_quick_root() as root,
        tdserve.Server(root, port=0, **certificates.server) as made,
        made.client(transport="grpc", tls=certificates.trusting) as client,
    ):
        row = TensorDict({"x": torch.zeros(50_000)}, [])
        replay = client.create_replay("rows", like=row, capacity=100)
        ends, failures, num_calls = Event(), [], 0

        def write() -> None:
            nonlocal num_calls
            try:
                while not ends.is_set():
                    replay.extend(row.expand(2).clone())
                    num_calls += 1
            except tdserve.TDServeError as error:
                failures.append(error)

        writing = Thread(target=write)
        writing.start()
        (tmp_path / "new").mkdir()
        replaced = Certificates(tmp_path / "new")
        old = tdserve.TLS(ca=tmp_path / "old.pem")
        (tmp_path / "old.pem").write_bytes((tmp_path / "ca.pem").read_bytes())
        for name in ("server.key", "server.pem"):  # for a moment the key is not the certificate's
            (tmp_path / "new" / name).replace(tmp_path / name)
        before = num_calls
        with made.client(transport="grpc", tls=replaced.trusting) as other:
            assert other.stores() == ["rows"]
        with pytest.raises(tdserve.ConnectError, match=CERTIFICATE_REFUSED):
            made.client(tls=old, timeout_s=2.0)
        ends.set()
        writing.join()
        assert failures == []
        assert num_calls >= before
        assert replay.extend(row.expand(2).clone()).numel() == 2


@pytest.mark.parametrize(
    ("settings", "argument"),
    [
        ({"tls_cert": "server.pem"}, "tls_cert"),
        ({"tls_cert": "server.pem", "tls_key": "client.key"}, "tls_cert"),
        ({"tls_cert": "server.key", "tls_key": "server.key"}, "tls_cert"),
        ({"tls_cert": "missing.pem", "tls_key": "server.key"}, "tls_cert"),
        ({"tls_client_ca": "ca.pem"}, "tls_client_ca"),
        ({"trusted_network": "lo"}, "trusted_network"),
        ({"tls_cert": "server.pem", "tls_key": "server.key", "metrics_port": 0}, "metrics_port"),
        ({"tls_cert": "server.pem", "tls_key": "server.key", "host": "0.0.0.0"}, "host"),
    ],
)
def test_server_when_its_settings_contradict_then_refused_by_name(
    certificates: Certificates, tmp_path: Path, settings: dict[str, Any], argument: str
) -> None:
    paths: dict[str, Any] = {
        name: str(certificates.folder / str(value)) if name.startswith("tls_") else value
        for name, value in settings.items()
    }
    with pytest.raises(tdserve.InvalidRequestError) as caught:
        tdserve.Server(tmp_path / "root", port=0, **paths)
    assert caught.value.argument == argument


def test_files_when_one_is_no_certificate_then_refused_by_its_name(certificates: Certificates, tmp_path: Path) -> None:
    garbage = tmp_path / "garbage.pem"
    garbage.write_text("-----BEGIN CERTIFICATE-----\nbm90aGluZw==\n-----END CERTIFICATE-----\n")
    with pytest.raises(tdserve.InvalidRequestError, match=r"garbage\.pem has no certificates of authorities"):
        tdserve.connect("127.0.0.1:1", tls=tdserve.TLS(ca=garbage))
    with pytest.raises(tdserve.InvalidRequestError, match=r"garbage\.pem with .*client\.key is not a certificate"):
        tdserve.connect(
            "127.0.0.1:1", tls=tdserve.TLS(certificates.folder / "ca.pem", garbage, certificates.proving.key)
        )
    with pytest.raises(tdserve.InvalidRequestError, match=r"tls_client_ca: .*garbage\.pem has no certificates"):
        tdserve.Server(tmp_path / "root", port=0, tls_client_ca=str(garbage), **certificates.server).start()


@pytest.mark.slow
def test_page_when_other_machines_reach_it_then_encrypted_and_its_certificate_is_read_again(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    token = tmp_path / "page-token"
    token.write_text(TOKEN)
    page: dict[str, Any] = {"metrics_host": "0.0.0.0", "metrics_port": 0, "token_file": str(token)}
    with (
        make_quick_root() as root,
        tdserve.Server(root, port=0, **page, **certificates.server) as server,
        tdserve.connect(server.address, token=TOKEN, tls=certificates.trusting) as client,
    ):
        place = "localhost", int(client.stats()["observer"].rpartition(":")[2])
        request = Request(f"https://localhost:{place[1]}/metrics", headers={"Authorization": f"Bearer {TOKEN}"})
        trusted = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
        with urlopen(request, context=trusted, timeout=30.0) as answer:
            assert b"tdserve_up 1.0" in answer.read()
        with pytest.raises((OSError, HTTPException)):
            urlopen(f"http://localhost:{place[1]}/health", timeout=30.0)
        before = ssl.get_server_certificate(place)
        certificates.make("server")
        assert ssl.get_server_certificate(place) != before
