"""The program of a server. It starts the process that forks data workers first, and then imports what serves."""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress

from tdserve.base.addresses import check_listenable, find_interface_address
from tdserve.base.config import ServerConfig
from tdserve.base.errors import TDServeError
from tdserve.base.logs import pass_log_format, start_logging
from tdserve.base.machine import keep_freed_memory, raise_descriptor_limit, share_arenas, use_small_pages
from tdserve.server.processes.fork_server_process import start_fork_server
from tdserve.server.start_lines import FAILED_PREFIX


def run(config: ServerConfig, *, lifeline_fd: int | None = None) -> int:
    """Serves until SIGTERM or SIGINT, then drains; prints one ready line with the address.

    Args:
        config: Configuration; checked here.
        lifeline_fd: A pipe whose other end the parent holds: when that closes, the server shuts down too.

    Returns:
        Exit code 0, after an orderly end. A second signal ends the process at once, with exit code 1.

    Raises:
        RootInUseError, InvalidRequestError, NotSupportedError, CorruptDataError: The server did not start; nothing was
            changed.
    """
    config.validate()
    start_logging(config.log_level, process="tdserve", form=config.log_format)
    pass_log_format(config.log_format)
    if config.interface is not None:
        find_interface_address(config.interface)
    _schedule_in_batches()
    keep_freed_memory()
    share_arenas()
    use_small_pages()
    raise_descriptor_limit()
    _set_umask(config)
    if not os.path.exists(config.root):  # else its own server may listen there, which acquire() reports
        check_listenable(config.host, config.port)
    fork_server = start_fork_server(config.worker_timeout_s)  # it imports for a second, which clients wait for
    try:
        serve = _import_serve()
        return serve(config, fork_server, lifeline_fd=lifeline_fd)
    finally:
        if fork_server is not None:
            fork_server.end_now()


def _import_serve() -> Callable[..., int]:
    """Imports what serves, which takes a third of a second."""
    gc.disable()  # collections find nothing, and take a tenth of that
    from tdserve.server.serving import serve

    gc.enable()
    gc.freeze()  # imported objects stay: collections need not visit them
    return serve


def _set_umask(config: ServerConfig) -> None:
    """Sets the umask. Without one in the configuration it keeps the inherited one, and denies write access to group and
    others as well. Where tokens have roles it allows read access below folders that others cannot enter: who may read
    a store is lent its folder."""
    umask = config.umask
    if umask is None:
        before = os.umask(0o022)
        umask = 0o022 if config.is_root_closed else before | 0o022
    os.umask(umask)


def _schedule_in_batches() -> None:
    """Schedules this process and its workers so that a process that they wake does not preempt them.

    A thread that writes to a socket holds its lock, for which gloo's thread spins. If the reader that it has just woken
    preempts it, that costs a whole time slice. Writes of 64 rows of 56 KB gain 10 to 30 % in throughput by this
    (measured). A scheduling policy that was set on purpose is left alone.
    """
    with suppress(OSError):  # a sandbox may not allow it
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def main(arguments: list[str]) -> int:
    """Runs ``python -m tdserve.server.server_process LIFELINE_FD``, with settings from ``TDSERVE_*`` variables: see
    ``config``."""
    try:
        return run(ServerConfig.from_env(), lifeline_fd=int(arguments[0]) if arguments else None)
    except TDServeError as error:
        failure = {"error": type(error).__name__, "fields": error.fields}
        print(f"{FAILED_PREFIX}{json.dumps(failure)}", flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
