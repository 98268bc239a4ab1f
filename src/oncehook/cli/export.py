"""`oncehook export`: events with their bodies, as JSON lines, for another program or for keeping.

One object per event, as the API shows it, with `body` and `body_encoding` beside it. Written as it is read, so that
there may be many.
"""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Iterator
from typing import IO, Any

import click

from oncehook.cli.api import Api, at, speaks
from oncehook.cli.progress import Progress
from oncehook.cli.showing import count, say


@click.command("export")
@click.argument("query", nargs=-1, metavar="[QUERY]")
@click.option("--output", "-o", "output", type=click.File("w", encoding="utf-8", lazy=True), help="Into this file.")
@click.option(
    "--body",
    "encoding",
    type=click.Choice(["json", "base64", "none"]),
    default="json",
    show_default=True,
    help="JSON as JSON and the rest as base64; always base64, which keeps every byte; or left out.",
)
@speaks
def command(api: Api, query: tuple[str, ...], output: IO[str] | None, encoding: str) -> int:
    """Write events as JSON lines, newest first: all, or those that match QUERY.

    For example: oncehook export source:stripe since:30d > stripe.jsonl
    """
    with Progress("exporting", unit="events") as bar:
        for event in _events(api, " ".join(query), encoding):
            # In ASCII: a stranger's half character must not end the file.
            click.echo(json.dumps(event), file=output)
            bar.add(1)
    say([f"exported {count(bar.done, 'event')}"], err=True)
    return 0


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
