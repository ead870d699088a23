"""Settings, and the reasons for their defaults. Only this module reads the environment, except for one variable of
``logs``; it does so when called, not at import."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from threading import Lock
from typing import Any, Literal, NamedTuple, get_args

from tdserve.base.addresses import join_address, parse_address
from tdserve.base.adoptions import split_adoption
from tdserve.base.errors import InvalidRequestError
from tdserve.base.logs import LEVELS, LOG_FORMATS
from tdserve.base.server_options import SERVER_OPTIONS, VARIABLE_PREFIX, parse_flag
from tdserve.base.setting_checks import (
    check_choice,
    check_host,
    check_int,
    check_loopback,
    check_seconds,
    check_umask,
    check_url,
    is_loopback,
)
from tdserve.base.tls import TLS, make_server_context

TransportName = Literal["auto", "shm", "nccl", "gloo", "grpc"]
TRANSPORTS: tuple[TransportName, ...] = get_args(TransportName)
"""Names of the transports; ``tdserve.rules.channel_transports`` describes those that use a channel."""

PROTOCOL_VERSION = 14
"""Raised when an old peer could misread a new one; a mismatch ends the session at Hello."""

DEFAULT_PORT = 7707

VALUES_WORKER = 0
"""Number of the only data worker that writes non-tensor values: an LMDB environment has one writing process."""

DEFAULT_INLINE_BYTES = 32768
"""Up to this size a payload in the gRPC message beats a second message over the data transport."""

DEFAULT_MEMORY_LIMIT_BYTES = 1 << 30
"""Room for several of the largest messages and thousands of waiting writers; a small machine can spare it."""

QUIET_GRPC = {"GRPC_VERBOSITY": "NONE"}
"""Variables of our own programs: gRPC's core would write a line to stderr for each handshake that fails, which
strangers can cause and which is no JSON. A program that uses tdserve as a library decides for itself."""

HEARTBEAT_S = 1.0
"""Pause between two heartbeats of a data worker."""

DEFAULT_SYNC_INTERVAL_S = 30.0
"""The age at which the kernel writes a dirty page to disk by itself: syncing more often slows writers, and less often
saves little."""

MAIL_BYTES = 4092
"""Longest message of a session that takes the channel to the data worker; longer ones take the gRPC stream. With its
length it fills one page, so a message costs little more than its wake-up."""

MAIL_READ = 1
"""Label of a read that the data worker may answer by itself."""

MAIL_WRITE = 2
"""Label of a write whose content it may receive at once, and which it may store by itself if it is an extend."""

MAIL_INLINE_BYTES = 3072
"""Content up to this size rides in such a message; the rest of it is the request or answer itself."""

_CUDA_DEVICE = re.compile(r"cuda:(0|[1-9][0-9]{0,3})")

_variables_lock = Lock()
_variable_blocks: dict[str, int] = {}
"""How many blocks of ``hold_variable`` use a variable now."""


class Setting(NamedTuple):
    """The value of an option, and where it comes from: the caller, a variable, the caller's defaults, or our own."""

    value: Any
    source: Literal["given", "variable", "defaults", "default"]


@dataclass(frozen=True)
class ServerConfig:
    """The settings of a server. Immutable: a change means a restart.

    Attributes:
        root: Folder that the server owns; created if it does not exist.
        host: Address to listen on. Loopback by default: nothing is reachable from outside unless asked for.
        port: TCP port, 0 picks a free one.
        num_workers: Data workers. 1 suits two cores; a worker keeps about one core busy while it moves bytes.
        devices: GPUs for content that travels by NCCL, such as ``"cuda:0"``, one per data worker; empty for no NCCL.
        token_file: File whose content clients must send as bearer token; ``None`` asks for none. It grants everything.
        tokens_file: File with the hashes of tokens, each with a role, stores and limits, as JSON or TOML; it is read
            again when it changes.
        insecure: Explicitly allows listening on other addresses than loopback without a token.
        tls_cert: PEM file with the server's certificate and those of the authorities between it and the root. ``None``:
            nothing is encrypted. The files are read again when they change.
        tls_key: PEM file with its private key.
        tls_client_ca: PEM file with authorities, one of which must have signed the certificate that a client shows;
            ``None`` asks for none.
        trusted_network: Name or address of an interface, or a range such as ``10.0.0.0/8``, in which content may go
            unencrypted although there is TLS; ``None``: nowhere.
        one_port: Whether clients reach nothing but ``port``.
        advertise: ``host`` or ``host:port`` by which others reach the server, if that differs from where it listens. It
            is shown in the ready line and in the refusal of a second server; it does not open a port.
        interface: Address or name (``eth0``) of the interface for content; ``None`` takes the one that the client
            reached.
        grace_s: Seconds for calls under way to end at shutdown. 10 is what ``docker stop`` grants before SIGKILL.
        transfer_timeout_s: Seconds without a byte after which a transfer is given up. 30 outlasts a peer's
            garbage collection or swap storm, without making a caller wait for minutes.
        worker_timeout_s: Seconds without a sign of life after which a data worker counts as stopped or hanging, and is
            killed and replaced. Workers send a sign every second, also in the middle of a long copy.
        inline_bytes: Largest payload that rides inside a message.
        memory_limit_bytes: Content of requests that the control process holds while they wait or move. A request beyond
            it is refused and retried until its deadline. Content in stores is on disk and not counted.
        log_level: Lowest level that the server logs to standard error: ``"info"`` includes starts, stops and
            recoveries, ``"warning"`` only what needs attention.
        log_format: ``"human"`` or ``"json"``: how each line looks.
        umask: Permissions that new files below the root do not get. ``None``: only the server's user may write,
            whatever the shell's umask, and with ``tokens_file`` only that user may enter a new root. ``0o002`` lets
            local clients of its group write in place too.
        adoptable: Absolute folders; any client may have memory-mapped tensordicts below them adopted as stores. Local
            clients that may write the root may have any folder of the machine adopted.
        sync_interval_s: Seconds between two passes that sync written content to the disk. A loss of power may lose what
            was written since the last pass. 0: only at an orderly end, and for stores of durability ``"disk"``.
        adopt: Folders to adopt at the start, as ``PATH=NAME``, or ``PATH=NAME:ro`` for reading only.
        metrics_port: TCP port for metrics and the status page by HTTP, 0 picks a free one; ``None`` for none.
        metrics_host: Address for these. They ask for the same token as the server. Unless it is a loopback address,
            they are HTTPS if the server has TLS.
        trace_endpoint: URL of a receiver of OTLP over HTTP, such as ``"http://127.0.0.1:4318"``, which gets the spans
            of requests that clients trace; ``None`` traces nothing.
        checkpoint_every_s: Seconds from one checkpoint of all stores to the next; ``None`` writes none.
        checkpoint_to: Folder, or URL of fsspec, where they are; no other server may write to it.
        checkpoint_keep: How many of them stay there, the newest. 3 leaves two steps back, and bounds what they take.
    """

    root: str
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    num_workers: int = 1
    devices: tuple[str, ...] = ()
    token_file: str | None = None
    tokens_file: str | None = None
    insecure: bool = False
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_client_ca: str | None = None
    trusted_network: str | None = None
    one_port: bool = False
    advertise: str | None = None
    interface: str | None = None
    grace_s: float = 10.0
    transfer_timeout_s: float = 30.0
    worker_timeout_s: float = 10.0
    inline_bytes: int = DEFAULT_INLINE_BYTES
    memory_limit_bytes: int = DEFAULT_MEMORY_LIMIT_BYTES
    log_level: str = "info"
    log_format: str = "human"
    umask: int | None = None
    adoptable: tuple[str, ...] = ()
    adopt: tuple[str, ...] = ()
    sync_interval_s: float = DEFAULT_SYNC_INTERVAL_S
    metrics_port: int | None = None
    metrics_host: str = "127.0.0.1"
    trace_endpoint: str | None = None
    checkpoint_every_s: float | None = None
    checkpoint_to: str | None = None
    checkpoint_keep: int = 3

    def validate(self) -> ServerConfig:
        """Returns itself if a server may start with it.

        Raises:
            InvalidRequestError: Names the first invalid setting, or states that the host is open to others without a
                token. Nothing was created or opened.
        """
        if not isinstance(self.root, str) or not self.root or "\0" in self.root:
            raise InvalidRequestError(argument="root", reason=f"{self.root!r} names no folder")
        check_host("host", self.host)
        check_host("metrics_host", self.metrics_host)
        check_int("port", self.port, low=0, high=65535)
        check_int("metrics_port", self.metrics_port or 0, low=0, high=65535)
        check_int("num_workers", self.num_workers, low=1, high=1024)
        for device in self.devices:
            check_cuda_device("devices", device)
        if self.devices and len(self.devices) != self.num_workers:
            reason = f"{len(self.devices)} are not one for each of {self.num_workers} data workers"
            raise InvalidRequestError(argument="devices", reason=reason)
        check_int("inline_bytes", self.inline_bytes, low=0, high=1 << 20)
        check_int("memory_limit_bytes", self.memory_limit_bytes, low=1 << 20, high=1 << 50)
        check_choice("log_level", self.log_level, LEVELS)
        check_choice("log_format", self.log_format, LOG_FORMATS)
        if self.umask is not None:
            check_umask("umask", self.umask)
        for folder in self.adoptable:
            if not os.path.isabs(folder):
                raise InvalidRequestError(argument="adoptable", reason=f"{folder!r} is not absolute")
        for adoption in self.adopt:
            split_adoption(adoption)
        if self.advertise is not None:
            parse_address("advertise", self.advertise)
        check_seconds("grace_s", self.grace_s)
        check_seconds("transfer_timeout_s", self.transfer_timeout_s, above=0.0)
        check_seconds("worker_timeout_s", self.worker_timeout_s, above=HEARTBEAT_S)
        check_seconds("sync_interval_s", self.sync_interval_s)
        if self.trace_endpoint is not None:
            check_url("trace_endpoint", self.trace_endpoint)
        self._check_checkpoints()
        self._check_tls()
        self._check_strangers()
        return self

    def _check_checkpoints(self) -> None:
        check_int("checkpoint_keep", self.checkpoint_keep, low=1, high=1_000_000)
        if (self.checkpoint_every_s is None) != (not self.checkpoint_to):
            given, missing = ("every_s", "to") if self.checkpoint_every_s is not None else ("to", "every_s")
            reason = f"checkpoint_{given} means nothing without it: give both"
            raise InvalidRequestError(argument=f"checkpoint_{missing}", reason=reason)
        if self.checkpoint_every_s is not None:
            check_seconds("checkpoint_every_s", self.checkpoint_every_s, above=0.0)

    def _check_strangers(self) -> None:
        """Raises InvalidRequestError if others reach the server and need prove nothing."""
        if self.token_file is None and self.tokens_file is None and not self.insecure:
            if self.tls_client_ca is None:
                check_loopback("host", self.host)
            check_loopback("metrics_host", self.metrics_host)

    def _check_tls(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise InvalidRequestError(argument="tls_cert", reason="tls_cert and tls_key belong together: give both")
        if self.tls_cert is not None and self.tls_key is not None:
            make_server_context("tls_cert", self.tls_cert, self.tls_key, self.tls_client_ca)
        for name in ("tls_client_ca", "trusted_network"):
            if self.tls_cert is None and getattr(self, name) is not None:
                raise InvalidRequestError(argument=name, reason="it means nothing without tls_cert")
        has_token = self.token_file is not None or self.tokens_file is not None
        if self.tls_cert is not None and not has_token:
            for name in self.list_client_processes():
                reason = (
                    "with tls_cert it needs token_file or tokens_file: its process asks another port of this machine"
                )
                raise InvalidRequestError(argument=name, reason=reason)

    def list_client_processes(self) -> list[str]:
        """Returns the settings for which the server starts a process of its own that is a client of it."""
        names = ("metrics_port", "checkpoint_every_s")
        return [name for name in names if getattr(self, name) is not None]

    @property
    def is_root_closed(self) -> bool:
        """Whether other users may enter no folder of a new root, since no role would hold for them there."""
        return self.tokens_file is not None and self.umask is None

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the address."""
        return is_loopback(self.host)

    def build_child_environment(self) -> dict[str, str]:
        """Returns this environment with these settings added, for a server process: it reads them by ``from_env``."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        values["devices"] = ",".join(self.devices)
        values["adopt"] = ",".join(self.adopt)
        values["adoptable"] = os.pathsep.join(self.adoptable)
        ours = {VARIABLE_PREFIX + name.upper(): "" if value is None else str(value) for name, value in values.items()}
        ours[VARIABLE_PREFIX + "UMASK"] = "" if self.umask is None else f"{self.umask:03o}"
        return {**QUIET_GRPC, **os.environ, **ours}

    @classmethod
    def from_env(
        cls, environ: Mapping[str, str] | None = None, *, defaults: Mapping[str, Any] | None = None, **given: Any
    ) -> ServerConfig:
        """Returns settings from ``TDSERVE_ROOT``, ``TDSERVE_PORT`` and so on: one variable per field, in upper case.

        Args:
            environ: The variables; ``None`` reads the process's own.
            defaults: Used for fields that neither a variable nor ``given`` sets.
            **given: Explicit fields, which win; ``None`` counts as not given.

        Raises:
            InvalidRequestError: A variable holds an invalid value, or the root is not given. Nothing else is validated
                yet.
        """
        return cls.of_settings(cls.find_settings(environ, defaults=defaults, **given))

    @classmethod
    def of_settings(cls, found: Mapping[str, Setting]) -> ServerConfig:
        """Returns these settings. Raises InvalidRequestError if they have no root."""
        if found["root"].value is None:
            raise InvalidRequestError(argument="root", reason="is not given, and TDSERVE_ROOT is not set")
        return cls(**{name: setting.value for name, setting in found.items()})

    @classmethod
    def find_settings(
        cls, environ: Mapping[str, str] | None = None, *, defaults: Mapping[str, Any] | None = None, **given: Any
    ) -> dict[str, Setting]:
        """Returns every field with where it comes from; arguments and errors as in ``from_env``. The root may be
        None."""
        found: dict[str, Setting] = {}
        for option in SERVER_OPTIONS:
            setting = Setting(given.pop(option.name, None), "given")
            if setting.value is None:
                setting = Setting(_read_variable(option.name, option.parse, environ), "variable")
            if setting.value is None and defaults is not None:
                setting = Setting(defaults.get(option.name), "defaults")
            found[option.name] = (
                Setting(getattr(cls, option.name, None), "default") if setting.value is None else setting
            )
        if given:
            raise InvalidRequestError(argument=sorted(given)[0], reason="is not a setting of a server")
        if found["num_workers"].source == "default":
            found["num_workers"] = Setting(max(len(found["devices"].value), 1), "default")
        return found


@dataclass(frozen=True)
class ClientConfig:
    """Where a command-line client finds its server.

    Attributes:
        address: ``host:port``.
        token: Bearer token, kept out of ``repr`` so that no log shows it; ``None`` sends none.
        token_file: File that holds the token, used if ``token`` is not given.
        transport: How content travels.
        local_root: Where this process sees the server's root, if the path differs from the server's.
        tls_ca, tls_cert, tls_key: Files of :class:`tdserve.TLS`; with none of them the connection is not encrypted.
        interface: Address or name (``eth0``) of the interface for content; ``None`` takes the one towards the server.
            Every client reads it, not only commands: see ``read_client_interface``.
    """

    address: str = f"127.0.0.1:{DEFAULT_PORT}"
    token: str | None = field(default=None, repr=False)
    token_file: str | None = None
    transport: TransportName = "auto"
    local_root: str | None = None
    interface: str | None = None
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> ClientConfig:
        """Returns settings from ``TDSERVE_ADDRESS``, ``TDSERVE_TOKEN``, ``TDSERVE_TOKEN_FILE`` and so on.

        Without an address it takes that of a server with this environment, so that a command beside the server finds
        it.

        Raises:
            InvalidRequestError: A variable holds an invalid value.
        """
        values = {name: _read_variable(name, parse, environ) for name, parse in _CLIENT_PARSERS.items()}
        values["address"] = values["address"] or _find_server_address(environ)
        return cls(**{name: value for name, value in values.items() if value is not None})

    @classmethod
    def of_program(cls) -> ClientConfig:
        """Returns settings as ``from_env`` does, for a program, which must not come upon a server by chance.

        Raises:
            InvalidRequestError: ``TDSERVE_ADDRESS`` is not set, or a variable holds an invalid value.
        """
        if not has_address_variable():
            reason = "it is not given, and TDSERVE_ADDRESS is not set; one of them must be the server's host:port"
            raise InvalidRequestError(argument="address", reason=reason)
        return cls.from_env()

    def find_tls(self) -> TLS | None:
        """Returns TLS with these files; None without any. Raises InvalidRequestError for a certificate without its
        key."""
        if self.tls_ca is None and self.tls_cert is None:
            return None
        return TLS(self.tls_ca, self.tls_cert, self.tls_key)

    def find_token(self) -> str | None:
        """Returns the token, which may be in a file; None if there is none.

        Raises:
            InvalidRequestError: The file cannot be read, or holds no text.
        """
        if self.token is None and self.token_file is not None:
            return read_token(self.token_file, "TDSERVE_TOKEN_FILE")
        return self.token


def has_address_variable() -> bool:
    """Returns whether the environment names a server for programs: ``TDSERVE_ADDRESS`` is set."""
    return _read_variable("address", str, None) is not None


def read_token(path: str | os.PathLike[str], argument: str) -> str:
    """Reads a token from a file and strips white space, because editors end files with a line feed.

    Args:
        path: Path of the file.
        argument: The option or variable that named it, for the error message.

    Raises:
        InvalidRequestError: The file cannot be read, or holds no text.
    """
    try:
        with open(path, encoding="utf-8") as file:
            token = file.read().strip()
    except (OSError, UnicodeDecodeError) as fault:
        raise InvalidRequestError(argument=argument, reason=f"cannot read {path}: {fault}") from fault
    if not token:
        raise InvalidRequestError(argument=argument, reason=f"{path} is empty")
    return token


def read_client_interface() -> str | None:
    """Returns the interface that ``TDSERVE_INTERFACE`` names for clients, if any."""
    found: str | None = _read_variable("interface", str, None)
    return found


def is_client_traced() -> bool:
    """Returns whether ``TDSERVE_TRACE`` asks for the traces of this process's clients."""
    return bool(_read_variable("trace", parse_flag, None))


def find_config_path() -> str | None:
    """Returns the file of options that ``TDSERVE_CONFIG`` names, if any."""
    found: str | None = _read_variable("config", str, None)
    return found


def read_fail_delay_s() -> float:
    """Returns ``TDSERVE_FAIL_DELAY_S``: seconds between the last line of a command that failed and its end; 0 by
    default.

    Slows restart loops. An invalid value is ignored: the original failure has already been reported.
    """
    try:
        delay_s: float = _read_variable("fail_delay_s", float, None) or 0.0
    except InvalidRequestError:
        return 0.0
    return delay_s if 0.0 <= delay_s < math.inf else 0.0


def _find_server_address(environ: Mapping[str, str] | None) -> str:
    host = _read_variable("host", str, environ) or ServerConfig.host
    port = _read_variable("port", int, environ) or DEFAULT_PORT  # a client cannot know what port 0 became
    return join_local_address(host, port)


def join_local_address(host: str, port: int) -> str:
    """Returns ``host:port`` by which this machine reaches a server that listens on ``host``, perhaps on all
    interfaces."""
    return join_address({"0.0.0.0": "127.0.0.1", "::": "::1", "[::]": "::1"}.get(host, host), port)  # noqa: S104


def build_single_threaded_environment() -> dict[str, str]:
    """Returns this process's environment for a child that forks and so must have one thread: numpy starts more by
    default."""
    return {**os.environ, "OPENBLAS_NUM_THREADS": "1"}


def set_variables(values: Mapping[str, str]) -> None:
    """Sets variables of this process for the rest of its life, except those that the user has set.

    Threads: safe. A reader sees the variables after the call that set them, or after any later one.
    """
    with _variables_lock:
        for name, value in values.items():
            os.environ.setdefault(name, value)


@contextmanager
def hold_variable(name: str, value: str) -> Iterator[None]:
    """Sets a variable of this process for the length of a block, unless the user has set it.

    Threads: safe; the last of several overlapping blocks removes it.
    """
    with _variables_lock:
        num_blocks = _variable_blocks.get(name, 0)
        is_ours = num_blocks > 0 or name not in os.environ
        if is_ours:
            _variable_blocks[name] = num_blocks + 1
            os.environ.setdefault(name, value)
    try:
        yield
    finally:
        if is_ours:
            with _variables_lock:
                _variable_blocks[name] -= 1
                if not _variable_blocks[name]:
                    del _variable_blocks[name]
                    os.environ.pop(name, None)


def check_cuda_device(argument: str, name: object) -> str:
    """Returns ``name`` if it names a CUDA device by number (``"cuda:1"``); the device may not exist.

    Raises:
        InvalidRequestError: It does not.
    """
    if not isinstance(name, str) or _CUDA_DEVICE.fullmatch(name) is None:
        raise InvalidRequestError(
            argument=argument, reason=f"{name!r} is not a CUDA device with its number, such as 'cuda:0'"
        )
    return name


def check_transport(name: str) -> TransportName:
    """Returns ``name`` if it is the name of a transport.

    Raises:
        InvalidRequestError: With the names there are.
    """
    for known in TRANSPORTS:
        if name == known:
            return known
    raise InvalidRequestError(argument="transport", reason=f"it must be one of {', '.join(TRANSPORTS)}, got {name!r}")


def _read_variable(name: str, parse: Callable[[str], Any], environ: Mapping[str, str] | None) -> Any:
    variable = VARIABLE_PREFIX + name.upper()
    text = (os.environ if environ is None else environ).get(variable)
    if text is None or text == "":  # an empty variable is how compose files say "not set"
        return None
    try:
        return parse(text)
    except (ValueError, KeyError) as fault:
        raise InvalidRequestError(argument=variable, reason=f"{text!r} does not parse as {name}") from fault


_CLIENT_PARSERS: dict[str, Callable[[str], Any]] = {
    "address": str,
    "token": str,
    "token_file": str,
    "transport": check_transport,
    "local_root": str,
    "interface": str,
    "tls_ca": str,
    "tls_cert": str,
    "tls_key": str,
}
