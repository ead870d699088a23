"""The command group ``tdserve``. Errors become one line on stderr and an exit code: see ``shell/exit_codes``."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

import click

from tdserve.base.errors import TDServeError
from tdserve.cli.figures.sessions import sessions
from tdserve.cli.figures.stats import stats
from tdserve.cli.figures.top import top
from tdserve.cli.files.adopt import adopt
from tdserve.cli.files.get import get
from tdserve.cli.files.import_rows import import_rows
from tdserve.cli.files.put import put
from tdserve.cli.moves.checkpoint import checkpoint
from tdserve.cli.moves.rebalance import rebalance
from tdserve.cli.moves.restore import restore
from tdserve.cli.rows.head import head
from tdserve.cli.rows.tail import tail
from tdserve.cli.screen.render import to_one_line
from tdserve.cli.serving.certs import certs
from tdserve.cli.serving.check_root import check
from tdserve.cli.serving.config_show import config
from tdserve.cli.serving.health import health
from tdserve.cli.serving.serve import serve
from tdserve.cli.serving.token import token
from tdserve.cli.shell.completion import completion
from tdserve.cli.shell.exit_codes import FAILED, INTERRUPTED, find_exit_code
from tdserve.cli.shell.lasting import fail_on_sigterm, is_lasting, print_error
from tdserve.cli.stores.info import info
from tdserve.cli.stores.keys import keys
from tdserve.cli.stores.ls import ls
from tdserve.cli.stores.rm import rm
from tdserve.cli.stores.version_list import versions
from tdserve.cli.trying.bench import bench
from tdserve.cli.trying.demo import demo
from tdserve.cli.trying.guide import guide
from tdserve.cli.trying.soak import soak
from tdserve.cli.trying.version import version

COMMANDS = (
    serve,
    health,
    ls,
    info,
    keys,
    head,
    tail,
    versions,
    get,
    put,
    rm,
    checkpoint,
    restore,
    check,
    rebalance,
    adopt,
    import_rows,
    stats,
    sessions,
    top,
    config,
    certs,
    token,
    bench,
    soak,
    demo,
    guide,
    completion,
    version,
)


OTHER_NAMES = {
    **dict.fromkeys(("delete", "del", "remove"), "rm"),
    **dict.fromkeys(("list", "stores"), "ls"),
    **dict.fromkeys(("describe", "show"), "info"),
    "start": "serve",
}
"""What other programs call some commands."""


class CommandGroup(click.Group):
    """A group that answers the names that other programs have for its commands with its own."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Finds the command that the arguments begin with."""
        if args and self.get_command(ctx, args[0]) is None and args[0] in OTHER_NAMES:
            raise click.UsageError(f"No such command {args[0]!r}. Did you mean {OTHER_NAMES[args[0]]!r}?", ctx)
        return super().resolve_command(ctx, args)


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="tdserve")
@click.pass_context
def cli(context: click.Context) -> None:
    """Named TensorDicts in memory-mapped stores, moved between processes at the speed of the wire."""
    invoked = cli.get_command(context, context.invoked_subcommand or "")
    if invoked is None or not is_lasting(invoked):
        context.call_on_close(fail_on_sigterm())


for command in COMMANDS:
    cli.add_command(command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code.

    Args:
        arguments: Without the program's name; ``None`` takes the process's own.
    """
    # Torch warns here whenever a ragged tensor is made, which is no fault of the user.
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    try:
        code = cli.main(args=None if arguments is None else list(arguments), prog_name="tdserve", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except TDServeError as error:
        print_error(error)
        return find_exit_code(error)
    except click.ClickException as error:
        _show(error)
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except RuntimeError as error:  # Python 3.11 wraps what is raised while a class is being made, as by an import
        if isinstance(error.__cause__, SystemExit):
            raise error.__cause__ from None
        raise
    except BrokenPipeError:
        # the reader of our output went away (`tdserve ls | head`); closing stdout must not fail again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except OSError as fault:  # our output cannot be written, for example on a full disk
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        click.echo(f"tdserve: {fault.strerror or fault}", err=True)
        return FAILED


def _show(error: click.ClickException) -> None:
    """Prints an error of the arguments as one line on stderr; no arguments at all are answered with the help."""
    if isinstance(error, getattr(click.exceptions, "NoArgsIsHelpError", ())):  # of click 8.2 and later
        error.show()
        return
    context = error.ctx if isinstance(error, click.UsageError) else None
    hint = "" if context is None else f"; {context.command_path} --help shows the usage"
    click.echo(f"tdserve: {to_one_line(error.format_message()).rstrip('.')}{hint}", err=True)
