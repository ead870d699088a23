from __future__ import annotations

import dataclasses
import math
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, Event
from typing import Any

import pytest

from tdserve.base import config
from tdserve.base.config import (
    ClientConfig,
    ServerConfig,
    build_single_threaded_environment,
    hold_variable,
    read_token,
    set_variables,
)
from tdserve.base.errors import InvalidRequestError
from tdserve.base.server_options import parse_bytes


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "[::1]", "localhost"])
def test_validate_when_loopback_then_needs_no_token(host: str) -> None:
    cfg = ServerConfig("data", host=host)
    assert cfg.validate() is cfg


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org", "127.0.0.1.evil.org"])
def test_validate_when_others_can_reach_it_then_needs_token_or_insecure(host: str) -> None:
    with pytest.raises(InvalidRequestError, match="insecure") as caught:
        ServerConfig("data", host=host).validate()
    assert caught.value.argument == "host"
    ServerConfig("data", host=host, token_file="token").validate()
    ServerConfig("data", host=host, insecure=True).validate()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("root", ""),
        ("root", "a\0b"),
        ("host", ""),
        ("host", 5),
        ("host", None),
        ("host", " 127.0.0.1"),
        ("host", "127.0.0.1:5"),
        ("host", "[::1]:5"),
        ("port", -1),
        ("port", 65536),
        ("port", True),
        ("num_workers", 0),
        ("inline_bytes", -1),
        ("inline_bytes", 1 << 30),
        ("grace_s", -1.0),
        ("grace_s", math.nan),
        ("transfer_timeout_s", 0.0),
        ("transfer_timeout_s", math.inf),
        ("worker_timeout_s", 1.0),
        ("worker_timeout_s", math.inf),
        ("umask", 0o1000),
        ("adoptable", ("data",)),
        ("adopt", ("/data",)),
        ("adopt", ("data=x",)),
        ("adopt", ("/a,b=x",)),
        ("advertise", "tcp://here"),
        ("advertise", "here:0"),
        ("advertise", "here:http"),
        ("advertise", ""),
        ("log_level", "loud"),
        ("log_format", "xml"),
        ("sync_interval_s", -1.0),
        ("metrics_port", 70_000),
        ("metrics_host", "here:80"),
        ("trace_endpoint", "127.0.0.1:4318"),
        ("metrics_host", "10.0.0.8"),
    ],
)
def test_validate_when_one_setting_cannot_be_then_names_it(name: str, value: Any) -> None:
    cfg = dataclasses.replace(ServerConfig("data"), **{name: value})
    with pytest.raises(InvalidRequestError) as caught:
        cfg.validate()
    assert caught.value.argument == name


def test_from_env_when_every_variable_is_set_then_every_field_has_it() -> None:
    expected: dict[str, Any] = {
        "root": "/srv",
        "host": "0.0.0.0",
        "port": 1234,
        "num_workers": 3,
        "devices": ("cuda:0", "cuda:2", "cuda:1"),
        "token_file": "/run/token",
        "tokens_file": "/run/tokens.json",
        "insecure": True,
        "tls_cert": "/run/server.pem",
        "tls_key": "/run/server.key",
        "tls_client_ca": "/run/ca.pem",
        "trusted_network": "10.0.0.0/8",
        "one_port": True,
        "advertise": "here:99",
        "interface": "10.0.0.7",
        "grace_s": 1.5,
        "transfer_timeout_s": 2.5,
        "worker_timeout_s": 3.5,
        "inline_bytes": 10,
        "memory_limit_bytes": 1 << 21,
        "log_level": "debug",
        "log_format": "json",
        "umask": 7,
        "adoptable": ("/data", "/more data"),
        "adopt": ("/data/a=x", "/data/b=y:ro"),
        "sync_interval_s": 4.5,
        "metrics_port": 77,
        "metrics_host": "10.0.0.8",
        "trace_endpoint": "http://collector:4318",
        "checkpoint_every_s": 600.0,
        "checkpoint_to": "s3://bucket/run",
        "checkpoint_keep": 5,
    }
    environ = {f"TDSERVE_{name.upper()}": str(value) for name, value in expected.items()}
    environ["TDSERVE_DEVICES"] = "cuda:0, cuda:2,cuda:1"
    environ["TDSERVE_CHECKPOINT_EVERY_S"] = "10min"
    environ["TDSERVE_ADOPTABLE"] = "/data:/more data/../more data"
    environ["TDSERVE_ADOPT"] = "/data/a=x,/data/b=y:ro"
    assert dataclasses.asdict(ServerConfig.from_env(environ)) == expected


@pytest.mark.parametrize(
    ("settings", "argument"),
    [
        ({"checkpoint_every_s": 60.0}, "checkpoint_to"),
        ({"checkpoint_every_s": 60.0, "checkpoint_to": ""}, "checkpoint_to"),
        ({"checkpoint_to": "place"}, "checkpoint_every_s"),
        ({"checkpoint_to": "place", "checkpoint_every_s": 0.0}, "checkpoint_every_s"),
        ({"checkpoint_to": "place", "checkpoint_every_s": 60.0, "checkpoint_keep": 0}, "checkpoint_keep"),
    ],
)
def test_validate_when_checkpoints_lack_a_setting_then_names_it(settings: dict[str, Any], argument: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        ServerConfig("data", **settings).validate()
    assert caught.value.argument == argument
    ServerConfig("data", checkpoint_to="place", checkpoint_every_s=60.0).validate()


def test_from_env_when_a_field_is_given_then_it_wins_and_none_does_not() -> None:
    environ = {"TDSERVE_ROOT": "/env", "TDSERVE_PORT": "1", "TDSERVE_HOST": ""}
    cfg = ServerConfig.from_env(environ, root="/said", port=None)
    assert (cfg.root, cfg.port, cfg.host) == ("/said", 1, "127.0.0.1")


def test_from_env_when_port_zero_is_given_then_it_wins() -> None:
    assert ServerConfig.from_env({"TDSERVE_PORT": "1"}, root="r", port=0).port == 0


@pytest.mark.parametrize(("variable", "text"), [("PORT", "many"), ("INSECURE", "maybe"), ("GRACE_S", "x")])
def test_from_env_when_a_value_does_not_parse_then_names_the_variable(variable: str, text: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        ServerConfig.from_env({f"TDSERVE_{variable}": text}, root="r")
    assert caught.value.argument == f"TDSERVE_{variable}"


def test_from_env_when_the_root_is_not_set_then_refused() -> None:
    with pytest.raises(InvalidRequestError, match="TDSERVE_ROOT"):
        ServerConfig.from_env({})


def test_from_env_when_a_setting_is_unknown_then_refused() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        ServerConfig.from_env({}, root="r", prot=1)
    assert caught.value.argument == "prot"


def test_from_env_when_no_mapping_is_given_then_reads_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TDSERVE_ROOT", "/from/process")
    assert ServerConfig.from_env().root == "/from/process"


def test_client_from_env_when_set_then_used_and_token_stays_out_of_repr() -> None:
    cfg = ClientConfig.from_env({"TDSERVE_ADDRESS": "a:1", "TDSERVE_TOKEN": "s3cret", "TDSERVE_TRANSPORT": "gloo"})
    assert (cfg.address, cfg.token, cfg.transport) == ("a:1", "s3cret", "gloo")
    assert "s3cret" not in repr(cfg)


def test_client_from_env_when_unset_then_the_default_server() -> None:
    assert ClientConfig.from_env({}) == ClientConfig("127.0.0.1:7707", token=None, transport="auto")


@pytest.mark.parametrize(
    ("environ", "address"),
    [
        ({"TDSERVE_ADDRESS": "a:1", "TDSERVE_HOST": "b", "TDSERVE_PORT": "2"}, "a:1"),
        ({"TDSERVE_HOST": "0.0.0.0", "TDSERVE_PORT": "2"}, "127.0.0.1:2"),
        ({"TDSERVE_HOST": "::"}, "[::1]:7707"),
        ({"TDSERVE_HOST": "10.0.0.7", "TDSERVE_PORT": "0"}, "10.0.0.7:7707"),
    ],
)
def test_client_from_env_when_beside_a_server_then_its_address(environ: dict[str, str], address: str) -> None:
    assert ClientConfig.from_env(environ).address == address


def test_client_from_env_when_every_variable_is_set_then_every_field_has_it() -> None:
    expected = {
        "address": "a:1",
        "token": "t",
        "token_file": "/run/token",
        "transport": "shm",
        "local_root": "/data",
        "interface": "eth0",
        "tls_ca": "/run/ca.pem",
        "tls_cert": "/run/client.pem",
        "tls_key": "/run/client.key",
    }
    environ = {f"TDSERVE_{name.upper()}": value for name, value in expected.items()}
    assert dataclasses.asdict(ClientConfig.from_env(environ)) == expected


def test_client_interface_when_set_then_that_and_else_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TDSERVE_INTERFACE", raising=False)
    assert config.read_client_interface() is None
    monkeypatch.setenv("TDSERVE_INTERFACE", "eth7")
    assert config.read_client_interface() == "eth7"


def test_from_env_when_defaults_are_given_then_variables_win() -> None:
    cfg = ServerConfig.from_env({"TDSERVE_PORT": "1"}, defaults={"port": 2, "host": "h", "umask": None}, root="r")
    assert (cfg.port, cfg.host, cfg.umask) == (1, "h", None)


def test_client_from_env_when_transport_is_unknown_then_refused() -> None:
    with pytest.raises(InvalidRequestError, match="carrier-pigeon"):
        ClientConfig.from_env({"TDSERVE_TRANSPORT": "carrier-pigeon"})


@pytest.mark.parametrize("kind", [ServerConfig, ClientConfig])
def test_from_env_when_a_variable_of_any_field_is_set_then_it_is_read(kind: type[ServerConfig | ClientConfig]) -> None:
    def is_read(name: str) -> bool:
        root = {"TDSERVE_ROOT": "r"}
        try:
            found = kind.from_env({**root, f"TDSERVE_{name.upper()}": "17"})
        except InvalidRequestError as error:
            return name in str(error.fields["argument"]).lower()
        return bool(getattr(found, name) != getattr(kind.from_env(root), name))

    assert [entry.name for entry in dataclasses.fields(kind) if not is_read(entry.name)] == []


def test_child_environment_when_read_by_the_child_then_the_same_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TDSERVE_TOKEN_FILE", "of/the/parent")
    monkeypatch.setenv("HOME", "/home/x")
    devices = ("cuda:0", "cuda:1")
    cfg = ServerConfig("data", port=0, insecure=True, grace_s=0.25, num_workers=2, devices=devices, umask=0o027)
    cfg = dataclasses.replace(cfg, adoptable=("/a", "/b"), adopt=("/a/x=x", "/b=y=y:ro"))
    environ = cfg.build_child_environment()
    assert ServerConfig.from_env(environ) == cfg
    assert environ["HOME"] == "/home/x"


def test_child_environment_when_the_user_has_set_the_verbosity_of_grpc_then_it_stays_else_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("GRPC_VERBOSITY", raising=False)
    assert ServerConfig("data").build_child_environment()["GRPC_VERBOSITY"] == "NONE"
    monkeypatch.setenv("GRPC_VERBOSITY", "INFO")
    assert ServerConfig("data").build_child_environment()["GRPC_VERBOSITY"] == "INFO"


@pytest.mark.parametrize(
    ("text", "nbytes"), [("4096", 4096), ("512M", 512 << 20), ("2GiB", 2 << 30), ("1.5kb", 1536), ("1T", 1 << 40)]
)
def test_parse_bytes_when_with_or_without_a_unit_then_that_many(text: str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "many", "M", "12X", "1.5", "infG", "1e400G", "nanG", "inf"])
def test_parse_bytes_when_it_is_none_then_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"invalid literal|could not convert"):
        parse_bytes(text)


def test_validate_when_a_umask_is_none_then_shown_as_it_is_written() -> None:
    with pytest.raises(InvalidRequestError, match="7777 is not an octal mask from 000 to 777"):
        ServerConfig("data", umask=0o7777).validate()


@pytest.mark.parametrize("device", ["cuda", "cuda:", "cuda:-1", "cuda:01", "cpu", "0", "", " cuda:0"])
def test_validate_when_a_device_is_no_gpu_with_its_number_then_refused(device: str) -> None:
    with pytest.raises(InvalidRequestError, match="cuda:0"):
        ServerConfig("data", devices=(device,)).validate()


@pytest.mark.parametrize("num_workers", [1, 3])
def test_validate_when_devices_are_not_one_per_worker_then_refused(num_workers: int) -> None:
    with pytest.raises(InvalidRequestError, match="one for each"):
        ServerConfig("data", devices=("cuda:0", "cuda:1"), num_workers=num_workers).validate()


def test_from_env_when_only_devices_are_given_then_a_worker_for_each() -> None:
    assert ServerConfig.from_env({}, root="data", devices=("cuda:0", "cuda:1")).validate().num_workers == 2
    assert ServerConfig.from_env({}, root="data").num_workers == 1


def test_set_variables_when_the_user_has_set_one_then_it_stays_and_the_others_are_set_for_good(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TDSERVE_TEST_HIS", "his")
    monkeypatch.setenv("TDSERVE_TEST_OURS", "")
    monkeypatch.delenv("TDSERVE_TEST_OURS")
    for _ in range(2):
        set_variables({"TDSERVE_TEST_HIS": "0", "TDSERVE_TEST_OURS": "0"})
        assert os.environ["TDSERVE_TEST_HIS"] == "his"
        assert os.environ["TDSERVE_TEST_OURS"] == "0"


@pytest.mark.parametrize("value", [None, "his"])
def test_variable_set_when_blocks_of_threads_overlap_then_it_is_set_in_all_and_as_before_afterwards(
    monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    monkeypatch.setenv("TDSERVE_TEST", value or "")
    if value is None:
        monkeypatch.delenv("TDSERVE_TEST")
    begun, is_left = Barrier(3), Event()

    def look(waits: bool) -> list[str | None]:
        with hold_variable("TDSERVE_TEST", "0"):
            begun.wait(20.0)
            if waits:
                assert is_left.wait(20.0)
            return [os.environ.get("TDSERVE_TEST")]

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.submit(look, False), threads.submit(look, True)
        begun.wait(20.0)
        found = first.result(20.0)
        is_left.set()
        assert found + second.result(20.0) == [value or "0"] * 2
    assert os.environ.get("TDSERVE_TEST") == value


def test_single_threaded_environment_when_made_then_as_this_one_but_for_threads() -> None:
    assert build_single_threaded_environment() == {**os.environ, "OPENBLAS_NUM_THREADS": "1"}


def test_token_when_file_ends_with_a_line_feed_then_it_is_no_part_of_it(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    assert read_token(tmp_path / "token", "--token-file") == "secret"


@pytest.mark.parametrize(("content", "reason"), [(b"", "empty"), (b" \n", "empty"), (b"\xff\xfe", "cannot read")])
def test_token_when_file_holds_none_then_error_names_the_file(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "token").write_bytes(content)
    with pytest.raises(InvalidRequestError, match=reason) as caught:
        read_token(tmp_path / "token", "--token-file")
    assert str(tmp_path / "token") in caught.value.reason


def test_token_when_file_is_missing_then_error_names_it(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="missing"):
        read_token(tmp_path / "missing", "--token-file")
