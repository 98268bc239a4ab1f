"""`oncehook completion`: the script that lets a shell complete commands, options and their values."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    """Print the completion script of SHELL.

    \b
    bash   eval "$(oncehook completion bash)"              in ~/.bashrc
    zsh    eval "$(oncehook completion zsh)"               in ~/.zshrc
    fish   oncehook completion fish > ~/.config/fish/completions/oncehook.fish
    """
    from oncehook.cli import cli

    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(cli, {}, "oncehook", "_ONCEHOOK_COMPLETE").source())
