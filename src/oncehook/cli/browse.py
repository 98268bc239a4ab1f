"""`oncehook events`: a list of events, by the same query as everywhere."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import click
import msgspec

from oncehook.cli.api import Api, Failed, Misused, Unreachable, at, json_option, speaks
from oncehook.cli.operate import confirm, replay_lines, why
from oncehook.cli.output import count, document, fields, line, moment, next_moment, readable, say, state, table, text
from oncehook.human import words
from oncehook.query import show_moment

SOURCE_COLUMNS = (
    *("name", "preset", "address", "verifier", "covers", "secrets", "to"),
    *("last arrival", "24 h", "duplicates", "rejected"),
)


@click.command("sources")
@json_option
@speaks
def sources(api: Api, as_json: bool) -> int:
    """Show every source: its address, its verifier and what that covers, and what came in the last 24 hours."""
    answer = api.get("sources")
    if as_json:
        say([document(answer)])
    elif answer["items"]:
        say(table(SOURCE_COLUMNS, map(source_row, answer["items"])))
    else:
        say(["no sources: add a [source.NAME]"], err=True)
    return 0


def source_row(found: Mapping[str, Any]) -> list[str]:
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


DESTINATION_COLUMNS = ("name", "kind", "address", "state", "pending", "leased", "dead", "oldest due", "retry")


@click.command("destinations")
@json_option
@speaks
def destinations(api: Api, as_json: bool) -> int:
    """Show every destination: whom it reaches, how it stands, when it is tried again."""
    answer = api.get("destinations")
    if as_json:
        say([document(answer)])
    elif answer["items"]:
        say(table(DESTINATION_COLUMNS, map(destination_row, answer["items"])))
    else:
        say(["no destinations: add a [destination.NAME] and a [[route]] to it"], err=True)
    return 0


def destination_row(found: Mapping[str, Any]) -> list[str]:
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


_FLOWS: Final = ("total", "duplicates", "conflicts", "rejected", "retries", "replays")


@click.command("stats")
@click.option("--since", default="24h", show_default=True, metavar="TIME", help="A duration ago, or an ISO time.")
@click.option("--by", type=click.Choice(["source", "destination"]), help="The same for each of them.")
@json_option
@speaks
def stats(api: Api, since: str, by: str | None, as_json: bool) -> int:
    """Show what came, what became of it, and every watermark."""
    answer = api.get("stats", since=since, by=by)
    say([document(answer)] if as_json else stats_lines(answer, by))
    return 0


def stats_lines(stats: Mapping[str, Any], by: str | None) -> list[str]:
    deliveries = ", ".join(f"{number:,} {word}" for word, number in stats["by_status"].items() if number)
    lines = fields(
        {
            "since": moment(stats["since"]),
            **{word: f"{stats[word]:,}" for word in _FLOWS},
            "deliveries": deliveries or "none",
            "dead now": click.style(f"{stats['dead']:,}", fg="red" if stats["dead"] else None),
            "today": f"{stats['volume_today']:,}",
        }
    )
    lines += [_watermark(mark) for mark in stats["watermarks"]]
    if by and stats["by"]:
        lines += ["", *_groups(by, stats["by"])]
    if by == "destination" and any(stats["per_day"].values()):
        lines += ["", *_days(stats["per_day"])]
    return lines


def _watermark(mark: Mapping[str, Any]) -> str:
    level = "unknown" if mark["level"] is None else _level(mark["name"], mark["level"])
    word = click.style("crossed", fg="red") if mark["crossed"] else click.style("fine", fg="green")
    return f"watermark {text(mark['name'])}: {level}, limit {_level(mark['name'], mark['limit'])}, {word}"


def _level(name: str, level: float) -> str:
    if name.startswith("oldest_due"):
        return words(round(level))
    return f"{level:.1%}" if name.startswith("disk") else f"{level:,g}"


def _days(per_day: Mapping[str, Mapping[str, int]]) -> list[str]:
    """What was delivered, by day and destination."""
    days = sorted({day for counts in per_day.values() for day in counts})
    rows = [[day, *(f"{counts.get(day, 0):,}" for counts in per_day.values())] for day in days]
    return table(("day", *map(text, per_day)), rows)


def _groups(by: str, groups: Mapping[str, Mapping[str, int]]) -> list[str]:
    names = list(dict.fromkeys(word for counts in groups.values() for word in counts))
    rows = [[text(name), *(f"{counts.get(word, 0):,}" for word in names)] for name, counts in groups.items()]
    return table((by, *(word.replace("_", " ") for word in names)), rows)


@click.group("dead", invoke_without_command=True)
@click.option("--destination", metavar="NAME", help="Only this one's.")
@json_option
@speaks
def dead(api: Api, destination: str | None, as_json: bool) -> int:
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
    say(table(("count", "destination", "cause", "first", "last", "sample"), map(dead_row, answer["items"])))
    return 0


def dead_row(cause: Mapping[str, Any]) -> list[str]:
    first, last = moment(cause["first_at"]), moment(cause["last_at"])
    return [f"{cause['count']:,}", text(cause["destination"]), text(cause["cause"], 80), first, last, cause["sample"]]


@dead.command("discard")
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


_SHOWN: Final = ("evt", "dlv", "rpl", "arr", "att")
_NEAR: Final = timedelta(seconds=5)
"""How far the clocks of receiver and store may be apart."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What to show of an event."""

    body: bool
    headers: bool
    diff: bool
    arrival: str | None
    """Which arrival's body and headers; None: the first one's."""


@click.command("show")
@click.argument("id")
@click.option("--body", "with_body", is_flag=True, help="The body too, made readable.")
@click.option("--headers", "with_headers", is_flag=True, help="The headers too; credentials are masked.")
@click.option("--raw", is_flag=True, help="The body and nothing else, byte for byte.")
@click.option("--diff", is_flag=True, help="How later arrivals of the event differ from the first, bodies included.")
@click.option("--arrival", metavar="ID", help="With an event: body and headers as they came in this arrival (arr_…).")
@json_option
@speaks
def show(
    api: Api,
    id: str,
    with_body: bool,
    with_headers: bool,
    raw: bool,
    diff: bool,
    arrival: str | None,
    as_json: bool,
) -> int:
    """Show an event (evt_…) with its arrivals, a delivery (dlv_…) with its attempts, or a replay (rpl_…).

    An attempt (att_…) is shown with its delivery. An event's first arrival (arr_…) is shown as the event; a later one,
    duplicate or conflict, is found by its event: show evt_… --arrival arr_…
    """
    kind = id.partition("_")[0]
    if kind not in _SHOWN:
        raise Misused(f"{text(id)} is no id.", hint="Ids begin with evt_, dlv_, rpl_, arr_ or att_.")
    if kind == "rpl":
        _only_events(with_body, with_headers, raw, diff, arrival)
        replay = api.get(at("replays", id))
        say([document(replay)] if as_json else replay_lines(replay))
        return 0
    delivery = _delivery_of(api, kind, id)
    event_id = _event_of(api, kind, id) if delivery is None else delivery["event_id"]
    if raw:
        click.echo(api.raw(_body_at(event_id, arrival)), nl=False)
    elif delivery is None:
        _event(api, event_id, _Wanted(with_body, with_headers, diff, arrival), as_json)
    else:
        _only_events(with_body, with_headers, diff, arrival)
        _delivery(api, delivery, as_json)
    return 0


def _only_events(*said: bool | str | None) -> None:
    if any(said):
        raise click.UsageError("--body, --headers, --diff and --arrival are about events (evt_…).")


def _body_at(event_id: str, arrival: str | None) -> str:
    return at("events", event_id, *(("arrivals", arrival) if arrival else ()), "body")


def _delivery_of(api: Api, kind: str, id: str) -> dict[str, Any] | None:
    """The delivery that is meant; None where an event is."""
    if kind == "dlv":
        return api.get(at("deliveries", id))
    return _of_attempt(api, id) if kind == "att" else None


def _event_of(api: Api, kind: str, id: str) -> str:
    """The event that is meant: what it came with first has its number. Stores have no index of later arrivals."""
    if kind == "evt":
        return id
    event_id, came = f"evt_{id.partition('_')[2]}", show_moment(_came(id).replace(microsecond=0))
    try:
        api.get(at("events", event_id))
    except (Misused, Unreachable):
        raise
    except Failed as error:
        raise Failed(
            f"No event began with {text(id)}, or it is gone.",
            hint=f"It came at {came}. A later arrival is found by its event: oncehook show evt_… --arrival {text(id)}",
        ) from error
    return event_id


def _of_attempt(api: Api, attempt_id: str) -> dict[str, Any]:
    """The delivery of an attempt: its id begins as the attempt's does, which is with the moment the event came."""
    digits = attempt_id.partition("_")[2].replace("-", "")
    came = _came(attempt_id)
    query = f"since:{show_moment(came - _NEAR)} until:{show_moment(came + _NEAR)}"
    for delivery in api.pages("deliveries", query=query):
        if delivery["id"][4:20] == digits[:16]:
            tries = api.get(at("deliveries", delivery["id"], "attempts"))["items"]
            if any(one["id"] == attempt_id for one in tries):
                return delivery
    raise Failed("There is no such attempt, or no longer.", hint="It is shown with its delivery (dlv_…).")


def _came(id: str) -> datetime:
    """The moment that an id begins with. Raises Misused."""
    digits = id.partition("_")[2].replace("-", "")
    try:
        came = datetime.fromtimestamp(int(digits[:12], 16) / 1000, UTC)
    except (ValueError, OverflowError):
        raise Misused(f"{text(id)} is no id.") from None
    return min(came, datetime.max.replace(tzinfo=UTC) - _NEAR)  # so that there is something after it


# -- an event ----------------------------------------------------------------------------------


def _event(api: Api, event_id: str, wanted: _Wanted, as_json: bool) -> None:
    event = api.get(at("events", event_id))
    arrivals = api.get(at("events", event_id, "arrivals"))["items"]
    came = _chosen(arrivals, wanted.arrival)
    body = api.raw(_body_at(event_id, wanted.arrival)) if wanted.body else None
    bodies = _other_bodies(api, event_id, arrivals) if wanted.diff else {}
    if as_json:
        told = [{**one, **_as_text(bodies.get(one["id"]))} for one in arrivals]
        say([document({**event, "arrivals": told, **_as_text(body)})])
        return
    lines = event_lines(event)
    lines += ["", "arrivals", *(f"  {arrival_line(one)}" for one in arrivals)]
    if wanted.headers:
        lines += ["", "headers", *_headers(came)]
    if wanted.diff:
        first = api.raw(_body_at(event_id, None)) if bodies else b""
        lines += ["", "differences", *_differences(arrivals, first, bodies)]
    if body is not None:
        lines += ["", "body", *(f"  {one}" for one in readable(body))]
    say(lines)


def _chosen(arrivals: Sequence[Mapping[str, Any]], arrival: str | None) -> Mapping[str, Any]:
    found = [one for one in arrivals if arrival in (None, one["id"])]
    if not found:
        raise Failed(
            f"This event has no arrival {text(arrival)}, or no longer.", hint="Without --arrival it lists them."
        )
    return found[0]


def _other_bodies(api: Api, event_id: str, arrivals: Sequence[Mapping[str, Any]]) -> dict[str, bytes]:
    """The bodies that are not the event's own, by the arrival that brought them."""
    differing = [one["id"] for one in arrivals if one["body_differs"]]
    return {arrival: api.raw(_body_at(event_id, arrival)) for arrival in differing}


def _as_text(body: bytes | None) -> dict[str, str]:
    return {} if body is None else {"body": body.decode("utf-8", "replace")}


def event_lines(event: Mapping[str, Any]) -> list[str]:
    """One event with how its deliveries stand, for people."""
    facts = {
        "source": text(event["source"]),
        "type": text(event["type"], 200),
        "key": text(event["key"], 1000),
        "subject": text(event["subject"], 1000),
        "received": moment(event["received_at"]),
        "happened": moment(event["event_at"]),
        "marks": ", ".join(event["marks"]),
        "same body as": event["same_body_as"],
        "size": f"{event['size']:,} bytes",
        "request": text(f"{event['method']} {event['target']}", 500),
    }
    lines = [event["id"], *fields(facts, "  ")]
    if event["deliveries"]:
        lines += ["", "deliveries", *(f"  {_in_a_line(one)}" for one in event["deliveries"])]
    return lines


def _in_a_line(delivery: Mapping[str, Any]) -> str:
    tried = f"run {delivery['run']}, attempt {delivery['attempts']}" if delivery["attempts"] else "not tried yet"
    due = f"next {next_moment(delivery['due_at'])}" if delivery["status"] == "pending" and delivery["due_at"] else ""
    failed = text(why(delivery), 100) if delivery["status"] != "done" else ""
    stands = f"{text(delivery['destination'])}: {state(delivery['status'], delivery['note'])}"
    stands += f", replayed by {delivery['replay_id']}" if delivery["replayed"] else ""
    return "  ".join(part for part in (delivery["id"], stands, tried, due, failed) if part)


def arrival_line(arrival: Mapping[str, Any]) -> str:
    differs = "  another body" if arrival["body_differs"] else ""
    return f"{moment(arrival['at'])}  {state(arrival['outcome'])}{differs}  {arrival['id']}"


def _headers(came: Mapping[str, Any]) -> list[str]:
    return [f"  {text(name, 200)}: {text(value, 2000)}" for name, value in came["headers"]]


def _differences(arrivals: Sequence[Mapping[str, Any]], body: bytes, others: Mapping[str, bytes]) -> list[str]:
    """Every later arrival beside the first, as people compare texts."""
    first, *later = arrivals
    lines: list[str] = []
    for one in later:
        changed = _changed(_headers(first), _headers(one), 0) or ["  the same headers"]
        if one["id"] in others:
            another = _changed(readable(body, sort=True), readable(others[one["id"]], sort=True), 3)
            changed += another or ["  the same body, written in another way"]
        lines += [f"  {arrival_line(one)}", *(f"  {line}" for line in changed)]
    return lines or ["  it came once"]


def _changed(before: Sequence[str], after: Sequence[str], around: int) -> list[str]:
    """How two texts differ, with so many lines around each change; without those, the places go unsaid as well."""
    lines = list(difflib.unified_diff(before, after, lineterm="", n=around))[2:]
    return [_painted(line) for line in lines if around or not line.startswith("@@")]


def _painted(line: str) -> str:
    return click.style(line, fg={"+": "green", "-": "red", "@": "cyan"}.get(line[:1]))


# -- a delivery --------------------------------------------------------------------------------


def _delivery(api: Api, delivery: Mapping[str, Any], as_json: bool) -> None:
    attempts = api.get(at("deliveries", delivery["id"], "attempts"))["items"]
    if as_json:
        say([document({**delivery, "timeline": attempts})])
        return
    lines = [f"{delivery['id']}  {state(delivery['status'], delivery['note'])}"]
    lines += fields(_facts(delivery), "  ")
    if attempts:
        lines += ["", "attempts", *(line for one in attempts for line in attempt_lines(one))]
    say(lines)


def _facts(delivery: Mapping[str, Any]) -> dict[str, str]:
    return {
        "event": delivery["event_id"],
        "from": text(delivery["source"]),
        "to": text(delivery["destination"]),
        "type": text(delivery["type"], 200),
        "key": text(delivery["key"], 1000),
        "subject": text(delivery["subject"], 1000),
        "received": moment(delivery["received_at"]),
        "settled": moment(delivery["settled_at"]),
        "due": next_moment(delivery["due_at"]),
        "behind": delivery["blocked_by"] or "",
        "failed": text(why(delivery), 500) if delivery["status"] != "done" else "",
        "category": delivery["category"] or "",
        "reason": text(delivery["reason"], 500),
        "run": str(delivery["run"]),
        "replayed": moment(delivery["last_replay_at"]),
        "replay": delivery["replay_id"] or "",
    }


def attempt_lines(attempt: Mapping[str, Any]) -> list[str]:
    number = f"run {attempt['run']} attempt {attempt['attempt']}"
    outcome = state(attempt["outcome"]) + (f" {attempt['category']}" if attempt["category"] else "")
    code = f"HTTP {attempt['status']}" if attempt["status"] else ""
    took = words(round(attempt["duration"], 3))
    head = [moment(attempt["started_at"]), number, outcome, code, took, attempt["id"]]
    lines = ["  " + "  ".join(part for part in head if part)]
    if attempt["error"]:
        lines += [f"    {text(one, 500)}" for one in attempt["error"].splitlines()]
    if attempt["answer"]:
        lines += [f"    | {text(one, 500)}" for one in attempt["answer"].splitlines()]
    if attempt["result"] is not None:
        lines.append(f"    returned {text(msgspec.json.encode(attempt['result']).decode(), 2000)}")
    return lines


@click.command("events")
@click.argument("query", nargs=-1, metavar="[QUERY]")
@click.option("--limit", type=click.IntRange(1), default=50, show_default=True, help="At most so many, the newest.")
@click.option("--all", "everything", is_flag=True, help="All that match.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
@speaks
def events(api: Api, query: tuple[str, ...], limit: int, everything: bool, as_json: bool) -> int:
    """List events, newest first: all, or those that match QUERY.

    For example: oncehook events source:stripe status:dead since:2h
    """
    found = api.pages("events", most=None if everything else limit, query=" ".join(query))
    if as_json:
        # As they come: who reads them may stop early, or be slow.
        say(line(one) for one in found)
        return 0
    rows = [event_row(one) for one in found]
    if rows:
        say(table(("received", "id", "source", "type", "subject", "key", "came", "deliveries"), rows))
    else:
        say(["no events match" if query else "no events yet: oncehook send --list shows what can be sent"], err=True)
    return 0


def event_row(event: Mapping[str, Any]) -> list[str]:
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
