"""The options of a server: one table, from which the command's options, the variables and the keys of a file come."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tdserve.base.adoptions import parse_adoptions, parse_folders

VARIABLE_PREFIX = "TDSERVE_"

_UNITS_S = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}

_TRUE = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


class ServerOption(NamedTuple):
    """One option.

    Attributes:
        name: The field of ``ServerConfig``, and its key in a file.
        flag: Flag of ``tdserve serve``; "" for the argument.
        parse: Makes the value of a text; raises ValueError or KeyError for an invalid text.
        metavar: Metavar of the flag; "" for one without a value.
        help: Help text of the flag.
        types: What a file may give, besides a text.
        parse_several: Makes the value of several texts, for a flag that is given once for each.
        is_path: Whether a text begins with a path, which a file may give relative to its own folder.
    """

    name: str
    flag: str
    parse: Callable[[str], Any]
    metavar: str
    help: str
    types: tuple[type, ...] = ()
    parse_several: Callable[[Sequence[str]], tuple[str, ...]] | None = None
    is_path: bool = False

    @property
    def variable(self) -> str:
        """The environment variable."""
        return VARIABLE_PREFIX + self.name.upper()


def parse_bytes(text: str) -> int:
    """Parses a number of bytes, such as ``1048576``, ``512M`` or ``2GiB``.

    Raises:
        ValueError: The text is not a number of bytes.
    """
    number = text.strip().lower().removesuffix("ib").removesuffix("b")
    factor = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}.get(number[-1:], 0)
    scaled = float(number[:-1]) * factor if factor else math.inf
    return int(scaled) if math.isfinite(scaled) else int(number)  # which "infg" is not


def parse_duration(text: str) -> float:
    """Parses a time such as ``90``, ``30s``, ``10min`` or ``1.5h``; returns seconds.

    Raises:
        ValueError, KeyError: The text is not a time.
    """
    number = text.strip().lower().rstrip("abcdefghijklmnopqrstuvwxyz")
    unit = text.strip().lower()[len(number) :]
    return float(number) * _UNITS_S[unit]


def parse_devices(text: str) -> tuple[str, ...]:
    """Parses names of devices, separated by commas: ``cuda:0,cuda:1``."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def parse_umask(text: str) -> int:
    """Parses a mask as shells write it, such as ``002``: octal.

    Raises:
        ValueError: The text is not an octal mask.
    """
    return int(text, 8)


def parse_flag(text: str) -> bool:
    """Parses yes or no. Raises KeyError for anything else."""
    return _TRUE[text.lower()]


def _parse_joined(
    parse: Callable[[str], tuple[str, ...]], separator: str
) -> Callable[[Sequence[str]], tuple[str, ...]]:
    return lambda texts: parse(separator.join(texts))


def _make_absolute(adoptions: Sequence[str]) -> tuple[str, ...]:
    return tuple(map(os.path.abspath, adoptions))


_INTEGER, _NUMBER = (int,), (int, float)

SERVER_OPTIONS = (
    ServerOption("root", "", str, "ROOT", "Folder that the server owns; created if it does not exist.", is_path=True),
    ServerOption("host", "--host", str, "TEXT", "Address to listen on; by default 127.0.0.1."),
    ServerOption("port", "--port", int, "INTEGER", "TCP port; by default 7707; 0 picks a free one.", _INTEGER),
    ServerOption("num_workers", "--workers", int, "N", "Data worker processes; by default 1.", _INTEGER),
    ServerOption(
        "devices",
        "--device",
        parse_devices,
        "cuda:N",
        "GPU of a data worker, for content by NCCL; given once per worker, or separated by commas.",
        parse_several=_parse_joined(parse_devices, ","),
    ),
    ServerOption(
        "token_file", "--token-file", str, "TEXT", "File with the token that every call must carry.", is_path=True
    ),
    ServerOption(
        "tokens_file",
        "--tokens",
        str,
        "FILE",
        "File of tokens with roles and limits, as tdserve token new makes them; read again when it changes.",
        is_path=True,
    ),
    ServerOption(
        "insecure", "--insecure", parse_flag, "", "Listen on other addresses than loopback without a token.", (bool,)
    ),
    ServerOption(
        "tls_cert", "--tls-cert", str, "FILE", "Certificate (PEM) to encrypt all that leaves the machine.", is_path=True
    ),
    ServerOption("tls_key", "--tls-key", str, "FILE", "Its private key.", is_path=True),
    ServerOption(
        "tls_client_ca",
        "--tls-client-ca",
        str,
        "FILE",
        "Authorities (PEM) one of which must have signed the certificate of every client.",
        is_path=True,
    ),
    ServerOption(
        "trusted_network",
        "--trusted-network",
        str,
        "INTERFACE|RANGE",
        "Where content may go unencrypted by gloo although there is TLS: eth1, or 10.0.0.0/8.",
    ),
    ServerOption(
        "one_port",
        "--one-port",
        parse_flag,
        "",
        "Clients reach nothing but the server's own port: content goes there too.",
        (bool,),
    ),
    ServerOption(
        "advertise",
        "--advertise",
        str,
        "HOST[:PORT]",
        "Name by which clients reach this server; does not open a port.",
    ),
    ServerOption(
        "interface",
        "--interface",
        str,
        "ADDRESS",
        "Interface for content, by address or name; by default the one that clients reach.",
    ),
    ServerOption(
        "grace_s",
        "--grace",
        float,
        "SECONDS",
        "Time for calls under way to end at shutdown; by default 10.",
        _NUMBER,
    ),
    ServerOption(
        "transfer_timeout_s",
        "--transfer-timeout",
        float,
        "SECONDS",
        "Ends a transfer without progress; by default 30.",
        _NUMBER,
    ),
    ServerOption(
        "worker_timeout_s",
        "--worker-timeout",
        float,
        "SECONDS",
        "Replaces a data worker that hangs; by default 10.",
        _NUMBER,
    ),
    ServerOption(
        "sync_interval_s",
        "--sync-interval",
        float,
        "SECONDS",
        "Time between syncs to the disk; by default 30; 0 syncs only at the end.",
        _NUMBER,
    ),
    ServerOption(
        "inline_bytes",
        "--inline-bytes",
        int,
        "N",
        "Largest payload that travels inside a message; by default 32768.",
        _INTEGER,
    ),
    ServerOption(
        "memory_limit_bytes",
        "--memory-limit",
        parse_bytes,
        "SIZE",
        "Limit for waiting requests and their content, such as 512M; by default 1G.",
        _INTEGER,
    ),
    ServerOption(
        "log_level",
        "--log-level",
        str,
        "LEVEL",
        "Lowest level to log: debug, info, warning, error; by default info.",
    ),
    ServerOption("log_format", "--log-format", str, "FORMAT", "Form of log lines: human or json; by default human."),
    ServerOption(
        "umask",
        "--umask",
        parse_umask,
        "OCTAL",
        "Umask of new files; by default 022, with roles in a closed root; 002 lets the server's group write in place.",
        _INTEGER,
    ),
    ServerOption(
        "adopt",
        "--adopt",
        parse_adoptions,
        "PATH=NAME[:ro]",
        "Serve the memory-mapped tensordict in PATH as store NAME, as tdserve adopt does; given once for each.",
        parse_several=_make_absolute,
        is_path=True,
    ),
    ServerOption(
        "adoptable",
        "--adoptable",
        parse_folders,
        "DIR",
        "Any client may have folders below it adopted; given once for each, or separated by colons.",
        parse_several=_parse_joined(parse_folders, os.pathsep),
        is_path=True,
    ),
    ServerOption(
        "metrics_port",
        "--metrics-port",
        int,
        "PORT",
        "TCP port for metrics and the status page by HTTP; 0 picks a free one; by default there is none.",
        _INTEGER,
    ),
    ServerOption("metrics_host", "--metrics-host", str, "ADDRESS", "Address for these; by default 127.0.0.1."),
    ServerOption(
        "trace_endpoint",
        "--trace-endpoint",
        str,
        "URL",
        "Receiver of traces by OTLP over HTTP, such as http://127.0.0.1:4318; by default there is none.",
    ),
    ServerOption(
        "checkpoint_every_s",
        "--checkpoint-every",
        parse_duration,
        "TIME",
        "Write a checkpoint of all stores every 10min, 1h, ...; needs --checkpoint-to; by default there is none.",
        _NUMBER,
    ),
    ServerOption(
        "checkpoint_to",
        "--checkpoint-to",
        str,
        "PLACE",
        "Folder, or URL of fsspec, for these; of this server alone.",
        is_path=True,
    ),
    ServerOption(
        "checkpoint_keep",
        "--checkpoint-keep",
        int,
        "N",
        "Checkpoints of this server that PLACE keeps, the newest; by default 3.",
        _INTEGER,
    ),
)
