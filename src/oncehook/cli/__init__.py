"""The command line. Commands are imported when they are used, so that `oncehook --help` stays quick.

Data goes to stdout, messages to stderr. Exit codes: 0 success, 1 the work found failures, 2 wrong use, 3 unreachable.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn

import click
from click.shell_completion import CompletionItem, get_completion_class

from oncehook import __version__
from oncehook.cli.help import CommandGroup, show_error
from oncehook.cli.options import add_shared_options, voice
from oncehook.cli.output import message
from oncehook.errors import ConfigError, OncehookError, StoreUnavailable

GROUPS: Final = {
    "Run": {
        "serve": ("run", "Receive hooks, keep them, and deliver them."),
        "worker": ("run", "Deliver only; hooks are received elsewhere."),
        "demo": ("run", "Run an inbox with sample traffic, removed at the end."),
        "bench": ("bench", "Measure this machine on a store that is thrown away."),
    },
    "Look": {
        "tail": ("tail", "Show arrivals and attempts as they happen."),
        "events": ("browse", "List events that match a query."),
        "show": ("browse", "Show an event, a delivery or a replay in detail."),
        "rejected": ("browse", "List rejected arrivals, and why."),
        "dead": ("operate", "List dead letters by destination and cause, or discard them."),
        "sources": ("define", "List sources; make, change, rotate and delete stored ones."),
        "destinations": ("define", "List destinations; make, change, rotate and delete stored ones."),
        "routes": ("define", "List routes; make, change and delete stored ones."),
        "accounts": ("accounts", "List accounts; make, change, rotate, show and delete them."),
        "portal": ("portal", "Make a link to the page of a customer."),
        "stats": ("browse", "Show the numbers since a moment."),
        "open": ("browse:open_", "Open the dashboard in your browser, logged in."),
    },
    "Act": {
        "send": ("send", "Send a signed sample to a source."),
        "forward": ("send", "Relay live arrivals to a local server."),
        "replay": ("operate", "Deliver again: plan, ask, run."),
        "pause": ("operate", "Hold a destination back."),
        "resume": ("operate", "Resume a destination."),
        "mark": ("operate", "Mark this moment in every chart, such as a deploy."),
        "erase": ("operate", "Erase everything that is kept of a subject or account."),
        "import": ("define:import_", "Import processed keys, definitions, or archived events."),
        "export": ("operate", "Write events with their bodies as JSON lines, or definitions as TOML."),
        "keys": ("keys", "Claim, commit, release and show a key by hand."),
        "whatsapp": ("whatsapp", "Send a message over WhatsApp, or look after an instance."),
    },
    "Set up": {
        "init": ("settings", "Ask three questions and write an oncehook.toml."),
        "config": ("settings", "Check, show and describe the settings."),
        "db": ("db", "Manage the store: migrate, status, sql, prune, backup, restored."),
        "token": ("settings", "Make a bearer token for the API."),
        "doctor": ("settings", "Check settings, store and destinations; suggest fixes."),
        "health": ("settings", "Exit with 0 if the server is ready, for probes."),
        "completion": ("", "Print the script that completes commands in your shell."),
        "version": ("", "Print the version."),
    },
}
"""By group and name: the module (and the function, where it has another name), and the line in `--help`."""

COMMANDS: Final = {name: entry for group in GROUPS.values() for name, entry in group.items()}


class _LazyGroup(CommandGroup):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, function = COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(f".{module}", __name__), function or cmd_name)
        return add_shared_options(command, cmd_name)

    def invoke(self, ctx: click.Context) -> object:
        """Run the command. A reader that closes the pipe early (`| head`) is no failure."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            # Python's last flush of stdout goes to /dev/null, where it cannot fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete command names from the table, so that no command is imported."""
        found = [CompletionItem(name, help=line) for name, (_, line) in COMMANDS.items() if name.startswith(incomplete)]
        return found + click.Command.shell_complete(self, ctx, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, COMMANDS))
        for title, commands in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(f"{name:<{width}}", line) for name, (_, line) in commands.items()])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Begin"):
            formatter.write_dl(
                [
                    ("oncehook demo", "See it work, with nothing set up."),
                    ("oncehook COMMAND --help", "Options of a command, with an example."),
                ]
            )


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="oncehook %(version)s")
def cli() -> None:
    """The webhook inbox: every event accepted once, worked in order, never lost, always replayable."""


@click.command("version")
def version() -> None:
    """Print the version."""
    click.echo(__version__)


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script of SHELL.

    \b
    bash   eval "$(oncehook completion bash)"              in ~/.bashrc
    zsh    eval "$(oncehook completion zsh)"               in ~/.zshrc
    fish   oncehook completion fish > ~/.config/fish/completions/oncehook.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(cli, {}, "oncehook", "_ONCEHOOK_COMPLETE").source())


def main(
    arguments: Sequence[str] | None = None,
    *,
    program: str | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> NoReturn:
    """Run the command line; an error of ours is one sentence and a hint, never a traceback.

    A program that wraps it gives its own name, and defaults for the commands' options (click's default_map).
    """
    voice.quiet = voice.verbose = voice.wide = False
    try:
        code = cli.main(
            arguments,
            program,
            standalone_mode=False,
            color=False if os.environ.get("NO_COLOR") else None,
            default_map=defaults,
        )
    except click.ClickException as error:
        _print_error(*show_error(error, program or ""))
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(130)
    except (OncehookError, OSError) as error:
        if voice.verbose:
            click.echo(traceback.format_exc(), err=True, nl=False)
        _print_error(str(error), getattr(error, "hint", ""))
        sys.exit(2 if isinstance(error, ConfigError) else 3 if isinstance(error, StoreUnavailable) else 1)
    sys.exit(code if isinstance(code, int) else 0)


def _print_error(error: str, hint: str) -> None:
    for line in [*message(error, "oncehook: "), *(message(hint, "  ") if hint else [])]:
        click.echo(line, err=True)
