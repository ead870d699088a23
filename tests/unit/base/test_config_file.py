"""tdserve/base/config_file.py: options in a file."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tdserve.base.config import ServerConfig
from tdserve.base.config_file import MAX_FILE_BYTES, read_config_file
from tdserve.base.errors import InvalidRequestError

EVERYTHING = """
[server]
root = "data"
host = "::1"
port = 1
num_workers = 2
devices = ["cuda:0", "cuda:1"]
token_file = "/etc/token"
tokens_file = "tokens.toml"
insecure = true
tls_cert = "server.pem"
tls_key = "/etc/server.key"
tls_client_ca = "/etc/ca.pem"
trusted_network = "lo"
one_port = true
advertise = "here:5"
interface = "lo"
grace_s = 3
transfer_timeout_s = 1.5
worker_timeout_s = 4.0
sync_interval_s = 0
inline_bytes = 10
memory_limit_bytes = "512M"
log_level = "debug"
log_format = "json"
umask = 0o002
adopt = ["old=new:ro", "/x=y"]
adoptable = ["."]
metrics_port = 7708
metrics_host = "::1"
trace_endpoint = "http://collector:4318"
checkpoint_every_s = "10min"
checkpoint_to = "place"
checkpoint_keep = 5
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the file is."""
    return tmp_path / "tdserve.toml"


def test_file_when_it_has_every_option_then_every_field_has_it(path: Path) -> None:
    path.write_text(EVERYTHING)
    folder = str(path.parent)
    expected = ServerConfig(
        root=f"{folder}/data",
        host="::1",
        port=1,
        num_workers=2,
        devices=("cuda:0", "cuda:1"),
        token_file="/etc/token",
        tokens_file=f"{folder}/tokens.toml",
        insecure=True,
        tls_cert=f"{folder}/server.pem",
        tls_key="/etc/server.key",
        tls_client_ca="/etc/ca.pem",
        trusted_network="lo",
        one_port=True,
        advertise="here:5",
        interface="lo",
        grace_s=3,
        transfer_timeout_s=1.5,
        worker_timeout_s=4.0,
        sync_interval_s=0,
        inline_bytes=10,
        memory_limit_bytes=512 << 20,
        log_level="debug",
        log_format="json",
        umask=0o002,
        adopt=(f"{folder}/old=new:ro", "/x=y"),
        adoptable=(folder,),
        metrics_port=7708,
        metrics_host="::1",
        trace_endpoint="http://collector:4318",
        checkpoint_every_s=600.0,
        checkpoint_to=f"{folder}/place",
        checkpoint_keep=5,
    )
    unset = [each.name for each in dataclasses.fields(expected) if getattr(expected, each.name) == each.default]
    assert unset == []
    assert ServerConfig.from_env({}, defaults=read_config_file(path)) == expected


def test_file_when_a_value_is_a_text_then_parsed_as_a_variable_is(path: Path) -> None:
    path.write_text('[server]\nport = "5"\ndevices = "cuda:0,cuda:1"\numask = "027"\ninsecure = "yes"\n')
    assert read_config_file(path) == {"port": 5, "devices": ("cuda:0", "cuda:1"), "umask": 0o27, "insecure": True}


def test_file_when_empty_then_no_option(path: Path) -> None:
    path.write_text("")
    assert read_config_file(path) == {}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[server]\nprot = 1", "unknown option 'prot'; did you mean 'root' or 'port'?"),
        ("[server]\nzzz = 1", "unknown option 'zzz'; there are root, host"),
        ("[servr]\nport = 1", "unknown table 'servr'; did you mean 'server'?"),
        ("port = 1", "unknown table 'port'; there are server"),
        ("server = 1", "'server' must be a table"),
        ('[server]\nport = "x"', "'x' is no value of port"),
        ("[server]\nport = true", "True is no value of port"),
        ("[server]\nport = 1.5", "1.5 is no value of port"),
        ("[server]\nhost = 1", "1 is no value of host"),
        ("[server]\ninsecure = 1", "1 is no value of insecure"),
        ("[server]\ngrace_s = [1]", "[1] is no value of grace_s"),
        ("[server]\nadopt = [1]", "[1] is no value of adopt"),
        ("[server", "is not TOML"),
        ("#" * (MAX_FILE_BYTES + 1), "has more than"),
    ],
)
def test_file_when_wrong_then_error_names_the_place(path: Path, text: str, reason: str) -> None:
    path.write_text(text)
    with pytest.raises(InvalidRequestError) as caught:
        read_config_file(path)
    assert str(path) in str(caught.value)
    assert reason in str(caught.value)


def test_file_when_it_is_no_text_then_error(path: Path) -> None:
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidRequestError, match="is not TOML"):
        read_config_file(path)


@pytest.mark.parametrize("name", ["nothing.toml", "."])
def test_file_when_it_cannot_be_read_then_error(tmp_path: Path, name: str) -> None:
    arguments: Any = tmp_path / name
    with pytest.raises(InvalidRequestError, match="cannot read"):
        read_config_file(arguments)


def test_file_when_a_place_is_a_url_then_as_it_is(path: Path) -> None:
    path.write_text('[server]\ncheckpoint_to = "s3://bucket/run"')
    assert read_config_file(path) == {"checkpoint_to": "s3://bucket/run"}
