"""`oncehook replay`: plan, show the plan, ask, run; and pause, resume or abort what runs.

Ids or a query come in; the server makes the plan and fixes its times. What is printed on stdout is the plan of a dry
run, or the replay that was made; everything said on the way there is talk.
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any, Final

import click

from oncehook import clock
from oncehook.claims import Claim, Claims
from oncehook.claims.faces import ENVIRONMENT, KEEP, NAMESPACE, TTL, named_store
from oncehook.cli.api import Api, Failed, Misused, Unreachable, at, json_option, speaks
from oncehook.cli.output import Progress, count, document, fields, moment, say, state, table, text
from oncehook.human import words
from oncehook.private import open_private

_COUNTS: Final = ("events", "deliveries", "attempts", "arrivals", "batches", "shared_batches")


@click.command("erase")
@click.option("--subject", required=True, metavar="SUBJECT", help="Whose events, exactly as events show it.")
@click.option("--source", metavar="NAME", help="Only this source's: two may use the same text for different things.")
@click.option("--reason", default="", help="Why; kept in the audit log, so do not name the subject in it.")
@click.option("--dry-run", is_flag=True, help="Show how much there is, and do nothing.")
@click.option("--yes", is_flag=True, help="Do not ask. Needed where there is no terminal.")
@json_option
@speaks
def erase(api: Api, subject: str, source: str | None, reason: str, dry_run: bool, yes: bool, as_json: bool) -> int:
    """Erase bodies, headers, keys and subject of all events of SUBJECT, and what was answered to them.

    Open deliveries are discarded first. That the events were there stays, and so do the hashes of their keys: a late
    copy is still a duplicate. Nothing brings the rest back. A run that was cut off goes on when it is run again.
    """
    if not dry_run and not reason.strip():
        raise click.UsageError("Why? Say --reason; it is kept in the audit log.")
    asked = {"subject": subject, **({"source": source} if source else {})}
    found = api.post("erase", {**asked, "dry_run": True})
    if dry_run:
        say([document(found)] if as_json else erasure_lines(found))
        return 0
    if found["events"]:
        say(erasure_lines(found), err=True)
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


def erasure_lines(found: Mapping[str, Any]) -> list[str]:
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
def export(api: Api, query: tuple[str, ...], output: Path | None, encoding: str) -> int:
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


MOST_KEYS: Final = 1000
MOST_BYTES: Final = 48 * 1024
"""Of one batch: the API takes 64 KB."""

LONGEST: Final = 4096
FORMATS: Final = ("csv", "jsonl", "lines")

Row = tuple[int, Sequence[str]]
"""The number of a line, and the parts of its key; none where one is empty."""


@click.group("import")
def import_() -> None:
    """Take over what was processed elsewhere."""


@import_.command("keys")
@click.argument("file", type=click.File("rb"))
@click.option("--source", required=True, metavar="NAME", help="Whose keys they are.")
@click.option(
    "--column", "columns", multiple=True, metavar="NAME",
    help="Where the key stands (CSV, JSON lines); repeated for a composite key, in its order.",
)  # fmt: skip
@click.option("--format", "kind", type=click.Choice(FORMATS), help="Instead of what the file's name and start say.")
@click.option("--dry-run", is_flag=True, help="Read it all, show the first keys, and change nothing.")
@json_option
@speaks
def import_keys(
    api: Api, file: IO[bytes], source: str, columns: tuple[str, ...], kind: str | None, dry_run: bool, as_json: bool
) -> int:
    """Make every id in FILE (- for stdin) a key that SOURCE has seen: what arrives with one is a duplicate.

    For example: oncehook import keys processed.csv --source stripe --column event_id
    """
    counts = {"read": 0, "new": 0, "known": 0, "skipped": 0}
    sample: list[str] = []
    with Progress("importing", _size(file), "bytes") as bar:
        rows = _read(_counted(file, bar), kind or _format_of(file), columns)
        for batch in _batches(rows, counts):
            sample += [" | ".join(parts) for parts in batch[: 5 - len(sample)]]
            if not dry_run:
                answer = api.post(at("sources", source, "keys"), {"keys": batch})
                counts["new"] += answer["new"]
                counts["known"] += answer["known"]
    if dry_run:
        say(["nothing was imported; the first keys:", *(f"  {one}" for one in sample)], err=True)
    say([document({"source": source, **counts})] if as_json else [import_summary(counts)])
    return 0


def import_summary(counts: dict[str, int]) -> str:
    said = [f"{counts[word]:,} {word}" for word in ("new", "known", "skipped") if counts[word]]
    return f"{count(counts['read'], 'key')} read" + "".join(f", {one}" for one in said)


# -- batches -----------------------------------------------------------------------------------


def _batches(rows: Iterator[Row], counts: dict[str, int]) -> Iterator[list[Sequence[str]]]:
    """Keys, as many together as one request may hold. A row without a key is counted, and left out."""
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


# -- reading -----------------------------------------------------------------------------------


def _size(file: IO[bytes]) -> int | None:
    """Bytes of the file, for the bar; of a pipe nobody knows."""
    return None if not file.seekable() else file.seek(0, io.SEEK_END) - file.seek(0)


def _counted(file: IO[bytes], bar: Progress) -> Iterator[str]:
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


def _read(lines: Iterator[str], kind: str | None, columns: Sequence[str]) -> Iterator[Row]:
    first = next(lines, "")
    if kind is None:
        kind = "jsonl" if first.lstrip().startswith("{") else "csv" if columns else "lines"
    if kind != "lines" and not columns:
        raise Misused(
            "Which column holds the key?", hint="Name it with --column; for a composite key, each in its order."
        )
    if kind == "lines" and columns:
        raise Misused("A file of lines has no columns.", hint="Leave --column out, or say --format csv.")
    reading: dict[str, Callable[[Iterator[str], Sequence[str]], Iterator[Row]]] = {
        "csv": _csv, "jsonl": _json_lines, "lines": read_lines,
    }  # fmt: skip
    return reading[kind](chain([first] if first else [], lines), columns)


def read_lines(lines: Iterator[str], columns: Sequence[str]) -> Iterator[Row]:
    for number, line in enumerate(lines, 1):
        yield number, _parts([line.strip()])


def _csv(lines: Iterator[str], columns: Sequence[str]) -> Iterator[Row]:
    table = csv.reader(lines)
    try:
        head = next(table, [])
        places = [_place(head, column) for column in columns]
        for row in table:
            yield table.line_num, _parts([row[place] if place < len(row) else "" for place in places])
    except csv.Error as error:
        raise Misused(f"Line {table.line_num} is no CSV: {error}.") from None


def _place(head: Sequence[str], column: str) -> int:
    if column not in head:
        raise Misused(f'There is no column "{column}".', hint=f"There are: {', '.join(head)}.")
    return head.index(column)


def _json_lines(lines: Iterator[str], columns: Sequence[str]) -> Iterator[Row]:
    from oncehook.payload import text_of

    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError):
            raise Misused(f"Line {number} is no JSON.") from None
        yield number, _parts([text_of(_at(fields, column)) or "" for column in columns])


def _at(fields: Any, column: str) -> object:
    """A field, or one below it: `data.id`."""
    for name in [column] if isinstance(fields, dict) and column in fields else column.split("."):
        fields = fields.get(name) if isinstance(fields, dict) else None
    return fields


def _parts(values: Sequence[str]) -> Sequence[str]:
    return values if all(values) else ()


_KEYS = (
    click.argument("key"),
    click.option("--store", envvar=ENVIRONMENT, metavar="URL", help=f"Where claims are kept ({ENVIRONMENT})."),
    click.option("--namespace", default=NAMESPACE, show_default=True, help="Whose keys."),
    json_option,
)


def _about_a_key(command: Callable[..., int]) -> Callable[..., int]:
    for option in reversed(_KEYS):
        command = option(command)
    return command


@click.group("keys")
def keys() -> None:
    """Claim, commit, release and show keys by hand."""


@keys.command("claim")
@_about_a_key
@click.option("--ttl", default=TTL, show_default=True, help="How long it holds.")
@click.option("--payload", help="What it is for; another payload under the same key is refused.")
def claim(key: str, store: str | None, namespace: str, as_json: bool, ttl: str, payload: str | None) -> int:
    """Be first with KEY: exit 0 and a token when it is new, 1 when it is in progress or done."""
    with Claims(named_store(store), namespace=namespace) as claims:
        found = claims.claim(key, ttl, payload)
    print_claim(key, found, as_json)
    return 0 if found.status == "new" else 1


@keys.command("commit")
@_about_a_key
@click.option("--token", required=True, help="What `claim` gave.")
@click.option("--result", help="Text that later claims get.")
@click.option("--keep", default=KEEP, show_default=True, help="How long it is remembered.")
def commit(
    key: str, store: str | None, namespace: str, as_json: bool, token: str, result: str | None, keep: str
) -> int:
    """KEY is done; exit 1 when the claim is no longer this token's."""
    kept = None if result is None else result.encode()
    with Claims(named_store(store), namespace=namespace) as claims:
        claims.commit(key, token, kept, keep)
    print_claim(key, Claim("done", result=kept), as_json)
    return 0


@keys.command("release")
@_about_a_key
@click.option("--token", help="What `claim` gave: only that claim is released.")
@click.option("--force", is_flag=True, help="Whoever has it, and even if it is done: the work may be done twice.")
def release(key: str, store: str | None, namespace: str, as_json: bool, token: str | None, force: bool) -> int:
    """Let the next one have KEY; exit 1 when there was nothing to release."""
    if (token is None) is not force:
        raise click.UsageError("Give --token, or --force to release somebody else's.")
    with Claims(named_store(store), namespace=namespace) as claims:
        released = True
        if token is not None:
            claims.abort(key, token)
        else:
            released = claims.forget(key)
    print_claim(key, None, as_json)
    return 0 if released else 1


@keys.command("show")
@_about_a_key
def show(key: str, store: str | None, namespace: str, as_json: bool) -> int:
    """Show how KEY stands, without touching it; exit 1 when nobody has it."""
    with Claims(named_store(store), namespace=namespace) as claims:
        found = claims.look(key)
    print_claim(key, found, as_json)
    return 0 if found else 1


def print_claim(key: str, found: Claim | None, as_json: bool) -> None:
    said = claim_fields(key, found)
    if as_json:
        say([document(said)])
        return
    lapses = said["retry_after"]
    shown = {name: text(said[name], 200) for name in ("key", "status", "token", "result")}
    say(fields({**shown, "lapses in": "" if lapses is None else words(round(lapses))}))


def claim_fields(key: str, found: Claim | None) -> dict[str, Any]:
    result = found.result if found else None
    return {
        "key": key,
        "status": found.status if found else "free",
        "token": found.token if found else None,
        "result": None if result is None else result.decode(errors="backslashreplace"),
        "retry_after": found.retry_after if found else None,
    }


POLL: Final = 0.3
"""Seconds between two looks at a replay that is waited for."""

_OVER: Final = ("done", "aborted")


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """What the command line asks for."""

    ids: tuple[str, ...] = ()
    query: str = ""
    to: str | None = None
    until: str | None = None
    rate: str | None = None
    force: bool = False
    fresh_id: bool = False

    def body(self) -> dict[str, object]:
        """The same, as the API wants it."""
        said: dict[str, object] = {
            "query": self._query(),
            "ids": None if self._again else (list(self.ids) or None),
            "destination": self.to,
            "until": self.until,
            "rate": self.rate,
            "force": self.force,
            "fresh_id": self.fresh_id,
        }
        return {name: value for name, value in said.items() if value not in (None, "", False)}

    @property
    def delivery(self) -> str | None:
        """The one delivery that is named, and nothing beside it."""
        alone = len(self.ids) == 1 and self.ids[0].startswith("dlv_") and not (self.query or self.to or self.until)
        return self.ids[0] if alone else None

    @property
    def _again(self) -> bool:
        """A replay is named: those of it that failed are meant."""
        return any(one.startswith("rpl_") for one in self.ids)

    def _query(self) -> str:
        if not self._again:
            return self.query
        return f"{self.query} replay:{self.ids[0]} status:dead".strip()

    def check(self) -> None:
        """Refuse what cannot be meant, before anything is asked."""
        if not self.ids and not self.query.strip():
            raise click.UsageError("What? Name events or deliveries by their ids, or give a --query.")
        if self._again and len(self.ids) > 1:
            raise click.UsageError("One replay at a time can be run again, and nothing beside it.")


@click.command("replay")
@click.argument("ids", nargs=-1, metavar="[ID]...")
@click.option("--query", default="", metavar="QUERY", help="All deliveries that match, e.g. 'status:dead since:2h'.")
@click.option("--to", metavar="DESTINATION", help="Only those for this destination.")
@click.option(
    "--until", metavar="TIME", help="Only what was received before: 2026-11-16T10:00Z, or 2h for so long ago."
)
@click.option("--rate", metavar="RATE", help="At most so many, e.g. 20/s.")
@click.option("--force", is_flag=True, help="Those that are done, too.")
@click.option("--fresh-id", is_flag=True, help="Send a new webhook-id, for receivers that deduplicate.")
@click.option("--reason", default="", help="Why; kept in the audit log.")
@click.option("--dry-run", is_flag=True, help="Show the plan and do nothing.")
@click.option("--yes", is_flag=True, help="Do not ask. Needed where there is no terminal.")
@click.option("--wait", is_flag=True, help="Wait until it is over; exit 1 when some are dead again.")
@click.option("--request-key", metavar="KEY", help="Two calls with the same key make one replay.")
@click.option("--pause", "act", flag_value="pause", help="Hold the replays that are named.")
@click.option("--resume", "act", flag_value="resume", help="Let them go on.")
@click.option("--abort", "act", flag_value="abort", help="End them; what is done stays done.")
@click.option("--list", "act", flag_value="list", help="Show the latest replays.")
@json_option
@speaks
def replay(
    api: Api,
    ids: tuple[str, ...],
    query: str,
    to: str | None,
    until: str | None,
    rate: str | None,
    force: bool,
    fresh_id: bool,
    reason: str,
    dry_run: bool,
    yes: bool,
    wait: bool,
    request_key: str | None,
    act: str | None,
    as_json: bool,
) -> int:
    """Deliver again: events (evt_…), deliveries (dlv_…), what failed of a replay (rpl_…), or all that match a query.

    Shows what would happen, then asks. Live traffic goes first, and order within a subject is kept.
    """
    wish = ReplayRequest(ids, query, to, until, rate, force, fresh_id)
    if act == "list":
        return _list(api, as_json)
    if act is not None:
        return _steer(api, ids, act, as_json)
    wish.check()
    plan = api.post("replays/plan", wish.body())
    if dry_run:
        say([document(plan)] if as_json else plan_lines(plan))
        return 0
    if not plan["total"] and request_key is None:
        return _nothing(plan, named=bool(ids), as_json=as_json)
    say(plan_lines(plan), err=True)
    if wait and api.line.is_alone:
        raise Unreachable("Nobody works here, so there is nothing to wait for.", hint="Start `oncehook serve` first.")
    confirm(api, "replay now?", yes=yes)
    made = _start(api, wish, plan, reason, request_key)
    return _follow(api, made, as_json) if wait else print_replay(api, made, as_json)


def confirm(api: Api, question: str, *, yes: bool) -> None:
    """Ask on a terminal; elsewhere only --yes is a yes. Without one nothing happens, nor where nothing can be done."""
    api.check_may_act()
    if yes:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise click.UsageError("There is no terminal to ask on; say --yes.")
    if not click.confirm(question, err=True):
        raise Failed("nothing was done")


def _start(api: Api, wish: ReplayRequest, plan: Mapping[str, Any], reason: str, request_key: str | None) -> str:
    """Have done what the plan says. A key of our own makes one replay of a request whose answer was lost (R47).

    With a key of the caller's the request must be the same each time, whatever the plan says by then.
    """
    key = request_key or clock.random_bytes(16).hex()
    one = wish.delivery or (plan["sample"][0]["id"] if wish.ids and plan["total"] == 1 and not request_key else None)
    if one is not None:
        # At once, not behind live traffic; and who was replayed a moment ago says so, instead of being left out.
        asked = {"force": wish.force, "fresh_id": wish.fresh_id, "reason": reason}
        made = api.post(at("deliveries", one, "replay"), asked, key=key)
    else:
        meant = {"plan": plan["plan"]} if request_key is None else wish.body()
        made = api.post("replays", {**meant, "reason": reason}, key=key)
    return str(made["replay_id"])


def _nothing(plan: Mapping[str, Any], *, named: bool, as_json: bool) -> int:
    """Nothing matches: that is a failure only for who named something."""
    if named:
        raise Failed("There is nothing to replay.", hint=_left_out(plan))
    if as_json:
        say([document({"replay_id": None, "total": 0})])
    say(["nothing to replay", *fields({"left out": _left_out(plan)}, "  ")], err=True)
    return 0


def print_replay(api: Api, replay_id: str, as_json: bool) -> int:
    say([document({"replay_id": replay_id}) if as_json else replay_id])
    if api.line.is_alone:
        say(["  it waits for a worker: oncehook serve"], err=True)
    return 0


# -- a replay that runs ------------------------------------------------------------------------


def _follow(api: Api, replay_id: str, as_json: bool) -> int:
    say([replay_id], err=True)
    if not api.get("system")["workers"]:
        say(["  no worker has been heard of in the last minute; it waits for one"], err=True)
    replay = _wait(api, replay_id)
    say([document(replay)] if as_json else [_summary(replay)])
    return 1 if replay["dead"] or replay["state"] == "aborted" else 0


def _wait(api: Api, replay_id: str) -> dict[str, Any]:
    """Until it is over; with a bar on a terminal."""
    path = at("replays", replay_id)
    replay = api.get(path)
    with Progress("replaying", replay["planned"]) as bar:
        paused = False
        while True:
            bar.reach(_settled(replay))
            if replay["state"] in _OVER:
                return replay
            if replay["state"] == "paused" and not paused:
                bar.clear()
                say([f"  paused: oncehook replay --resume {replay_id}"], err=True)
            paused = replay["state"] == "paused"
            api.line.rest(POLL)
            replay = api.get(path)


def _settled(replay: Mapping[str, Any]) -> int:
    return int(replay["done"] + replay["dead"] + replay["skipped"])


def _summary(replay: Mapping[str, Any]) -> str:
    said = [f"{replay['id']}  {replay['done']}/{replay['planned']} done"]
    said += [f"{replay[word]} {word}" for word in ("dead", "skipped") if replay[word]]
    return "  ".join([*said, *([state("aborted")] if replay["state"] == "aborted" else [])])


def _steer(api: Api, ids: Sequence[str], act: str, as_json: bool) -> int:
    wrong = [one for one in ids if not one.startswith("rpl_")]
    if wrong or not ids:
        raise click.UsageError(f"Which replay? --{act} wants ids that begin with rpl_.")
    steered = [api.post(at("replays", one, act)) for one in ids]
    say([document({"items": steered})] if as_json else [f"{one['id']}  {state(one['state'])}" for one in steered])
    return 0


def _list(api: Api, as_json: bool) -> int:
    found = list(api.pages("replays", most=50))
    if as_json:
        say([document({"items": found})])
        return 0
    say(table(("id", "state", "created", "planned", "done", "dead", "skipped", "by", "what"), map(_row, found)))
    return 0


def _row(replay: Mapping[str, Any]) -> list[str]:
    counts = [str(replay[word]) for word in ("planned", "done", "dead", "skipped")]
    stands = [replay["id"], state(replay["state"]), moment(replay["created_at"])]
    return [*stands, *counts, text(replay["actor"], 20), text(replay["reason"] or replay["query"])]


def replay_lines(replay: Mapping[str, Any]) -> list[str]:
    """One replay, for `show`."""
    counts = ", ".join(f"{replay[word]} {word}" for word in ("done", "dead", "skipped") if replay[word])
    return [
        f"{replay['id']}  {state(replay['state'])}",
        *fields(
            {
                "deliveries": f"{replay['planned']} planned, {replay['fed']} handed out"
                + (f", {counts}" * bool(counts)),
                "query": text(replay["query"], 500),
                "rate": _rate(replay),
                "by": text(replay["actor"]),
                "reason": text(replay["reason"], 500),
                "created": moment(replay["created_at"]),
                "finished": moment(replay["finished_at"]),
                "command": text(replay["command"], 2000),
            },
            "  ",
        ),
    ]


# -- a plan ------------------------------------------------------------------------------------


def plan_lines(plan: Mapping[str, Any]) -> list[str]:
    """A plan for people: who would get what, from when, what is left out, and the same as a command."""
    span = {"oldest": moment(plan["oldest"]), "newest": moment(plan["newest"])}
    return [
        count(plan["total"], "delivery", "deliveries") + _listed(plan["by_status"]),
        *(f"  → {one}" for one in table_of_recipients(plan["recipients"])),
        *fields({**span, "left out": _left_out(plan), "takes": _takes(plan), "query": text(plan["query"], 2000)}, "  "),
        *_sample(plan),
        *(f"  {text(note, 500)}" for note in plan["notes"]),
        *fields({"again": text(plan["command"], 4000)}, "  "),
    ]


def table_of_recipients(recipients: Iterable[Mapping[str, Any]]) -> list[str]:
    """Who would get it, one line each."""
    rows = [
        [text(one["destination"]), text(one["address"] or one["kind"], 200), f"{one['count']:,}", _warning(one)]
        for one in recipients
    ]
    return table(("", "", "", ""), rows)[1:]


def _warning(recipient: Mapping[str, Any]) -> str:
    if recipient["kind"] == "gone":
        return click.style("no longer configured", fg="red")
    words = {"paused": "paused", "failing": "failing right now", "changed": "another address than before"}
    return click.style(", ".join(said for word, said in words.items() if recipient[word]), fg="yellow")


def _listed(counts: Mapping[str, int]) -> str:
    return "".join(f", {number:,} {word}" for word, number in counts.items() if number)


def _left_out(plan: Mapping[str, Any]) -> str:
    hints = {"done": " (--force takes them too)"}
    return ", ".join(f"{number:,} {word}{hints.get(word, '')}" for word, number in plan["left_out"].items() if number)


def _takes(plan: Mapping[str, Any]) -> str:
    expected = plan["expected_seconds"]
    if expected is None:
        return ""
    return f"about {words(round(expected) or 1)}" + (f" at {_rate(plan)}" if _rate(plan) else "")


def _rate(asked: Mapping[str, Any]) -> str:
    from oncehook.replay import show_rate

    return "" if asked["rate"] is None else show_rate(asked["rate"])


def _sample(plan: Mapping[str, Any]) -> list[str]:
    """The first of them: when each came, whom it is about or goes to, what it says, and why it ended."""
    sample, total = plan["sample"], plan["total"]
    kinds = {one["destination"]: one["kind"] for one in plan["recipients"]}
    rows = []
    for one in sample:
        message = plan["previews"].get(one["id"])
        goes_out = message is not None and kinds.get(one["destination"]) == "sender"
        who = text(message["to"] if message is not None and goes_out else one["subject"])
        says = "" if message is None else f"“{text(message['text'], 60)}”"
        stands = [one["id"], state(one["status"], one["note"]), moment(one["received_at"]), text(one["type"])]
        rows.append([*stands, who, says, text(why(one), 60)])
    lines = [f"  {one}" for one in table(("",) * 7, rows)[1:]]
    return lines if total <= len(sample) else [*lines, f"  … and {total - len(sample):,} more"]


def why(delivery: Mapping[str, Any]) -> str:
    """What is known of its last failure."""
    said = (delivery["last_error"] or "").splitlines()
    if said:
        return str(said[0])
    return f"HTTP {delivery['last_status']}" if delivery["last_status"] else str(delivery["reason"] or "")
