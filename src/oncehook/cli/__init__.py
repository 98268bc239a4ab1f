"""The command line. Each command lives in a module of its own, which is imported only when it is used.

Manners: data on stdout, talk on stderr; exit 0 fine, 1 the work found failures, 2 wrong use, 3 not reachable. What all
commands have in common stands in `manners`.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import click
from click.shell_completion import CompletionItem

from oncehook import __version__
from oncehook.cli.options import polite, voice
from oncehook.errors import ConfigError, OncehookError, StoreUnavailable

COMMANDS = {
    "serve": ("run", "Receive hooks, keep them, and work them off."),
    "worker": ("run", "Work only; arrivals are received elsewhere."),
    "demo": ("run", "A living inbox with sample traffic, in a folder that is removed afterwards."),
    "send": ("send", "Send a signed sample to a source."),
    "forward": ("send", "Relay live arrivals to a local server."),
    "tail": ("tail", "What happens, as it happens."),
    "events": ("browse", "List events, by the same query as everywhere."),
    "show": ("browse", "Show an event, a delivery or a replay with all that is known about it."),
    "replay": ("operate", "Deliver again: plan, ask, run."),
    "dead": ("browse", "Dead letters by destination and cause; discard them."),
    "erase": ("operate", "Erase everything that is kept of a subject."),
    "pause": ("browse", "Hold a destination back."),
    "resume": ("browse", "Let a destination go on."),
    "sources": ("browse", "What is set up to receive, and how it goes."),
    "destinations": ("browse", "Where events go, and how that stands."),
    "stats": ("browse", "The numbers since a moment."),
    "keys": ("operate", "Claim, commit, release and show a key by hand."),
    "whatsapp": ("whatsapp:command", "Send a message over WhatsApp, or look after an instance."),
    "token": ("settings", "Make a bearer token for the API."),
    "import": ("operate:import_", "Take over what was processed elsewhere."),
    "export": ("operate", "Events with their bodies, as JSON lines."),
    "init": ("settings", "Ask three questions and write an oncehook.toml."),
    "config": ("settings", "Check, show and describe the settings."),
    "db": ("db:command", "The store: migrate, status, sql, prune, backup, restored."),
    "doctor": ("settings", "Check that everything is well, and say what to do when not."),
    "health": ("settings", "One exit code for probes: is the server ready?"),
    "bench": ("bench:command", "Measure this machine on a store that is thrown away."),
    "completion": ("settings", "Print the script that completes commands in your shell."),
    "version": ("settings", "Print the version."),
}
"""Name: module (and the command in it, where it is not `command`), and the line that `--help` shows without importing
it."""


class _Lazy(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module_name, _, attribute = COMMANDS[cmd_name][0].partition(":")
        module = importlib.import_module(f"oncehook.cli.{module_name}")
        command: click.Command = getattr(module, attribute or cmd_name)
        return polite(command, cmd_name)

    def invoke(self, ctx: click.Context) -> object:
        """Run the command. Whoever reads along (`| head`) may have enough: that is no failure."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            # What Python still wants to flush at its end goes nowhere.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Names and lines from the table: to complete a word, no command is imported."""
        found = [CompletionItem(name, help=line) for name, (_, line) in COMMANDS.items() if name.startswith(incomplete)]
        return found + click.Command.shell_complete(self, ctx, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="oncehook %(version)s")
def cli() -> None:
    """The webhook inbox: every event accepted once, worked in order, never lost, always replayable."""


def main(
    arguments: Sequence[str] | None = None,
    *,
    program: str | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> NoReturn:
    """Run the command line; an error of ours is one sentence and a hint, never a traceback.

    A program that hands on to it says what it is called, and what its commands need not be told (click's default_map).
    """
    voice.quiet = voice.verbose = False
    try:
        code = cli.main(
            arguments,
            program,
            standalone_mode=False,
            color=False if os.environ.get("NO_COLOR") else None,
            default_map=defaults,
        )
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(130)
    except OncehookError as error:
        _trace()
        click.echo(f"oncehook: {error}", err=True)
        if error.hint:
            click.echo(f"  {error.hint}", err=True)
        sys.exit(2 if isinstance(error, ConfigError) else 3 if isinstance(error, StoreUnavailable) else 1)
    except OSError as error:
        _trace()
        click.echo(f"oncehook: {error}", err=True)
        sys.exit(1)
    sys.exit(code if isinstance(code, int) else 0)


def _trace() -> None:
    if voice.verbose:
        click.echo(traceback.format_exc(), err=True, nl=False)
