"""`oncehook export`: events with their bodies, as JSON lines, for another program or for keeping.

One object per event, as the API shows it, with `body` and `body_encoding` beside it. Written as it is read, so that
there may be many.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import click

from oncehook.cli.api import Api, at, speaks
from oncehook.cli.progress import Progress
from oncehook.cli.showing import count, say
from oncehook.private import open_private


@click.command("export")
@click.argument("query", nargs=-1, metavar="[QUERY]")
@click.option(
    "--output",
    "-o",
    "output",
    type=click.Path(path_type=Path, dir_okay=False, allow_dash=True),
    help="Into this file, which only you can read then.",
)
@click.option(
    "--body",
    "encoding",
    type=click.Choice(["json", "base64", "none"]),
    default="json",
    show_default=True,
    help="JSON as JSON and the rest as base64; always base64, which keeps every byte; or left out.",
)
@speaks
def command(api: Api, query: tuple[str, ...], output: Path | None, encoding: str) -> int:
    """Write events as JSON lines, newest first: all, or those that match QUERY.

    For example: oncehook export source:stripe since:30d > stripe.jsonl
    """
    with Progress("exporting", unit="events") as bar, _opened(output) as file:
        for event in _events(api, " ".join(query), encoding):
            # In ASCII: a stranger's half character must not end the file.
            click.echo(json.dumps(event), file=file)
            bar.add(1)
    say([f"exported {count(bar.done, 'event')}"], err=True)
    return 0


@contextlib.contextmanager
def _opened(output: Path | None) -> Iterator[IO[str] | None]:
    """Open what is written to; None stands for stdout. Bodies are in it: for its owner's eyes, as the store is."""
    if output is None or str(output) == "-":
        yield None
        return
    is_device = output.exists() and not output.is_file()  # /dev/stdout, a pipe: keeps nothing
    descriptor = os.open(output, os.O_WRONLY) if is_device else open_private(output, os.O_WRONLY | os.O_CREAT)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        if not is_device:
            file.truncate()
        yield file


def _events(api: Api, query: str, encoding: str) -> Iterator[dict[str, Any]]:
    for listed in api.pages("events", query=query):
        event = api.get(at("events", listed["id"]))
        if encoding != "none":
            event |= encoded(api.raw(at("events", listed["id"], "body")), encoding)
        yield event


def encoded(body: bytes, encoding: str) -> dict[str, Any]:
    """A body as it can stand in JSON, and how it stands there."""
    if encoding == "json":
        with contextlib.suppress(ValueError, RecursionError):
            return {"body": json.loads(body, parse_constant=_refuse), "body_encoding": "json"}
    return {"body": base64.b64encode(body).decode(), "body_encoding": "base64"}


def _refuse(constant: str) -> None:
    raise ValueError(constant)  # NaN and Infinity are no JSON, whatever Python thinks
