"""What a server does from the acquisition of its root to its orderly end.

``server/README.md`` has a reading order of recovery.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from contextlib import suppress
from functools import partial
from typing import Any

from tdserve.base.addresses import check_listenable, join_address, parse_address
from tdserve.base.config import ServerConfig, join_local_address
from tdserve.base.errors import InvalidRequestError, TDServeError
from tdserve.control.credentials import ServerCertificates
from tdserve.control.servicer import ControlServer
from tdserve.server.access.token_register import TokenRegister
from tdserve.server.control_process import ControlProcess
from tdserve.server.durability.power_loss import recover
from tdserve.server.processes.client_process import ClientProcess
from tdserve.server.processes.fork_server_process import ForkServerProcess
from tdserve.server.processes.observer_process import ObserverProcess
from tdserve.server.processes.worker_processes import WorkerProcesses
from tdserve.server.root_watch import watch_root
from tdserve.server.start_lines import READY_PREFIX
from tdserve.store.database.environments import hold_page_checks
from tdserve.store.roots.archive import check_outside_roots
from tdserve.store.roots.root import Root

CHECKPOINT_MODULE = "tdserve.schedule"
"""What the process runs that writes checkpoints."""

MAX_CHECKED_NBYTES = 1 << 28
"""Files of entries up to this size are looked at page by page before the control process first reads them: at most some
0.2 s, in which it does nothing else."""

_log = logging.getLogger("tdserve.server")


def serve(config: ServerConfig, fork_server: ForkServerProcess | None, *, lifeline_fd: int | None = None) -> int:
    """Serves until SIGTERM or SIGINT, then drains; prints one ready line with the address. Returns the exit code.

    Args:
        config: Configuration of the server.
        fork_server: The process that will fork its data workers; the caller ends it if this fails. None: one is started
            later.
        lifeline_fd: As for ``run``.

    Raises:
        TDServeError: As in ``run``.
    """
    with hold_page_checks(MAX_CHECKED_NBYTES):  # a damaged page of one store would end the service of all
        return asyncio.run(_serve(config, fork_server, lifeline_fd))


async def _serve(config: ServerConfig, fork_server: ForkServerProcess | None, lifeline_fd: int | None) -> int:
    if config.checkpoint_to is not None:
        check_outside_roots(config.checkpoint_to, config.root)
    tokens = TokenRegister.open(config)
    root = Root.acquire(config.root, is_closed=config.is_root_closed)
    try:
        await _serve_root(root, config, tokens, fork_server, lifeline_fd)
    finally:
        await _end_writers()
        root.release()
    return 0


async def _end_writers() -> None:
    """Waits for all that this process may still write into the root: the next server must not find it at that.

    Tasks are cancelled as ``asyncio.run`` would do it afterwards; some remove files, in threads. A thread cannot be
    ended. One that hangs keeps the root, until this process is killed, which ends it too.
    """
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_default_executor()


async def _serve_root(
    root: Root,
    config: ServerConfig,
    tokens: TokenRegister | None,
    fork_server: ForkServerProcess | None,
    lifeline_fd: int | None,
) -> None:
    """Serves an acquired root until a signal."""
    recover(root)
    root.run.note(is_synced=False)
    observer = None if config.metrics_port is None else ObserverProcess(config)
    checkpoints = None if config.checkpoint_every_s is None else ClientProcess("checkpoint", CHECKPOINT_MODULE)
    workers = WorkerProcesses(root.lock_fd, timeout_s=config.worker_timeout_s, fork_server=fork_server)
    process = ControlProcess(config, root, observer, tokens, checkpoints, worker_processes=workers)
    server = _listen(process, config, tokens)
    address = _format_address(config, server.port)
    root.set_address(address)
    stop = _stop_event(lifeline_fd)
    process.restore()
    await server.start()
    try:
        is_started = await _start_unless_stopped(process, stop)
    except TDServeError:
        await process.stop()  # else its workers would hold the root until they notice
        raise
    if is_started:
        await server.set_serving(True)
        _log.info("serves %s at %s, %s, process %d", root.path, address, process.describe(), os.getpid())
        has_processes = bool(config.list_client_processes())
        own_token = tokens.make_own_token() if tokens is not None and has_processes else None
        if observer is not None:
            observer.start(_find_own_address(config, server), own_token)
            _log.info("metrics and the status page are at %s", observer.url)
        if checkpoints is not None:
            checkpoints.start(_list_checkpoint_settings(config, _find_own_address(config, server), own_token))
            _log.info("writes checkpoints to %s every %g s", config.checkpoint_to, config.checkpoint_every_s)
        with suppress(OSError):  # stdout may go to a full disk, which is no reason to stop
            print(f"{READY_PREFIX}{address}", flush=True)
        watching = asyncio.create_task(watch_root(root, server.set_serving, partial(os._exit, 1)))
        await stop.wait()
        watching.cancel()
    _log.info("stops; requests under way may take another %g s", config.grace_s)
    await server.set_serving(False)
    await process.drain()
    await server.stop(1.0)
    await process.stop()
    _log.info("stopped")


async def _start_unless_stopped(process: ControlProcess, stop: asyncio.Event) -> bool:
    """Starts the process; returns False if ``stop`` was set first: then nothing of the start goes on. It may wait long
    for repairs by a worker."""
    starting, stopping = asyncio.create_task(process.start()), asyncio.create_task(stop.wait())
    await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if starting.done():
        starting.result()
        return True
    starting.cancel()
    await asyncio.wait({starting})
    if not starting.cancelled() and (error := starting.exception()) is not None:
        _log.warning("the start has failed: %s", error)
    return False


def _listen(process: ControlProcess, config: ServerConfig, tokens: TokenRegister | None) -> ControlServer:
    certificates = None
    if config.tls_cert is not None and config.tls_key is not None:
        certificates = ServerCertificates(config.tls_cert, config.tls_key, config.tls_client_ca)
    check_listenable(config.host, config.port)
    try:
        return ControlServer(
            process,
            host=config.host,
            port=config.port,
            tokens=tokens,
            audit=process.gate.audit,
            certificates=certificates,
            has_local_port=bool(config.list_client_processes()),
        )
    except RuntimeError as error:  # how grpc reports that bind() failed
        reason = (
            f"{config.host}:{config.port} cannot be listened on; is another server there? --port 0 takes a free one"
        )
        raise InvalidRequestError(argument="address", reason=reason) from error


def _list_checkpoint_settings(config: ServerConfig, address: str, token: str | None) -> dict[str, Any]:
    """Returns the settings of the process that writes checkpoints."""
    return {
        "address": address,
        "token": token,
        "every_s": config.checkpoint_every_s,
        "place": config.checkpoint_to,
        "keep": config.checkpoint_keep,
        "log_level": config.log_level,
    }


def _find_own_address(config: ServerConfig, server: ControlServer) -> str:
    """Returns where processes of the server's own reach it: with TLS, another port, for this machine alone."""
    is_encrypted = server.local_port != server.port
    return join_local_address("127.0.0.1" if is_encrypted else config.host, server.local_port)


def _format_address(config: ServerConfig, port: int) -> str:
    host, advertised_port = parse_address("advertise", config.advertise) if config.advertise else (config.host, None)
    return join_address(host, advertised_port or port)


def _stop_event(lifeline_fd: int | None) -> asyncio.Event:
    """Returns an event that is set by the first SIGTERM or SIGINT, or when the lifeline closes.

    A second signal ends the process at once.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    num_signals = 0

    def on_signal() -> None:
        nonlocal num_signals
        num_signals += 1
        if num_signals > 1:
            _log.warning("second signal: leaving at once")
            os._exit(1)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    if lifeline_fd is not None:
        os.set_blocking(lifeline_fd, False)

        def on_lifeline() -> None:
            loop.remove_reader(lifeline_fd)
            stop.set()

        loop.add_reader(lifeline_fd, on_lifeline)
    return stop
