"""`oncehook destinations`, `pause`, `resume`: where events go, how that stands, and holding it back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

from oncehook.cli.api import Api, at, json_option, speaks
from oncehook.cli.showing import count, document, say, state, table, text
from oncehook.human import words

_HEAD = ("name", "kind", "address", "state", "pending", "leased", "dead", "oldest due", "retry")


@click.command("destinations")
@json_option
@speaks
def command(api: Api, as_json: bool) -> int:
    """Show every destination: whom it reaches, how it stands, when it is tried again."""
    answer = api.get("destinations")
    if as_json:
        say([document(answer)])
    elif answer["items"]:
        say(table(_HEAD, map(_row, answer["items"])))
    else:
        say(["no destinations: add a [destination.NAME] and a [[route]] to it"], err=True)
    return 0


def _row(found: Mapping[str, Any]) -> list[str]:
    oldest = found["oldest_due"]
    counts = [f"{found[word]:,}" for word in ("pending", "leased", "dead")]
    due = "" if oldest is None else words(round(oldest))
    return [text(found["name"]), found["kind"], text(found["address"], 60), _state(found), *counts, due, found["retry"]]


def _state(found: Mapping[str, Any]) -> str:
    word, failures = found["state"], found["failures"]
    notes = {
        "paused": text(found["paused_why"] or ""),
        "held_back": f"{count(failures, 'failure')} in a row",
        "failing": f"{count(failures, 'failure')} in a row",
    }
    return state(word.replace("_", " "), notes.get(word))


@click.command("pause")
@click.argument("names", nargs=-1, required=True, metavar="DESTINATION...")
@click.option("--reason", default="", help="Why; shown beside it, and kept in the audit log.")
@json_option
@speaks
def pause(api: Api, names: Sequence[str], reason: str, as_json: bool) -> int:
    """Hold a destination back. Its deliveries wait; nothing is lost, and no attempt is burnt."""
    return _told([api.post(at("destinations", name, "pause"), {"reason": reason}) for name in names], as_json)


@click.command("resume")
@click.argument("names", nargs=-1, required=True, metavar="DESTINATION...")
@json_option
@speaks
def resume(api: Api, names: Sequence[str], as_json: bool) -> int:
    """Let a destination go on."""
    return _told([api.post(at("destinations", name, "resume")) for name in names], as_json)


def _told(changed: Sequence[Mapping[str, Any]], as_json: bool) -> int:
    if as_json:
        say([document({"items": changed})])
    else:
        say(f"{text(one['name'])}  {_state(one)}  {one['pending']:,} pending" for one in changed)
    return 0
