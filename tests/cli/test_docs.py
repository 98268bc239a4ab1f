"""Every command that a page shows is one that the command line takes: names, options and their values."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from oncehook.cli import cli

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
ENDS = {"|", ">", ">>", "<", "&", "&&", ";", "||", "2>"}


def commands_of(text: str) -> Iterator[list[str]]:
    """What stands behind `oncehook` in the console blocks of a page, up to a pipe or a comment."""
    for block in re.findall(r"```(?:console|sh|bash|shell)\n(.*?)```", text, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            said = line.removeprefix("$ ") if line.startswith("$ ") or "$ " not in block else ""
            for found in re.finditer(r"(?:^|[|(&] ?|uvx |-- )oncehook ((?:[^\"']|\"[^\"]*\"|'[^']*')*)", said):
                yield words_of(found[1])


def words_of(text: str) -> list[str]:
    lexer = shlex.shlex(text, posix=True, punctuation_chars="|&;<>()")
    lexer.whitespace_split = True
    words = list(lexer)
    return words[: next((place for place, word in enumerate(words) if word in ENDS or word == ")"), len(words))]


def parse(words: list[str]) -> None:
    """As far as can be told without running it. Raises click's UsageError."""
    command: click.Command = cli
    context = click.Context(cli)
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        found = command.get_command(context, words[0])
        if found is None:
            if command.invoke_without_command:
                break
            raise click.UsageError(f"no command {words[0]}")
        command, words = found, words[1:]
    options, rest, _ = command.make_parser(click.Context(command)).parse_args(words)
    for one in command.params:
        value = options.get(one.name or "")
        if isinstance(one, click.Option) and isinstance(one.type, click.Choice) and value and "…" not in value:
            one.type_cast_value(click.Context(command), value)
        if isinstance(one, click.Argument) and one.required and not {"--help", "-h"} & set(words):
            is_given = isinstance(value, str | tuple) and bool(value)
            assert is_given, f"{command.name} needs {one.name}"
    assert not rest or isinstance(command, click.Group), rest


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_are_taken_as_printed(page: Path) -> None:
    for words in commands_of(page.read_text()):
        try:
            parse(list(words))
        except (click.UsageError, AssertionError) as error:
            raise AssertionError(f"oncehook {' '.join(words)}: {error}") from error


def test_there_is_something_to_check() -> None:
    found = list(commands_of((ROOT / "docs/reference/cli.md").read_text()))
    assert ["completion", "bash"] in found
    assert ["import", "keys", "-", "--source", "stripe"] in found
    with pytest.raises(click.UsageError):
        parse(["events", "--nonsense"])
    with pytest.raises(AssertionError):
        parse(["show"])
