"""What all commands have in common: `-q` and `-v`, a variable for every option, and whether talk is wanted.

`polite` is called on each command as it is loaded. How loud this process is stands in `voice`; `showing` and `progress`
ask it before they talk.
"""

from __future__ import annotations

from typing import Final

import click

SHARED: Final = {"--config", "--server", "--token-env", "--json", "--quiet", "--verbose"}
"""Options that mean the same everywhere: one variable says them to every command."""


class Voice:
    """How loud this process is."""

    quiet = False
    verbose = False

    @property
    def log_level(self) -> str | None:
        """What to log; None: as the settings say."""
        return "debug" if self.verbose else "warning" if self.quiet else None


voice: Final = Voice()


def _set_quiet(context: click.Context, option: click.Parameter, value: bool) -> None:
    voice.quiet = value


def _set_verbose(context: click.Context, option: click.Parameter, value: bool) -> None:
    voice.verbose = value


def polite(command: click.Command, *names: str) -> click.Command:
    """The command (and what is below it) with what every command has. `names` is what it is called, word by word."""
    if isinstance(command, click.Group):
        for name, below in command.commands.items():
            polite(below, *names, name)
    if not isinstance(command, click.Group) or command.invoke_without_command:
        _add_voice(command)
    for option in command.params:
        if isinstance(option, click.Option):
            _name_variable(option, names)
    return command


def _add_voice(command: click.Command) -> None:
    there = {name for option in command.params for name in option.opts}
    for short, name, callback, about in (
        ("-q", "--quiet", _set_quiet, "Data and errors only."),
        ("-v", "--verbose", _set_verbose, "Say more; trace errors."),
    ):
        if name not in there:  # a command may have one of its own, or have been loaded before
            option = click.Option([short, name], is_flag=True, expose_value=False, callback=callback, help=about)
            command.params.append(option)


def _name_variable(option: click.Option, names: tuple[str, ...]) -> None:
    is_act = option.is_flag and not option.is_bool_flag  # --abort and its like: a deed is no setting
    if is_act:
        return
    if option.envvar is None:
        longest = max(option.opts, key=len)
        words = [] if longest in SHARED else list(names)
        option.envvar = "_".join(["ONCEHOOK", *words, longest.lstrip("-")]).upper().replace("-", "_")
    option.show_envvar = True
