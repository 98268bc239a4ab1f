"""The command line. Each command lives in a module of its own, which is imported only when it is used.

Manners: data on stdout, talk on stderr; exit 0 fine, 1 the work found failures, 2 wrong use, 3 not reachable.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import NoReturn

import click

from oncehook import __version__
from oncehook.errors import ConfigError, OncehookError, StoreUnavailable

COMMANDS = {
    "serve": ("serve", "Receive hooks and keep them."),
    "demo": ("demo", "A living inbox with sample traffic, in a folder that is removed afterwards."),
    "send": ("send", "Send a signed sample to a source."),
    "config": ("config", "Check, show and describe the settings."),
    "db": ("db", "The store's schema: migrate, status, sql."),
    "doctor": ("doctor", "Check that everything is well, and say what to do when not."),
    "health": ("health", "One exit code for probes: is the server ready?"),
    "version": ("version", "Print the version."),
}
"""Name: module, and the line that `--help` shows without importing it."""


class _Lazy(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"oncehook.cli.{COMMANDS[cmd_name][0]}")
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "ONCEHOOK"})
@click.version_option(__version__, message="oncehook %(version)s")
def cli() -> None:
    """The webhook inbox: every event accepted once, worked in order, never lost, always replayable."""


def main() -> NoReturn:
    """Run the command line; an error of ours is one sentence and a hint, never a traceback."""
    try:
        code = cli.main(standalone_mode=False, color=False if os.environ.get("NO_COLOR") else None)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except click.Abort:
        sys.exit(130)
    except OncehookError as error:
        click.echo(f"oncehook: {error}", err=True)
        if error.hint:
            click.echo(f"  {error.hint}", err=True)
        sys.exit(2 if isinstance(error, ConfigError) else 3 if isinstance(error, StoreUnavailable) else 1)
    except OSError as error:
        click.echo(f"oncehook: {error}", err=True)
        sys.exit(1)
    sys.exit(code if isinstance(code, int) else 0)
