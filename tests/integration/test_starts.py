"""A command that cannot start prints the reason in one line and exits. Variables can set every option too."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import pytest
import torch
from tensordict import TensorDict

import tdserve
from tdserve.cli.serving.certs import make_authority, make_certificate
from tdserve.cli.serving.serve import serve
from tdserve.cli.shell.exit_codes import FAILED, NO_ANSWER, REFUSED
from tdserve.server.start_lines import READY_PREFIX
from tests.processes import REPOSITORY, alarm, open_files, quiet_port

pytestmark = pytest.mark.integration

needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None or shutil.which("unshare") is None,
    reason="needs root, setpriv and unshare",
)


def user(uid: int, gid: int) -> tuple[str, ...]:
    """Returns a prefix that runs a command as another user, who can still read the interpreter wherever it is
    installed."""
    reads = ("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")
    return ("setpriv", f"--reuid={uid}", f"--regid={gid}", "--clear-groups", *reads)


def run(*arguments: object, prefix: Sequence[str] = (), **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs ``tdserve`` and waits for its end, which must come soon."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TDSERVE_")}
    return subprocess.run(
        [*prefix, sys.executable, "-m", "tdserve", *map(str, arguments)],
        cwd=REPOSITORY,
        env={**environ, **{f"TDSERVE_{name}": value for name, value in variables.items()}},
        capture_output=True,
        text=True,
        timeout=60.0,
        check=False,
    )


def check_refused(done: subprocess.CompletedProcess[str], *words: object, code: int = FAILED) -> None:
    """Checks that it failed and printed the reason in one line."""
    assert done.returncode == code, done.stderr
    assert done.stderr.startswith("tdserve: ")
    assert done.stderr.count("\n") == 1, done.stderr
    for word in words:
        assert str(word) in done.stderr


@pytest.mark.slow
def test_serve_when_the_port_is_in_use_then_refused_by_the_port(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        check_refused(run("serve", tmp_path, PORT=str(port)), f"127.0.0.1:{port}", "in use", "--port 0")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"HOST": "0.0.0.0"}, ["'0.0.0.0'", "--token-file", "--insecure"]),
        ({"HOST": "no-such-name.invalid", "INSECURE": "1"}, ["no-such-name.invalid"]),
        ({"HOST": "192.0.2.1", "INSECURE": "1"}, ["192.0.2.1", "assign"]),
        ({"ADVERTISE": "tcp://here:1"}, ["advertise", "tcp://here:1"]),
        ({"INTERFACE": "eth77"}, ["interface", "eth77"]),
        ({"TOKEN_FILE": "/no/such/file"}, ["/no/such/file"]),
        ({"UMASK": "rwx"}, ["TDSERVE_UMASK", "rwx"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_serve_when_a_setting_cannot_be_then_refused_by_its_value(
    tmp_path: Path, variables: dict[str, str], words: list[str]
) -> None:
    check_refused(run("serve", tmp_path / "root", "--port", "0", **variables), *words)


@pytest.mark.slow
def test_serve_when_the_root_is_of_a_newer_version_then_refused_and_left_as_it_is(tmp_path: Path) -> None:
    said = json.dumps({"format_version": 99, "server_id": "x"})
    (tmp_path / "tdserve.json").write_text(said)
    check_refused(run("serve", tmp_path, "--port", "0"), tmp_path, "99", "newer")
    assert (tmp_path / "tdserve.json").read_text() == said


@pytest.mark.slow
@needs_root
def test_serve_when_its_user_may_not_write_the_root_then_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    check_refused(run("serve", tmp_path, "--port", "0", prefix=user(65534, 65534)), tmp_path, "Permission denied")


@pytest.mark.slow
@needs_root
def test_serve_when_the_volume_is_full_then_refused(tmp_path: Path) -> None:
    mounted = ("unshare", "-m", "sh", "-c", f'mount -t tmpfs -o size=4k none {tmp_path} && exec "$@"', "sh")
    check_refused(run("serve", tmp_path, "--port", "0", prefix=mounted), tmp_path, "no room")


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tdserve.Server]:
    """A server with a token."""
    folder = tmp_path_factory.mktemp("guarded")
    (folder / "token").write_text("secret\n")
    with tdserve.Server(folder / "root", token_file=str(folder / "token")) as started:
        yield started


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "variables"),
    [
        (("ls",), {"TOKEN": "wrong"}),
        pytest.param(("demo", "--role", "learner"), {}, marks=pytest.mark.full),
        pytest.param(("ls",), {}, marks=pytest.mark.full),
        pytest.param(("demo", "--role", "learner"), {"TOKEN": "wrong"}, marks=pytest.mark.full),
    ],
)
def test_client_when_its_token_is_not_the_servers_then_refused_by_the_address_it_used(
    guarded: tdserve.Server, command: tuple[str, ...], variables: dict[str, str]
) -> None:
    address = guarded.address.replace("127.0.0.1", "localhost")
    code = REFUSED if command[0] == "ls" else FAILED
    check_refused(run(*command, ADDRESS=address, **variables), address, "token", code=code)


@pytest.mark.slow
def test_client_when_the_token_file_is_named_by_a_variable_then_let_in(guarded: tdserve.Server) -> None:
    done = run("ls", ADDRESS=guarded.address, TOKEN_FILE=str(guarded.config.token_file))
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_client_when_the_name_does_not_resolve_then_one_line_names_it() -> None:
    done = run("ls", "--address", "no-such-name.invalid:7707")
    assert done.returncode == NO_ANSWER
    lines = done.stderr.splitlines()  # a notice comes first where the resolver takes long
    assert lines[-1].startswith("tdserve: ")
    assert all("'no-such-name.invalid' does not resolve" in line for line in lines)


SAID: dict[str, str] = {
    "--host": "localhost",
    "--port": "PORT",
    "--workers": "2",
    "--token-file": "TOKEN",
    "--tokens": "TOKENS",
    "--tls-cert": "CERT",
    "--tls-key": "KEY",
    "--tls-client-ca": "CA",
    "--trusted-network": "127.0.0.0/8",
    "--one-port": "1",
    "--trace-endpoint": "http://127.0.0.1:9/v1/traces",
    "--device": "cuda:0,cuda:1",
    "--insecure": "1",
    "--advertise": "example.org:99",
    "--interface": "lo",
    "--grace": "3",
    "--transfer-timeout": "7",
    "--worker-timeout": "8",
    "--inline-bytes": "100",
    "--memory-limit": "64M",
    "--umask": "027",
    "--sync-interval": "5",
    "--log-level": "warning",
    "--log-format": "json",
    "--metrics-port": "PORT",
    "--metrics-host": "localhost",
    "--checkpoint-every": "1h",
    "--checkpoint-to": "PLACE",
    "--checkpoint-keep": "2",
    "--adopt": "ADOPTED=adopted:ro",
    "--adoptable": "/var/empty",
}
"""A value for each option of ``tdserve serve``, and for its variable."""


@pytest.mark.slow
def test_serve_when_every_option_is_a_variable_then_it_does_the_same(tmp_path: Path) -> None:
    options = {option.opts[0]: str(option.name) for option in serve.params if isinstance(option, click.Option)}
    assert {*SAID, "--config"} == set(options), "each option has a case here"
    (tmp_path / "token").write_text("secret")
    (tmp_path / "tokens").write_text('{"tokens": []}')
    TensorDict({"x": torch.ones(3)}, [3]).save(tmp_path / "adopted")
    values = {**SAID, "--token-file": str(tmp_path / "token"), "--adopt": f"{tmp_path / 'adopted'}=adopted:ro"}
    values["--tokens"] = str(tmp_path / "tokens")
    make_authority(tmp_path, 1)
    make_certificate(tmp_path, "both", ["localhost"], 1)
    tls = tdserve.TLS(tmp_path / "ca.pem", tmp_path / "both.pem", tmp_path / "both.key")
    values |= {"--tls-cert": str(tls.cert), "--tls-key": str(tls.key), "--tls-client-ca": str(tls.ca)}
    values["--checkpoint-to"] = str(tmp_path / "place")
    metrics_port, port = quiet_port(), quiet_port()
    values |= {"--metrics-port": str(metrics_port), "--port": str(port)}
    environ = {f"TDSERVE_{options[option].upper()}": value for option, value in values.items()}
    environ["TDSERVE_ROOT"] = str(tmp_path / "root")
    command = [sys.executable, "-m", "tdserve", "serve"]
    with subprocess.Popen(
        command, cwd=REPOSITORY, env={**os.environ, **environ}, stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None
            with alarm(60.0, "the ready line"):
                assert server.stdout.readline() == f"{READY_PREFIX}example.org:99\n"
            holder = json.loads((tmp_path / "root" / "tdserve.lock").read_text())
            assert holder["address"] == "example.org:99"
            assert (tmp_path / "root" / "catalog").stat().st_mode & 0o777 == 0o750
            assert {port, metrics_port} <= listening_ports(server.pid)
            with tdserve.connect(f"localhost:{port}", token="secret", transport="auto", root="", tls=tls) as client:
                assert len(client.stats()["workers"]) == 2
                client.publish("x", TensorDict({"x": torch.zeros(10_000)}))
                assert client["adopted"]["x"].tolist() == [1.0] * 3
        finally:
            server.terminate()
    assert server.returncode == 0


def listening_ports(pid: int) -> set[int]:
    """Lists the TCP ports on which a process listens."""
    inodes = {found[1] for link in open_files(pid) if (found := re.fullmatch(r"socket:\[(\d+)\]", link))}
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and row[9] in inodes}


CLIENT_OF_ANOTHER_USER = """
import sys, tdserve, torch
from tensordict import TensorDict
with tdserve.connect(sys.argv[1], transport="shm", timeout_s=20.0) as client:
    row = TensorDict({"a": torch.zeros(3), "text": "t", "ragged": torch.zeros(2)}, [])
    replay = client.create_replay("r", like=row, capacity=100, exists_ok=True)
    replay.extend(row.expand(20))
    assert replay.sample(4)["text"] == ["t"] * 4
    client.init_remote(TensorDict({"a": torch.zeros(10)}, [10]), "t", exists_ok=True)
    client.send(TensorDict({"a": torch.ones(10)}, [10]), "t")
    for _ in range(6):  # more than are kept: each makes its file out of one that anybody has made
        client.publish("p", TensorDict({"a": torch.ones(100_000)}))
    print(client.stats()["transport"])
"""


@needs_root
@pytest.mark.full
def test_serve_when_the_umask_lets_the_group_write_then_its_local_clients_do(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    command = [*user(10001, 20000), sys.executable, "-m", "tdserve", "serve", str(tmp_path / "root"), "--port", "0"]
    with subprocess.Popen([*command, "--umask", "002"], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            with alarm(60.0, "the ready line"):
                address = server.stdout.readline().removeprefix(READY_PREFIX).strip()
            for uid in (10002, 10003):
                client = [*user(uid, 20000), sys.executable, "-c", CLIENT_OF_ANOTHER_USER, address]
                done = subprocess.run(client, cwd=REPOSITORY, capture_output=True, text=True, timeout=90, check=False)
                assert (done.returncode, done.stdout) == (0, "shm\n"), (uid, done.stderr)
        finally:
            server.terminate()
