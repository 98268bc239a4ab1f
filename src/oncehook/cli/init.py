"""`oncehook init`: three questions, and a commented oncehook.toml that passes `oncehook config check`.

Where hooks come from, where they go, which store keeps them: asked on a terminal, or said by options. A file that is
there is never touched.
"""

from __future__ import annotations

import ipaddress
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import click

from oncehook.cli.api import Failed
from oncehook.cli.showing import say
from oncehook.errors import ConfigError

PYTHON: Final = "python"
SQLITE: Final = "sqlite:./oncehook.db"


@click.command("init")
@click.option("--from", "origins", multiple=True, metavar="PRESET", help="Where hooks come from; may be repeated.")
@click.option("--to", "goal", metavar="URL", help="Where they go: a web address, or the word python for a handler.")
@click.option("--store", metavar="URL", help="Which store: sqlite:./oncehook.db or postgresql://…")
@click.option(
    "--file", "file", type=click.Path(path_type=Path, dir_okay=False), default="oncehook.toml", show_default=True,
    help="The file to write.",
)  # fmt: skip
def command(origins: tuple[str, ...], goal: str | None, store: str | None, file: Path) -> int:
    """Ask three questions and write an oncehook.toml."""
    if file.exists():
        raise Failed(f"{file} is there already, and stays as it is.", hint="Write another one with --file NAME.")
    if not (origins and goal and store) and not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise click.UsageError("There is no terminal to ask on; say --from, --to and --store.")
    origins = origins or _ask_origins()
    goal = goal or click.prompt(
        "Where do they go? A web address, or the word python for a handler of yours", PYTHON, err=True
    )
    store = store or click.prompt("Which store? sqlite:FILE or postgresql://HOST/DATABASE", SQLITE, err=True)
    text = page(origins, goal, store)
    _check(text)
    with file.open("x", encoding="utf-8") as new:
        new.write(text)
    say([str(file)])
    say(_next_steps(text, goal, file), err=True)
    return 0


def _ask_origins() -> tuple[str, ...]:
    from oncehook import presets

    say([f"  known senders: {', '.join(presets.names())}"], err=True)
    said = click.prompt("Where do hooks come from? One or several, generic for any other", "generic", err=True)
    return tuple(re.split(r"[\s,]+", str(said).strip()))


def _check(text: str) -> None:
    """What is written must be good: the same check as `oncehook config check`, secrets aside."""
    from oncehook.settings import load

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "oncehook.toml"
        file.write_text(text, encoding="utf-8")
        clean = {name: value for name, value in os.environ.items() if not name.startswith("ONCEHOOK_")}
        try:
            load(file, clean, secrets=False)
        except ConfigError as error:
            raise ConfigError(str(error).replace(f"{file}:", "line "), hint="Nothing was written.") from None


def _next_steps(text: str, goal: str, file: Path) -> list[str]:
    named = "" if file == Path("oncehook.toml") else f" --config {file}"
    variables = dict.fromkeys(re.findall(r'^[^#\n]*\{ env = "(\w+)" \}', text, re.MULTILINE))
    steps = [f"  export {name}=…" for name in variables]
    steps += [f"  oncehook config check{named}", f"  oncehook serve{' app:inbox' if goal == PYTHON else named}"]
    return ["next:", *steps]


# -- the page ----------------------------------------------------------------------------------


def page(origins: Sequence[str], goal: str, store: str) -> str:
    """The whole file."""
    return "\n".join(
        [
            "# Settings of this inbox. `oncehook config check` looks it over, `oncehook config show` says what holds.",
            "# Secrets are named here and never written: this file is safe to commit.",
            "",
            *_store(store),
            "",
            "[server]",
            'host = "127.0.0.1"',
            "port = 4020",
            '# admin_token = { env = "ONCEHOOK_TOKEN" }   # for the API and the dashboard from elsewhere',
            *(line for origin in origins for line in ["", *_source(origin)]),
            "",
            *_goal(origins, goal),
            "",
            "[watermark]",
            "dead = 100             # an alert when so many deliveries were given up",
            'oldest_due = "5m"      # or when something has been due for so long',
            "",
        ]
    )


def _store(store: str) -> list[str]:
    from oncehook.settings.values import hide_password

    if hide_password(store) != store:
        raise ConfigError(
            "The store's address holds a password, which does not belong into this file.",
            hint="Write it without, and set PGPASSWORD, or the whole address as ONCEHOOK_STORE.",
        )
    about = "# one file, one process that writes it" if store.startswith("sqlite") else "# any number of processes"
    return [f"store = {_quoted(store)}   {about}"]


def _source(origin: str) -> list[str]:
    from oncehook import presets

    if origin not in presets.names():
        from difflib import get_close_matches

        near = get_close_matches(origin, presets.names(), 1)
        hint = f'Did you mean "{near[0]}"?' if near else f"There are: {', '.join(presets.names())}."
        raise ConfigError(f'There is no preset "{origin}".', hint=hint)
    preset = presets.load(origin)
    variable = re.sub(r"\W", "_", origin).upper()
    variable = f"_{variable}" if variable[0].isdigit() else variable
    lines = [
        f"[source.{origin}]",
        f"# {preset.title} posts to /in/{origin}; how to set that up is in docs/providers/{origin}.md",
        f'preset = "{origin}"',
    ]
    if "secret" in preset.needs:
        lines.append(f'secret = {{ env = "{variable}_SECRET" }}      # a list while rotating')
    if "verify_token" in preset.needs:
        lines.append(f'verify_token = {{ env = "{variable}_VERIFY_TOKEN" }}')
    if "public_url" in preset.needs:
        lines.append(f'public_url = "https://inbox.example/in/{origin}"   # the address that is registered there')
    if "key" in preset.needs:
        lines.append('key = ["$.id"]                       # what makes two arrivals the same event')
    if preset.settings.subject is None:
        lines.append('# subject = "$.customer.id"          # events of one subject go one at a time, in order')
    return lines


def _goal(origins: Sequence[str], goal: str) -> list[str]:
    if goal == PYTHON:
        return [
            "# Handlers are written in Python, in app.py; serve it with: oncehook serve app:inbox",
            "#",
            "#   from oncehook import Event, Inbox",
            "#",
            "#   inbox = Inbox.from_toml()",
            "#",
            f'#   @inbox.on("{origins[0]}")',
            "#   async def handle(event: Event) -> None: ...",
        ]
    lines = ["[destination.target]", f"url = {_quoted(goal)}", 'retry = "durable"       # ten attempts over three days']
    if _is_private(goal):
        lines.append("allow_private = true    # this address is in a private network")
    lines.append('# sign = { env = "TARGET_SECRET" }   # then it is signed, and the receiver can verify it')
    for origin in origins:
        lines += ["", "[[route]]", f'from = "{origin}"', 'to = "target"', '# when = { type = "message.*" }']
    return lines


def _is_private(url: str) -> bool:
    try:
        host = urlsplit(url).hostname or ""
        return host == "localhost" or "." not in host.strip("[]") or ipaddress.ip_address(host).is_private
    except ValueError:
        return False


def _quoted(text: str) -> str:
    if not text.isprintable():
        raise ConfigError("An address has no control characters.")
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
