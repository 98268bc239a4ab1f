"""`oncehook erase`: everything that is kept of a subject goes. Counts first, asks, then erases in short batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

import click

from oncehook.cli.api import Api, json_option, speaks
from oncehook.cli.progress import Progress
from oncehook.cli.replay import confirm
from oncehook.cli.showing import count, document, fields, say

_COUNTS: Final = ("events", "deliveries", "attempts", "arrivals", "batches", "shared_batches")


@click.command("erase")
@click.option("--subject", required=True, metavar="SUBJECT", help="Whose events, exactly as events show it.")
@click.option("--source", metavar="NAME", help="Only this source's: two may use the same text for different things.")
@click.option("--reason", default="", help="Why; kept in the audit log, so do not name the subject in it.")
@click.option("--dry-run", is_flag=True, help="Show how much there is, and do nothing.")
@click.option("--yes", is_flag=True, help="Do not ask. Needed where there is no terminal.")
@json_option
@speaks
def command(api: Api, subject: str, source: str | None, reason: str, dry_run: bool, yes: bool, as_json: bool) -> int:
    """Erase bodies, headers, keys and subject of all events of SUBJECT, and what was answered to them.

    Open deliveries are discarded first. That the events were there stays, and so do the hashes of their keys: a late
    copy is still a duplicate. Nothing brings the rest back. A run that was cut off goes on when it is run again.
    """
    if not dry_run and not reason.strip():
        raise click.UsageError("Why? Say --reason; it is kept in the audit log.")
    asked = {"subject": subject, **({"source": source} if source else {})}
    found = api.post("erase", {**asked, "dry_run": True})
    if dry_run:
        say([document(found)] if as_json else _lines(found))
        return 0
    if found["events"]:
        say(_lines(found), err=True)
        confirm(api, "erase it for good?", yes=yes)
    erased = _erase(api, {**asked, "reason": reason}, found["events"])
    say([document(erased)] if as_json else [f"erased {count(erased['events'], 'event')}"])
    if not as_json:
        say([f"  audit: erase subject {erased['subject_hash']}"], err=True)
    return 0


def _erase(api: Api, order: Mapping[str, object], total: int) -> dict[str, Any]:
    """Ask until nothing is left; one request erases a bounded number."""
    sums: Counter[str] = Counter()
    with Progress("erasing", total) as bar:
        while True:
            answer = api.post("erase", order)
            sums.update({name: answer[name] for name in _COUNTS})
            bar.reach(sums["events"])
            if not answer["remaining"]:
                return {**answer, **{name: sums[name] for name in _COUNTS}}


def _lines(found: Mapping[str, Any]) -> list[str]:
    shared = found["shared_batches"]
    of_others = f", {shared:,} of them with events of others, which stay" if shared else ""
    return [
        count(found["events"], "event"),
        *fields(
            {
                "discarded first": count(found["deliveries"], "open or dead delivery", "open or dead deliveries"),
                "answers and errors": f"of {count(found['attempts'], 'attempt')}",
                "later arrivals": f"{found['arrivals']:,}",
                "raw batches": f"{found['batches']:,}{of_others}",
            },
            "  ",
        ),
    ]
