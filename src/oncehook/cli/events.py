"""`oncehook events`: a list of events, by the same query as everywhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import click

from oncehook.cli.api import Api, speaks
from oncehook.cli.showing import line, moment, say, state, table, text


@click.command("events")
@click.argument("query", nargs=-1, metavar="[QUERY]")
@click.option("--limit", type=click.IntRange(1), default=50, show_default=True, help="At most so many, the newest.")
@click.option("--all", "everything", is_flag=True, help="All that match.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
@speaks
def command(api: Api, query: tuple[str, ...], limit: int, everything: bool, as_json: bool) -> int:
    """List events, newest first: all, or those that match QUERY.

    For example: oncehook events source:stripe status:dead since:2h
    """
    found = api.pages("events", most=None if everything else limit, query=" ".join(query))
    if as_json:
        # As they come: who reads them may stop early, or be slow.
        say(line(one) for one in found)
        return 0
    rows = [_row(one) for one in found]
    if rows:
        say(table(("received", "id", "source", "type", "subject", "key", "came", "deliveries"), rows))
    else:
        say(["no events match" if query else "no events yet: oncehook send --list shows what can be sent"], err=True)
    return 0


def _row(event: Mapping[str, Any]) -> list[str]:
    return [
        moment(event["received_at"]),
        event["id"],
        text(event["source"], 20),
        text(event["type"], 32),
        text(event["subject"], 24),
        text(event["key"] or ", ".join(event["marks"]), 28),
        f"×{event['copies']}" if event["copies"] > 1 else "",
        _chips(event["deliveries"]),
    ]


def _chips(deliveries: Iterable[Mapping[str, Any]]) -> str:
    return " ".join(map(_chip, deliveries))


def _chip(delivery: Mapping[str, Any]) -> str:
    stands = f"{text(delivery['destination'], 20)}:{state(delivery['status'], delivery['note'])}"
    return f"{stands} (replayed)" if delivery["replayed"] else stands
