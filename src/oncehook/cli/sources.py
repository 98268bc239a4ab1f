"""`oncehook sources`: what is set up to receive, and how it goes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from oncehook.cli.api import Api, json_option, speaks
from oncehook.cli.showing import document, moment, say, table, text

_HEAD = (
    *("name", "preset", "address", "verifier", "covers", "secrets", "to"),
    *("last arrival", "24 h", "duplicates", "rejected"),
)


@click.command("sources")
@json_option
@speaks
def command(api: Api, as_json: bool) -> int:
    """Show every source: its address, its verifier and what that covers, and what came in the last 24 hours."""
    answer = api.get("sources")
    if as_json:
        say([document(answer)])
    elif answer["items"]:
        say(table(_HEAD, map(_row, answer["items"])))
    else:
        say(["no sources: add a [source.NAME]"], err=True)
    return 0


def _row(found: Mapping[str, Any]) -> list[str]:
    from oncehook.reports import proven  # brings much with it: --help must not wait for that

    verifier = click.style("none: anyone may send", fg="red") if found["unverified"] else found["verifier"]
    counts = [f"{found['figures'].get(word, 0):,}" for word in ("accepted", "duplicate", "rejected")]
    return [
        text(found["name"]),
        found["preset"] or "",
        text(found["address"] or "hidden", 60),
        verifier,
        "" if found["unverified"] else proven(found["body_authenticated"], found["key_authenticated"]),
        str(found["secrets"]),
        text(", ".join(found["destinations"])),
        moment(found["last_arrival"]),
        *counts,
    ]
