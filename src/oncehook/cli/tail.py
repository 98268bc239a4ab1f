"""`oncehook tail`: what happens, as it happens: a line each, or on a terminal a list to walk through.

The list and its keys are in `screen`; here is which moments are meant, and how each reads in a line.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import click

from oncehook import clock
from oncehook.cli.api import Api, speaks
from oncehook.cli.moments import Feed, Moment, feed
from oncehook.cli.showing import line, say, state, text
from oncehook.human import words

STATUSES = ("accepted", "duplicate", "conflict", "rejected", "done", "retry", "dead")


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which moments are meant. What is not said means all of them."""

    sources: tuple[str, ...] = ()
    statuses: tuple[str, ...] = ()
    subjects: tuple[str, ...] = ()

    def __call__(self, moment: Moment) -> bool:
        kind, fields = moment
        if kind in ("lost", "back", "dropped"):
            return True
        said = {"source": self.sources, "outcome": self.statuses, "subject": self.subjects}
        return all(not meant or fields.get(name) in meant for name, meant in said.items())


@click.command("tail")
@click.option("--source", "sources", multiple=True, metavar="NAME", help="Only of this source; may be repeated.")
@click.option(
    "--status", "statuses", multiple=True, type=click.Choice(STATUSES), help="Only what ended so; may be repeated."
)
@click.option("--subject", "subjects", multiple=True, help="Only about this subject; may be repeated.")
@click.option("--plain", is_flag=True, help="Lines on a terminal, too.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
@speaks
def command(
    api: Api,
    sources: tuple[str, ...],
    statuses: tuple[str, ...],
    subjects: tuple[str, ...],
    plain: bool,
    as_json: bool,
) -> int:
    """Show arrivals and attempts as they happen, until Ctrl-C.

    On a terminal: j and k move, enter shows, r replays, o opens the dashboard, q ends. When the server goes away, it is
    waited for.
    """
    wanted = Wanted(sources, statuses, subjects)
    moments = feed(api)
    with contextlib.suppress(KeyboardInterrupt):
        if not (as_json or plain) and sys.stdin.isatty() and sys.stdout.isatty():
            from oncehook.cli.screen import Screen

            Screen(api, moments, wanted).run()
        else:
            _print(moments, wanted, as_json)
    return 0


def _print(moments: Feed, wanted: Wanted, as_json: bool) -> None:
    say(["watching; Ctrl-C ends"], err=True)
    while True:
        for kind, fields in moments.take(3600):
            if not wanted((kind, fields)):
                continue
            if as_json and kind not in ("lost", "back"):
                say([line({"moment": kind, "at": clock.now_utc().isoformat(), **fields})])
            else:
                say([told(kind, fields, clock.now_utc())], err=kind in ("lost", "back", "dropped"))
            sys.stdout.flush()


def told(kind: str, fields: Mapping[str, Any], at: datetime) -> str:
    """A moment in a line, by this machine's clock."""
    parts = [at.astimezone().strftime("%H:%M:%S"), *_PARTS.get(kind, _other)(fields)]
    return "  ".join(part for part in parts if part)


def _arrival(fields: Mapping[str, Any]) -> list[str]:
    ids = fields.get("event_ids")
    which = f"{ids[0]} and {len(ids) - 1} more" if ids else fields.get("event_id", "")
    counted = ", ".join(f"{n} {word}" for word, n in fields.get("outcomes", {}).items())
    why = text(f"{fields['reason']} from {fields['peer']}") if "reason" in fields else ""
    about = text(fields.get("subject"), 24)
    return [which, _what(fields), state(fields["outcome"]), counted, why, about, _took(fields)]


def _attempt(fields: Mapping[str, Any]) -> list[str]:
    number = f"attempt {fields['attempt']}" if fields["outcome"] != "done" or fields["attempt"] > 1 else ""
    run = f"run {fields['run']}" if fields.get("run", 1) > 1 else ""
    again = f"again in {words(round(fields['again_in_s'], 1))}" if "again_in_s" in fields else ""
    failed = fields.get("error") or (f"HTTP {fields['status']}" if fields.get("status") else "")
    why = "" if fields["outcome"] == "done" else text(str(failed).partition("\n")[0], 80)
    to = f"→ {text(fields['destination'])}"
    took = _took(fields)
    return [
        fields["event_id"],
        _what(fields),
        to,
        state(fields["outcome"], fields.get("note")),
        number,
        run,
        again,
        why,
        took,
    ]


def _what(fields: Mapping[str, Any]) -> str:
    return text(f"{fields['source']} {fields.get('type', '')}".rstrip())


def _took(fields: Mapping[str, Any]) -> str:
    return f"{fields['duration_s'] * 1000:.0f} ms" if "duration_s" in fields else ""


def _watermark(fields: Mapping[str, Any]) -> list[str]:
    word = click.style("crossed", fg="red") if fields["crossed"] else click.style("back", fg="green")
    return [f"watermark {text(fields['watermark'])}", word, f"level {fields['level']:,g}, limit {fields['limit']:,g}"]


def _lost(fields: Mapping[str, Any]) -> list[str]:
    return [click.style(f"the line is gone ({text(fields['error'], 80)}); trying again", fg="yellow")]


def _back(fields: Mapping[str, Any]) -> list[str]:
    return [click.style("the line is back; what happened meanwhile is in `oncehook events`", fg="green")]


def _dropped(fields: Mapping[str, Any]) -> list[str]:
    return [click.style(f"{fields['count']:,} moments were too many to tell", fg="yellow")]


def _other(fields: Mapping[str, Any]) -> list[str]:
    return [text(line(fields), 200)]


_PARTS = {
    "arrival": _arrival,
    "attempt": _attempt,
    "watermark": _watermark,
    "lost": _lost,
    "back": _back,
    "dropped": _dropped,
}
