"""`oncehook dead`: dead letters by destination and cause, and closing them without replay."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from oncehook.cli.api import Api, json_option, speaks
from oncehook.cli.replay import confirm
from oncehook.cli.showing import count, document, fields, moment, say, table, text


@click.group("dead", invoke_without_command=True)
@click.option("--destination", metavar="NAME", help="Only this one's.")
@json_option
@speaks
def command(api: Api, destination: str | None, as_json: bool) -> int:
    """Show dead letters, by destination and cause."""
    context = click.get_current_context()
    if context.invoked_subcommand is not None:
        return 0
    answer = api.get("dead", destination=destination)
    if as_json:
        say([document(answer)])
        return 0
    if not answer["items"]:
        say(["no dead letters"], err=True)
        return 0
    say(table(("count", "destination", "cause", "first", "last", "sample"), map(_row, answer["items"])))
    return 0


def _row(cause: Mapping[str, Any]) -> list[str]:
    first, last = moment(cause["first_at"]), moment(cause["last_at"])
    return [f"{cause['count']:,}", text(cause["destination"]), text(cause["cause"], 80), first, last, cause["sample"]]


@command.command("discard")
@click.argument("query", nargs=-1, required=True, metavar="QUERY")
@click.option("--reason", required=True, help="Why; kept with each of them and in the audit log.")
@click.option("--dry-run", is_flag=True, help="Show how many, and do nothing.")
@click.option("--yes", is_flag=True, help="Do not ask. Needed where there is no terminal.")
@json_option
@speaks
def discard(api: Api, query: tuple[str, ...], reason: str, dry_run: bool, yes: bool, as_json: bool) -> int:
    """Close all dead letters that match QUERY, without replay. They can still be replayed later."""
    # A plan counts, and stands for what it has shown: what dies while the question is on the screen is not closed.
    plan = api.post("replays/plan", {"query": " ".join([*query, "status:dead"])})
    if dry_run:
        say([document({"matching": plan["total"], "query": plan["query"]})] if as_json else [str(plan["total"])])
        return 0
    if plan["total"]:
        say(_shown(plan), err=True)
        confirm(api, "discard them?", yes=yes)
        answer = api.post("dead/discard", {"plan": plan["plan"], "reason": reason})
    else:
        answer = {"discarded": 0}
    say([document(answer) if as_json else f"discarded {answer['discarded']}"])
    return 0


def _shown(plan: Mapping[str, Any]) -> list[str]:
    by = ", ".join(f"{number:,} {text(name)}" for name, number in plan["by_destination"].items())
    span = f"{moment(plan['oldest'])} to {moment(plan['newest'])}"
    return [
        count(plan["total"], "dead letter"),
        *fields({"for": by, "received": span, "query": text(plan["query"], 2000)}, "  "),
    ]
