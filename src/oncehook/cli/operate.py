"""Commands that act: replay, dead discard, pause, resume, erase, import and export.

Where much is changed they show first what would happen, then ask. What is printed on stdout is the plan of a dry run or
the result; everything before it is a message on stderr.
"""

from __future__ import annotations

import base64
import contextlib
import csv
import io
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any, Final

import click

from oncehook import clock
from oncehook.cli.api import Api, Failed, Misused, Unreachable, asks_api, at
from oncehook.cli.browse import QueryCommand, destination_state, last_failure, list_dead, rate_of
from oncehook.cli.complete import complete_destination, complete_id, complete_query, complete_source
from oncehook.cli.db import import_archive
from oncehook.cli.help import CommandGroup
from oncehook.cli.options import json_option, wide_option, yes_option
from oncehook.cli.output import (
    Progress,
    TableColumn,
    answer,
    document,
    fields,
    id_of,
    join_columns,
    moment,
    say,
    sentence,
    show_counts,
    state,
    state_of_replay,
    table,
    text,
    when,
)
from oncehook.human import count, show_duration, show_id
from oncehook.private import open_private

POLL: Final = 0.3
"""Seconds between two polls of a running replay."""

# -- replay ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Selection:
    """The deliveries that the command line names, and the options of their replay."""

    ids: tuple[str, ...]
    query: str
    to: str | None
    until: str | None
    rate: str | None
    force: bool
    fresh_id: bool

    def body(self) -> dict[str, object]:
        from oncehook.query import with_words  # imports much: --help must not wait for that

        again = self._is_replay
        request: dict[str, object] = {
            "query": with_words(self.query, f"replay:{self.ids[0]} status:dead") if again else self.query,
            "ids": None if again else (list(self.ids) or None),
            "destination": self.to,
            "until": self.until,
            "rate": self.rate,
            "force": self.force,
            "fresh_id": self.fresh_id,
        }
        return {name: value for name, value in request.items() if value not in (None, "", False)}

    @property
    def delivery(self) -> str | None:
        alone = len(self.ids) == 1 and self.ids[0].startswith("dlv_") and not (self.query or self.to or self.until)
        return self.ids[0] if alone else None

    @property
    def _is_replay(self) -> bool:
        """Tell whether a replay is named: its dead deliveries are selected then."""
        return any(one.startswith("rpl_") for one in self.ids)

    def check(self) -> None:
        """Refuse an empty selection, and a replay together with anything else."""
        if not self.ids and not self.query.strip():
            raise click.UsageError("What? Name events or deliveries by their ids, or give a --query.")
        if self._is_replay and len(self.ids) > 1:
            raise click.UsageError("One replay at a time can be run again, and nothing beside it.")


@click.command("replay")
@click.argument("ids", nargs=-1, metavar="[ID]...", shell_complete=complete_id)
@click.option(
    "--query", default="", metavar="QUERY", shell_complete=complete_query,
    help="All deliveries that match, e.g. 'status:dead since:2h'.",
)  # fmt: skip
@click.option(
    "--to", metavar="DESTINATION", shell_complete=complete_destination, help="Only those for this destination."
)
@click.option(
    "--until", metavar="TIME", help="Only what was received before: 2026-11-16T10:00Z, or 2h for so long ago."
)
@click.option("--rate", metavar="RATE", help="At most so many, e.g. 20/s.")
@click.option("--force", is_flag=True, help="Those that are done, too.")
@click.option("--fresh-id", is_flag=True, help="Send a new webhook-id, for receivers that deduplicate.")
@click.option("--reason", default="", help="Why; kept in the audit log.")
@click.option("--dry-run", is_flag=True, help="Show the plan and do nothing.")
@yes_option
@click.option("--wait", is_flag=True, help="Wait until it is over; exit 1 when some are dead again.")
@click.option("--request-key", metavar="KEY", help="Two calls with the same key make one replay.")
@click.option("--pause", "act", flag_value="pause", help="Hold the replays that are named.")
@click.option("--resume", "act", flag_value="resume", help="Let them go on.")
@click.option("--abort", "act", flag_value="abort", help="End them; what is done stays done.")
@click.option("--list", "act", flag_value="list", help="Show the latest replays.")
@wide_option
@json_option
@asks_api
def replay(
    api: Api,
    reason: str,
    dry_run: bool,
    yes: bool,
    wait: bool,
    request_key: str | None,
    act: str | None,
    as_json: bool,
    **options: Any,
) -> int:
    """Deliver again: events (evt_…), deliveries (dlv_…), what failed of a replay (rpl_…), or all that match a query.

    Shows what would happen, then asks. Live traffic goes first, and order within a subject is kept.
    """
    if act == "list":
        found = list(api.pages("replays", most=50))
        return answer({"items": found}, table(_REPLAYS, map(_replay_row, found)), as_json=as_json)
    options["ids"] = tuple(map(api.full_id, options["ids"]))
    options["query"] = api.full_query([options["query"]])
    selection = Selection(**options)
    if act is not None:
        return _change_replays(api, selection.ids, act, as_json)
    selection.check()
    plan = api.post("replays/plan", selection.body())
    if dry_run:
        return answer(plan, plan_lines(plan), as_json=as_json)
    if not plan["total"] and request_key is None:
        return _report_nothing(plan, as_json=as_json)
    say(plan_lines(plan), err=True)
    if wait and api.transport.is_alone:
        raise Unreachable("Nobody works here, so there is nothing to wait for.", hint="Start `oncehook serve` first.")
    api.confirm("replay now?", yes=yes)
    replay_id = _start(api, selection, plan, reason, request_key)
    if wait:
        return _follow(api, replay_id, as_json)
    say([document({"replay_id": replay_id}) if as_json else replay_id])
    if api.transport.is_alone:
        say(["  it waits for a worker: oncehook serve"], err=True)
    elif sys.stderr.isatty() and not as_json:
        say([f"  oncehook show {show_id(replay_id)} says how it goes; replay --wait waits for it"], err=True)
    return 0


def _start(api: Api, selection: Selection, plan: Mapping[str, Any], reason: str, request_key: str | None) -> str:
    """Start the replay. A random request key lets a request whose answer was lost be sent again (R47).

    With --request-key the request must be the same each time, so it contains the selection instead of a plan.
    """
    key = request_key or clock.random_bytes(16).hex()
    is_single = selection.ids and plan["total"] == 1 and not request_key
    one = selection.delivery or (plan["sample"][0]["id"] if is_single else None)
    if one is not None:
        # At once, ahead of bulk replays; a delivery that was replayed a moment ago is an error here, and skipped in
        # bulk.
        options = {"force": selection.force, "fresh_id": selection.fresh_id, "reason": reason}
        made = api.post(at("deliveries", one, "replay"), options, key=key)
    else:
        request = {"plan": plan["plan"]} if request_key is None else selection.body()
        made = api.post("replays", {**request, "reason": reason}, key=key)
    return str(made["replay_id"])


def _report_nothing(plan: Mapping[str, Any], *, as_json: bool) -> int:
    """Report that nothing can be replayed. That is no failure, by id as by query: all of it is where it should be."""
    if as_json:
        say([document({"replay_id": None, "total": 0})])
    say(["nothing to replay", *fields({"left out": _left_out(plan)}, "  ")], err=True)
    return 0


def _follow(api: Api, replay_id: str, as_json: bool) -> int:
    say([replay_id], err=True)
    if not api.get("system")["workers"]:
        say(["  no worker has been heard of in the last minute; it waits for one"], err=True)
    replay = _wait(api, replay_id)
    parts = [replay_id, f"{replay['done']}/{replay['planned']} done"]
    parts += [f"{replay[word]} {word}" for word in ("dead", "skipped") if replay[word]]
    is_aborted = replay["state"] == "aborted"
    answer(replay, [join_columns(*parts, state("aborted") if is_aborted else "")], as_json=as_json)
    all_skipped = 0 < replay["skipped"] == replay["planned"]
    if all_skipped:
        why = "it was replayed less than a minute ago, is being worked on, or is gone"
        say([f"  nothing was replayed: {why}", "  Try again in a minute."], err=True)
    return 1 if replay["dead"] or is_aborted or all_skipped else 0


def _wait(api: Api, replay_id: str) -> dict[str, Any]:
    path = at("replays", replay_id)
    replay = api.get(path)
    with Progress("replaying", replay["planned"]) as bar:
        was_paused = False
        while True:
            bar.reach(replay["done"] + replay["dead"] + replay["skipped"])
            if replay["state"] in ("done", "aborted"):
                return replay
            is_paused = replay["state"] == "paused"
            if is_paused and not was_paused:
                bar.clear()
                say([f"  paused: oncehook replay --resume {replay_id}"], err=True)
            was_paused = is_paused
            api.transport.sleep(POLL)
            replay = api.get(path)


def _change_replays(api: Api, ids: Sequence[str], act: str, as_json: bool) -> int:
    if not ids or any(not one.startswith("rpl_") for one in ids):
        raise click.UsageError(f"Which replay? --{act} wants ids that begin with rpl_.")
    changed = [api.post(at("replays", one, act)) for one in ids]
    return answer(
        {"items": changed}, (join_columns(one["id"], state(one["state"])) for one in changed), as_json=as_json
    )


_REPLAYS: Final = (
    "id", TableColumn("state", 7), "created", "planned", "done", "dead",
    TableColumn("skipped", spare=3), TableColumn("by", 5, spare=1), TableColumn("reason", 8, spare=2),
    TableColumn("query", 10),
)  # fmt: skip


def _replay_row(replay: Mapping[str, Any]) -> list[str]:
    return [
        id_of(replay["id"]),
        state_of_replay(replay),
        when(replay["created_at"]),
        *(f"{replay[word]:,}" for word in ("planned", "done", "dead", "skipped")),
        text(replay["actor"], 20),
        text(replay["reason"]),
        text(replay["query"]),
    ]


def plan_lines(plan: Mapping[str, Any]) -> list[str]:
    by_status = show_counts(plan["by_status"])
    recipients = [
        [text(one["destination"]), text(one["address"] or one["kind"], 200), f"{one['count']:,}", _warning(one)]
        for one in plan["recipients"]
    ]
    facts = {
        "oldest": moment(plan["oldest"]),
        "newest": moment(plan["newest"]),
        "left out": _left_out(plan),
        "takes": _show_expected(plan),
        "query": text(plan["query"], 2000),
    }
    return [
        count(plan["total"], "delivery") + (f", {by_status}" if by_status else ""),
        *table((), recipients, "  → "),
        *fields(facts, "  "),
        *_sample(plan),
        *(line for note in plan["notes"] for line in sentence(text(note, 500), "  ", "  ")),
        *fields({"same as": text(plan["command"], 4000)}, "  "),
    ]


def _warning(recipient: Mapping[str, Any]) -> str:
    if recipient["kind"] == "gone":
        return click.style("no longer configured", fg="red")
    notes = {"paused": "paused", "failing": "failed last", "changed": "another address than before"}
    said = ", ".join(note for word, note in notes.items() if recipient[word])
    return said and click.style(said, fg="yellow")


def _left_out(plan: Mapping[str, Any]) -> str:
    hints = {"done": " (--force takes them too)"}
    return ", ".join(f"{number:,} {word}{hints.get(word, '')}" for word, number in plan["left_out"].items() if number)


def _show_expected(plan: Mapping[str, Any]) -> str:
    expected, rate = plan["expected_seconds"], rate_of(plan)
    if expected is None:
        return ""
    return f"about {show_duration(round(expected) or 1)}" + (f" at {rate}" if rate else "")


def _sample(plan: Mapping[str, Any]) -> list[str]:
    sample, total = plan["sample"], plan["total"]
    kinds = {one["destination"]: one["kind"] for one in plan["recipients"]}
    rows = []
    for one in sample:
        message = plan["previews"].get(one["id"])
        is_sent = message is not None and kinds.get(one["destination"]) == "sender"
        who = text(message["to"] if message is not None and is_sent else one["subject"])
        says = "" if message is None else f"“{text(message['text'], 60)}”"
        status = [id_of(one["id"]), state(one["status"], one["note"]), when(one["received_at"]), text(one["type"])]
        rows.append([*status, who, says, text(last_failure(one), 60)])
    more = [f"  … and {total - len(sample):,} more"] if total > len(sample) else []
    head = (
        TableColumn(""),
        TableColumn("", 6),
        TableColumn(""),
        TableColumn("", 12),
        TableColumn("", 8, spare=1),
        TableColumn("", 8),
        TableColumn("", 12),
    )
    return [*table(head, rows, "  "), *more]


# -- dead letters ------------------------------------------------------------------------------


@click.group("dead", cls=CommandGroup, invoke_without_command=True)
@click.option("--destination", metavar="NAME", shell_complete=complete_destination, help="Only this one's.")
@wide_option
@json_option
@asks_api
def dead(api: Api, destination: str | None, as_json: bool) -> int:
    """Show dead letters, by destination and cause."""
    if click.get_current_context().invoked_subcommand is not None:
        return 0
    return list_dead(api, destination, as_json)


@dead.command("discard", cls=QueryCommand)
@click.argument("query", nargs=-1, required=True, metavar="QUERY", shell_complete=complete_query)
@click.option("--reason", required=True, help="Why; kept with each of them and in the audit log.")
@click.option("--dry-run", is_flag=True, help="Show how many, and do nothing.")
@yes_option
@json_option
@asks_api
def discard(api: Api, query: tuple[str, ...], reason: str, dry_run: bool, yes: bool, as_json: bool) -> int:
    """Close all dead letters that match QUERY, without replay. They can still be replayed later."""
    from oncehook.query import with_words

    # Only what the plan has shown is closed: what dies while the question is on the screen stays open.
    plan = api.post("replays/plan", {"query": api.full_query([with_words(" ".join(query), "status:dead")])})
    if dry_run:
        return answer({"matching": plan["total"], "query": plan["query"]}, [str(plan["total"])], as_json=as_json)
    discarded = {"discarded": 0}
    if plan["total"]:
        span = f"{moment(plan['oldest'])} to {moment(plan['newest'])}"
        by = ", ".join(f"{number:,} {text(name)}" for name, number in plan["by_destination"].items())
        facts = fields({"for": by, "received": span, "query": text(plan["query"], 2000)}, "  ")
        say([count(plan["total"], "dead letter"), *facts], err=True)
        api.confirm("discard them?", yes=yes)
        discarded = api.post("dead/discard", {"plan": plan["plan"], "reason": reason})
    return answer(discarded, [f"discarded {discarded['discarded']}"], as_json=as_json)


# -- destinations ------------------------------------------------------------------------------


@click.command("pause")
@click.argument("names", nargs=-1, required=True, metavar="DESTINATION...", shell_complete=complete_destination)
@click.option("--reason", default="", help="Why; shown beside it, and kept in the audit log.")
@json_option
@asks_api
def pause(api: Api, names: Sequence[str], reason: str, as_json: bool) -> int:
    """Hold a destination back. Its deliveries wait; nothing is lost, and no attempt is counted."""
    return _print_changed([_change(api, name, "pause", {"reason": reason}) for name in names], as_json)


@click.command("resume")
@click.argument("names", nargs=-1, required=True, metavar="DESTINATION...", shell_complete=complete_destination)
@json_option
@asks_api
def resume(api: Api, names: Sequence[str], as_json: bool) -> int:
    """Resume a destination."""
    return _print_changed([_change(api, name, "resume") for name in names], as_json)


def _change(api: Api, name: str, act: str, body: Mapping[str, object] | None = None) -> dict[str, Any]:
    """Pause or resume a destination; where only a program can define it, say how to name that program."""
    try:
        return api.post(at("destinations", name, act), body)
    except Failed as error:
        if type(error) is not Failed or not api.knows_no_program:
            raise
        if api.get("deliveries", query=f"destination:{json.dumps(name)}", limit=1)["items"]:
            hint = f"Name the program: oncehook {act} {text(name)} --app module:inbox"
            raise Failed(f'"{text(name)}" is defined by a program, not by these settings.', hint=hint) from error
        hint = error.hint or "What a program defines is known with --app module:inbox."
        raise Failed(error.message, hint=hint) from error


@click.command("mark")
@click.argument("label", metavar="TEXT")
@json_option
@asks_api
def mark(api: Api, label: str, as_json: bool) -> int:
    """Mark this moment in every chart: a deploy, a change of settings."""
    made = api.post("marks", {"text": label})
    return answer(made, [join_columns(moment(made["at"]), text(made["text"]))], as_json=as_json)


def _print_changed(changed: Sequence[Mapping[str, Any]], as_json: bool) -> int:
    lines = [join_columns(text(one["name"]), destination_state(one), f"{one['pending']:,} pending") for one in changed]
    return answer({"items": changed}, lines, as_json=as_json)


# -- erase -------------------------------------------------------------------------------------

_ERASED: Final = ("events", "deliveries", "attempts", "arrivals", "batches", "shared_batches")


@click.command("erase")
@click.option("--subject", metavar="SUBJECT", help="Whose events, exactly as events show it.")
@click.option("--account", metavar="ID", help="Only this account's; without --subject, all of its events.")
@click.option(
    "--source", metavar="NAME", shell_complete=complete_source,
    help="Only this source's: two may use the same text for different things.",
)  # fmt: skip
@click.option("--reason", default="", help="Why; kept in the audit log, so do not name the subject in it.")
@click.option("--dry-run", is_flag=True, help="Show how much there is, and do nothing.")
@yes_option
@json_option
@asks_api
def erase(
    api: Api,
    subject: str | None,
    account: str | None,
    source: str | None,
    reason: str,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> int:
    """Erase bodies, headers, keys and subject of all events of SUBJECT or account ID, and what was answered to them.

    Open deliveries are discarded first. That the events were there stays, and so do the hashes of their keys: a late
    copy is still a duplicate. Nothing brings the rest back. If interrupted, run it again to finish.
    """
    if not dry_run and not reason.strip():
        raise click.UsageError("Why? Say --reason; it is kept in the audit log.")
    if not (subject or account):
        raise click.UsageError("Whose events? Say --subject, or --account for all of an account's.")
    named = {"subject": subject, "account": account, "source": source}
    request = {word: value for word, value in named.items() if value}
    found = api.post("erase", {**request, "dry_run": True})
    if dry_run:
        return answer(found, _erasure_lines(found), as_json=as_json)
    if found["events"]:
        say(_erasure_lines(found), err=True)
        api.confirm("erase it for good?", yes=yes)
    erased = _erase_all(api, {**request, "reason": reason}, found["events"])
    answer(erased, [f"erased {count(erased['events'], 'event')}"], as_json=as_json)
    if not as_json:
        noted = f"subject {erased['subject_hash']}" if subject else f"account {account}"
        say([f"  audit: erase {noted}"], err=True)
    return 0


def _erase_all(api: Api, request: Mapping[str, object], total: int) -> dict[str, Any]:
    """Repeat the request until nothing is left: one request erases a limited number."""
    sums: Counter[str] = Counter()
    with Progress("erasing", total) as bar:
        while True:
            erased = api.post("erase", request)
            sums.update({name: erased[name] for name in _ERASED})
            bar.reach(sums["events"])
            if not erased["remaining"]:
                return {**erased, **{name: sums[name] for name in _ERASED}}


def _erasure_lines(found: Mapping[str, Any]) -> list[str]:
    shared = found["shared_batches"]
    of_others = f", {shared:,} of them with events of others, which stay" if shared else ""
    facts = {
        "discarded first": count(found["deliveries"], "open or dead delivery"),
        "answers and errors": f"of {count(found['attempts'], 'attempt')}",
        "later arrivals": f"{found['arrivals']:,}",
        "raw batches": f"{found['batches']:,}{of_others}",
    }
    return [count(found["events"], "event"), *fields(facts, "  ")]


# -- import ------------------------------------------------------------------------------------

MOST_KEYS: Final = 1000
MOST_BYTES: Final = 48 * 1024
"""Bytes of one batch: the API takes 64 KB."""

LONGEST: Final = 4096

Row = tuple[int, Sequence[str]]
"""The number of a line, and the parts of its key; no parts where one is empty."""


@click.group("import", cls=CommandGroup)
def import_() -> None:
    """Import keys that were processed elsewhere, definitions, or archived events."""


import_.add_command(import_archive)


@import_.command("keys")
@click.argument("file", type=click.File("rb"))
@click.option("--source", required=True, metavar="NAME", shell_complete=complete_source, help="Whose keys they are.")
@click.option(
    "--column", "columns", multiple=True, metavar="NAME",
    help="The column of the key (CSV, JSON lines); repeated for a composite key, in its order.",
)  # fmt: skip
@click.option(
    "--format",
    "kind",
    type=click.Choice(["csv", "jsonl", "lines"]),
    help="Instead of what the file's name and start say.",
)
@click.option("--dry-run", is_flag=True, help="Read it all, show the first keys, and change nothing.")
@json_option
@asks_api
def import_keys(
    api: Api, file: IO[bytes], source: str, columns: tuple[str, ...], kind: str | None, dry_run: bool, as_json: bool
) -> int:
    """Make every id in FILE (- for stdin) a key that SOURCE has seen: what arrives with one is a duplicate.

    A key that is known is left alone: the same file may be imported again.
    """
    counts = {"read": 0, "new": 0, "known": 0, "skipped": 0}
    sample: list[str] = []
    size = file.seek(0, io.SEEK_END) - file.seek(0) if file.seekable() else None
    with Progress("importing", size, "bytes") as bar:
        rows = _read_rows(_decode_lines(file, bar), kind or _format_of(file), columns)
        for batch in _batches(rows, counts):
            sample += [" | ".join(parts) for parts in batch[: 5 - len(sample)]]
            if not dry_run:
                imported = api.post(at("sources", source, "keys"), {"keys": batch})
                counts["new"] += imported["new"]
                counts["known"] += imported["known"]
    if dry_run:
        say(["nothing was imported; the first keys:", *(f"  {one}" for one in sample)], err=True)
    others = show_counts(counts, ("new", "known", "skipped"))
    summary = f"{count(counts['read'], 'key')} read" + (f", {others}" if others else "")
    return answer({"source": source, **counts}, [summary], as_json=as_json)


def _batches(rows: Iterator[Row], counts: dict[str, int]) -> Iterator[list[Sequence[str]]]:
    """Yield keys, as many together as one request may hold. Rows without a key are counted and left out."""
    batch: list[Sequence[str]] = []
    size = 0
    for number, parts in rows:
        if not parts:
            counts["skipped"] += 1
            continue
        if any(len(part) > LONGEST for part in parts):
            raise Misused(f"Line {number} holds a key of more than {LONGEST:,} characters.")
        counts["read"] += 1
        weight = len(json.dumps(parts)) + 2
        if batch and (len(batch) == MOST_KEYS or size + weight > MOST_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(parts)
        size += weight
    if batch:
        yield batch


def _decode_lines(file: IO[bytes], bar: Progress) -> Iterator[str]:
    for number, line in enumerate(file, 1):
        bar.add(len(line))
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError:
            raise Misused(f"Line {number} is not UTF-8 text.") from None


def _format_of(file: IO[bytes]) -> str | None:
    name = str(getattr(file, "name", ""))
    endings = {".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".txt": "lines"}
    return next((kind for ending, kind in endings.items() if name.endswith(ending)), None)


def _read_rows(lines: Iterator[str], kind: str | None, columns: Sequence[str]) -> Iterator[Row]:
    first = next(lines, "")
    if kind is None:
        kind = "jsonl" if first.lstrip().startswith("{") else "csv" if columns else "lines"
    if kind != "lines" and not columns:
        raise Misused(
            "Which column holds the key?", hint="Name it with --column; for a composite key, each in its order."
        )
    if kind == "lines" and columns:
        raise Misused("A file of lines has no columns.", hint="Leave --column out, or say --format csv.")
    lines = chain([first] if first else [], lines)
    if kind == "lines":
        return ((number, _parts([line.strip()])) for number, line in enumerate(lines, 1))
    return _read_csv(lines, columns) if kind == "csv" else _read_json_lines(lines, columns)


def _read_csv(lines: Iterator[str], columns: Sequence[str]) -> Iterator[Row]:
    reader = csv.reader(lines)
    try:
        head = next(reader, [])
        for column in columns:
            if column not in head:
                raise Misused(f'There is no column "{column}".', hint=f"There are: {', '.join(head)}.")
        places = [head.index(column) for column in columns]
        for row in reader:
            yield reader.line_num, _parts([row[place] if place < len(row) else "" for place in places])
    except csv.Error as error:
        raise Misused(f"Line {reader.line_num} is no CSV: {error}.") from None


def _read_json_lines(lines: Iterator[str], columns: Sequence[str]) -> Iterator[Row]:
    from oncehook.payload import text_of

    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError):
            raise Misused(f"Line {number} is no JSON.") from None
        yield number, _parts([text_of(_field(fields, column)) or "" for column in columns])


def _field(fields: Any, column: str) -> object:
    """Return a field, or one below it: `data.id`."""
    for name in [column] if isinstance(fields, dict) and column in fields else column.split("."):
        fields = fields.get(name) if isinstance(fields, dict) else None
    return fields


def _parts(values: Sequence[str]) -> Sequence[str]:
    return values if all(values) else ()


# -- export ------------------------------------------------------------------------------------


@click.command("export", cls=QueryCommand)
@click.argument("query", nargs=-1, metavar="[QUERY]", shell_complete=complete_query)
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
@click.option(
    "--definitions", is_flag=True, help="Instead: stored sources, destinations, routes and accounts, as TOML."
)
@asks_api
def export(api: Api, query: tuple[str, ...], output: Path | None, encoding: str, definitions: bool) -> int:
    """Write events as JSON lines, newest first: all, or those that match QUERY.

    With --definitions: what is stored beside the settings file, as TOML that `import definitions` reads. No secret is
    written.
    """
    if definitions:
        return _export_definitions(api, query, output)
    with Progress("exporting", unit="events") as bar, _open_output(output) as file:
        for listed in api.pages("events", query=api.full_query(query)):
            event = api.get(at("events", listed["id"]))
            if encoding != "none":
                event |= _encode_body(api.raw(at("events", listed["id"], "body")), encoding)
            # In ASCII: half of a surrogate pair in untrusted text must not stop the export.
            click.echo(json.dumps(event), file=file)
            bar.add(1)
    say([f"exported {count(bar.done, 'event')}"], err=True)
    return 0


def _export_definitions(api: Api, query: tuple[str, ...], output: Path | None) -> int:
    from oncehook.cli.define import write_definitions

    if query:
        raise Misused("Definitions are exported as a whole.", hint="Leave out the query.")
    with _open_output(output) as file:
        for line in write_definitions(api):
            click.echo(line, file=file)
    return 0


@contextlib.contextmanager
def _open_output(output: Path | None) -> Iterator[IO[str] | None]:
    """Open the output; None means stdout. A new file is readable by its owner only, because it holds bodies."""
    if output is None or str(output) == "-":
        yield None
        return
    is_device = output.exists() and not output.is_file()  # /dev/stdout or a pipe is no file that we create
    descriptor = os.open(output, os.O_WRONLY) if is_device else open_private(output, os.O_WRONLY | os.O_CREAT)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        if not is_device:
            file.truncate()
        yield file


def _encode_body(body: bytes, encoding: str) -> dict[str, Any]:
    if encoding == "json":
        with contextlib.suppress(ValueError, RecursionError):
            return {"body": json.loads(body, parse_constant=_refuse_constant), "body_encoding": "json"}
    return {"body": base64.b64encode(body).decode(), "body_encoding": "base64"}


def _refuse_constant(constant: str) -> None:
    raise ValueError(constant)  # NaN and Infinity are no JSON, although Python reads them
