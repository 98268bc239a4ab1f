"""Commands that only read: events, show, sources, destinations, stats, and the list of dead letters.

The lines of events, deliveries and destinations are printed here for `operate` and `tail`, too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import click

from oncehook.cli.api import Api, Failed, Misused, Unreachable, asks_api, at
from oncehook.cli.options import json_lines_option, json_option
from oncehook.cli.output import (
    answer,
    fields,
    join_columns,
    json_line,
    moment,
    next_moment,
    readable,
    say,
    show_counts,
    state,
    table,
    text,
)
from oncehook.human import count, show_duration, show_elapsed, show_moment, show_rate

# -- events ------------------------------------------------------------------------------------


class QueryCommand(click.Command):
    """A command whose help ends with the words of a query."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from oncehook.query import BODY, WORDS

        words = {f"{name}:{word.example}": word.about.replace("`", "") for name, word in WORDS.items()}
        with formatter.section("Words of a query"):
            formatter.write_dl([*words.items(), (f"{BODY}data.amount:>1000", "the value at this place of a JSON body")])


@click.command("events", cls=QueryCommand)
@click.argument("query", nargs=-1, metavar="[QUERY]")
@click.option("--limit", type=click.IntRange(1), default=50, show_default=True, help="At most so many, the newest.")
@click.option("--all", "everything", is_flag=True, help="All that match.")
@json_lines_option
@asks_api
def events(api: Api, query: tuple[str, ...], limit: int, everything: bool, as_json: bool) -> int:
    """List events, newest first: all, or those that match QUERY.

    For example: oncehook events source:stripe status:dead since:2h
    """
    found = api.pages("events", most=None if everything else limit, query=" ".join(query))
    if as_json:
        # Printed page by page: the reader may stop early, or be slow.
        say(json_line(one) for one in found)
        return 0
    rows = [_event_row(one) for one in found]
    if rows:
        say(table(("received", "id", "source", "type", "subject", "key", "came", "deliveries"), rows))
    else:
        say(["no events match" if query else "no events yet: oncehook send --list shows what can be sent"], err=True)
    return 0


def _event_row(event: Mapping[str, Any]) -> list[str]:
    return [
        moment(event["received_at"]),
        event["id"],
        text(event["source"], 20),
        text(event["type"], 32),
        text(event["subject"], 24),
        text(event["key"] or ", ".join(event["marks"]), 28),
        f"×{event['copies']}" if event["copies"] > 1 else "",
        " ".join(map(_chip, event["deliveries"])),
    ]


def _chip(delivery: Mapping[str, Any]) -> str:
    chip = f"{text(delivery['destination'], 20)}:{state(delivery['status'], delivery['note'])}"
    return f"{chip} (replayed)" if delivery["replayed"] else chip


# -- lists -------------------------------------------------------------------------------------


@click.command("sources")
@json_option
@asks_api
def sources(api: Api, as_json: bool) -> int:
    """Show every source: its address, its verifier and what that covers, and what came in the last 24 hours."""
    names = ("name", "preset", "address", "verifier", "covers", "secrets", "to")
    head = (*names, "last arrival", "24 h", "duplicates", "rejected")
    return _list(api.get("sources"), head, _source_row, "no sources: add a [source.NAME]", as_json)


def _list(
    found: Mapping[str, Any],
    head: Sequence[str],
    row: Callable[[Mapping[str, Any]], list[str]],
    if_empty: str,
    as_json: bool,
) -> int:
    if not (found["items"] or as_json):
        say([if_empty], err=True)
        return 0
    return answer(found, table(head, map(row, found["items"])), as_json=as_json)


def _source_row(found: Mapping[str, Any]) -> list[str]:
    from oncehook.reports import describe_coverage  # imports much: --help must not wait for that

    verifier = click.style("none: anyone may send", fg="red") if found["unverified"] else found["verifier"]
    return [
        text(found["name"]),
        found["preset"] or "",
        text(found["address"] or "hidden", 60),
        verifier,
        "" if found["unverified"] else describe_coverage(found["body_authenticated"], found["key_authenticated"]),
        str(found["secrets"]),
        text(", ".join(found["destinations"])),
        moment(found["last_arrival"]),
        *(f"{found['figures'].get(word, 0):,}" for word in ("accepted", "duplicate", "rejected")),
    ]


@click.command("destinations")
@json_option
@asks_api
def destinations(api: Api, as_json: bool) -> int:
    """Show every destination: its address, its state, and when it is tried again."""
    head = ("name", "kind", "address", "state", "pending", "leased", "dead", "oldest due", "retry")
    if_empty = "no destinations: add a [destination.NAME] and a [[route]] to it"
    return _list(api.get("destinations"), head, _destination_row, if_empty, as_json)


def _destination_row(found: Mapping[str, Any]) -> list[str]:
    oldest = found["oldest_due"]
    return [
        text(found["name"]),
        found["kind"],
        text(found["address"], 60),
        destination_state(found),
        *(f"{found[word]:,}" for word in ("pending", "leased", "dead")),
        "" if oldest is None else show_duration(round(oldest)),
        found["retry"],
    ]


def destination_state(found: Mapping[str, Any]) -> str:
    """Print a destination's state, with the reason of a pause or the number of failures."""
    word = found["state"]
    failures = f"{count(found['failures'], 'failure')} in a row"
    notes = {"paused": text(found["paused_why"]), "held_back": failures, "failing": failures}
    return state(word.replace("_", " "), notes.get(word))


def list_dead(api: Api, destination: str | None, as_json: bool) -> int:
    head = ("count", "destination", "cause", "first", "last", "sample")
    return _list(api.get("dead", destination=destination), head, _cause_row, "no dead letters", as_json)


def _cause_row(cause: Mapping[str, Any]) -> list[str]:
    first, last = moment(cause["first_at"]), moment(cause["last_at"])
    return [f"{cause['count']:,}", text(cause["destination"]), text(cause["cause"], 80), first, last, cause["sample"]]


# -- stats -------------------------------------------------------------------------------------


@click.command("stats")
@click.option("--since", default="24h", show_default=True, metavar="TIME", help="A duration ago, or an ISO time.")
@click.option("--by", type=click.Choice(["source", "destination"]), help="The same for each of them.")
@json_option
@asks_api
def stats(api: Api, since: str, by: str | None, as_json: bool) -> int:
    """Show what came, what became of it, and every watermark."""
    found = api.get("stats", since=since, by=by)
    return answer(found, _stats_lines(found, by), as_json=as_json)


def _stats_lines(stats: Mapping[str, Any], by: str | None) -> list[str]:
    flows = ("total", "duplicates", "conflicts", "rejected", "retries", "replays")
    lines = fields(
        {
            "since": moment(stats["since"]),
            **{word: f"{stats[word]:,}" for word in flows},
            "deliveries": show_counts(stats["by_status"]) or "none",
            "dead now": click.style(f"{stats['dead']:,}", fg="red" if stats["dead"] else None),
            "today": f"{stats['volume_today']:,}",
        }
    )
    lines += [_watermark(mark) for mark in stats["watermarks"]]
    if by and stats["by"]:
        names = list(dict.fromkeys(word for counts in stats["by"].values() for word in counts))
        lines += ["", *_matrix((by, *(word.replace("_", " ") for word in names)), stats["by"], names)]
    if by == "destination" and any(per_day := stats["per_day"].values()):
        days = sorted({day for counts in per_day for day in counts})
        rows = {day: {name: counts.get(day, 0) for name, counts in stats["per_day"].items()} for day in days}
        lines += ["", *_matrix(("day", *map(text, stats["per_day"])), rows, list(stats["per_day"]))]
    return lines


def _matrix(head: Sequence[str], rows: Mapping[str, Mapping[str, int]], columns: Sequence[str]) -> list[str]:
    return table(head, [[text(row), *(f"{of.get(one, 0):,}" for one in columns)] for row, of in rows.items()])


def _watermark(mark: Mapping[str, Any]) -> str:
    level = "unknown" if mark["level"] is None else _level(mark["name"], mark["level"])
    word = click.style("crossed", fg="red") if mark["crossed"] else click.style("fine", fg="green")
    return f"watermark {text(mark['name'])}: {level}, limit {_level(mark['name'], mark['limit'])}, {word}"


def _level(name: str, level: float) -> str:
    if name.startswith("oldest_due"):
        return show_duration(round(level))
    return f"{level:.1%}" if name.startswith("disk") else f"{level:,g}"


# -- show --------------------------------------------------------------------------------------

_SKEW: Final = timedelta(seconds=5)
"""The furthest that the clocks of receiver and store may be apart."""


@dataclass(frozen=True, slots=True)
class _Parts:
    body: bool
    headers: bool
    diff: bool
    arrival: str | None
    """The arrival whose body and headers are shown; None: the first one."""


@click.command("show")
@click.argument("id")
@click.option("--body", is_flag=True, help="The body too, made readable.")
@click.option("--headers", is_flag=True, help="The headers too; credentials are masked.")
@click.option("--raw", is_flag=True, help="The body and nothing else, byte for byte.")
@click.option("--diff", is_flag=True, help="How later arrivals of the event differ from the first, bodies included.")
@click.option("--arrival", metavar="ID", help="With an event: body and headers as they came in this arrival (arr_…).")
@json_option
@asks_api
def show(api: Api, id: str, raw: bool, as_json: bool, **parts: Any) -> int:
    """Show an event (evt_…) with its arrivals, a delivery (dlv_…) with its attempts, or a replay (rpl_…).

    An attempt (att_…) is shown with its delivery. An event's first arrival (arr_…) is shown as the event; a later one,
    duplicate or conflict, is found by its event: show evt_… --arrival arr_…
    """
    kind = id.partition("_")[0]
    if kind not in ("evt", "dlv", "rpl", "arr", "att"):
        raise Misused(f"{text(id)} is no id.", hint="Ids begin with evt_, dlv_, rpl_, arr_ or att_.")
    is_event = kind in ("evt", "arr")
    if (any(parts.values()) and not (is_event or raw)) or (raw and kind == "rpl"):
        raise click.UsageError("--body, --headers, --diff and --arrival are about events (evt_…).")
    if kind == "rpl":
        replay = api.get(at("replays", id))
        return answer(replay, replay_lines(replay), as_json=as_json)
    if is_event:
        event_id = id if kind == "evt" else _event_of_arrival(api, id)
        return _print_body(api, event_id, parts) if raw else _show_event(api, event_id, _Parts(**parts), as_json)
    delivery = api.get(at("deliveries", id)) if kind == "dlv" else _delivery_of_attempt(api, id)
    return _print_body(api, delivery["event_id"], parts) if raw else _show_delivery(api, delivery, as_json)


def _print_body(api: Api, event_id: str, parts: Mapping[str, Any]) -> int:
    click.echo(api.raw(_body_at(event_id, parts["arrival"])), nl=False)
    return 0


def _body_at(event_id: str, arrival: str | None) -> str:
    return at("events", event_id, *(("arrivals", arrival) if arrival else ()), "body")


def _event_of_arrival(api: Api, id: str) -> str:
    """Return the event of its first arrival, which has the same number. Stores have no index of later arrivals."""
    event_id, came = f"evt_{id.partition('_')[2]}", show_moment(_moment_of(id), "seconds")
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


def _delivery_of_attempt(api: Api, attempt_id: str) -> dict[str, Any]:
    """Find an attempt's delivery: both ids begin with the moment at which the event arrived."""
    digits = attempt_id.partition("_")[2].replace("-", "")
    came = _moment_of(attempt_id)
    query = f"since:{show_moment(came - _SKEW)} until:{show_moment(came + _SKEW)}"
    for delivery in api.pages("deliveries", query=query):
        if delivery["id"][4:20] == digits[:16]:
            attempts = api.get(at("deliveries", delivery["id"], "attempts"))["items"]
            if any(one["id"] == attempt_id for one in attempts):
                return delivery
    raise Failed("There is no such attempt, or no longer.", hint="It is shown with its delivery (dlv_…).")


def _moment_of(id: str) -> datetime:
    """Return the time that an id begins with. Raises Misused."""
    digits = id.partition("_")[2].replace("-", "")
    try:
        came = datetime.fromtimestamp(int(digits[:12], 16) / 1000, UTC)
    except (ValueError, OverflowError):
        raise Misused(f"{text(id)} is no id.") from None
    return min(came, datetime.max.replace(tzinfo=UTC) - _SKEW)  # leaves room for a later moment


def _show_event(api: Api, event_id: str, parts: _Parts, as_json: bool) -> int:
    event = api.get(at("events", event_id))
    arrivals = api.get(at("events", event_id, "arrivals"))["items"]
    chosen = next((one for one in arrivals if parts.arrival in (None, one["id"])), None)
    if chosen is None:
        raise Failed(
            f"This event has no arrival {text(parts.arrival)}, or no longer.", hint="Without --arrival it lists them."
        )
    body = api.raw(_body_at(event_id, parts.arrival)) if parts.body else None
    differing = [one["id"] for one in arrivals if one["body_differs"] and parts.diff]
    bodies = {arrival: api.raw(_body_at(event_id, arrival)) for arrival in differing}
    if as_json:
        listed = [{**one, **_body_field(bodies.get(one["id"]))} for one in arrivals]
        return answer({**event, "arrivals": listed, **_body_field(body)}, (), as_json=True)
    lines = [*event_lines(event), "", "arrivals", *(f"  {_arrival_line(one)}" for one in arrivals)]
    if parts.headers:
        lines += ["", "headers", *_header_lines(chosen)]
    if parts.diff:
        first = api.raw(_body_at(event_id, None)) if bodies else b""
        lines += ["", "differences", *_differences(arrivals, first, bodies)]
    if body is not None:
        lines += ["", "body", *(f"  {one}" for one in readable(body))]
    say(lines)
    return 0


def _body_field(body: bytes | None) -> dict[str, str]:
    return {} if body is None else {"body": body.decode("utf-8", "replace")}


def event_lines(event: Mapping[str, Any]) -> list[str]:
    facts = {
        "source": text(event["source"]),
        "type": text(event["type"], 200),
        "key": text(event["key"], 1000),
        "subject": text(event["subject"], 1000),
        "received": moment(event["received_at"]),
        "happened": moment(event["event_at"]),
        "marks": ", ".join(event["marks"]),
        "same body as": event["same_body_as"] or "",
        "size": count(event["size"], "byte"),
        "request": text(f"{event['method']} {event['target']}", 500),
    }
    lines = [event["id"], *fields(facts, "  ")]
    if event["deliveries"]:
        lines += ["", "deliveries", *(f"  {_delivery_line(one)}" for one in event["deliveries"])]
    return lines


def _delivery_line(delivery: Mapping[str, Any]) -> str:
    tried = f"run {delivery['run']}, attempt {delivery['attempts']}" if delivery["attempts"] else "not tried yet"
    due = f"next {next_moment(delivery['due_at'])}" if delivery["status"] == "pending" and delivery["due_at"] else ""
    failed = text(last_failure(delivery), 100) if delivery["status"] != "done" else ""
    status = f"{text(delivery['destination'])}: {state(delivery['status'], delivery['note'])}"
    status += f", replayed by {delivery['replay_id']}" if delivery["replayed"] else ""
    return join_columns(delivery["id"], status, tried, due, failed)


def _arrival_line(arrival: Mapping[str, Any]) -> str:
    differs = "another body" if arrival["body_differs"] else ""
    return join_columns(moment(arrival["at"]), state(arrival["outcome"]), differs, arrival["id"])


def _header_lines(arrival: Mapping[str, Any]) -> list[str]:
    return [f"  {text(name, 200)}: {text(value, 2000)}" for name, value in arrival["headers"]]


def _differences(arrivals: Sequence[Mapping[str, Any]], body: bytes, others: Mapping[str, bytes]) -> list[str]:
    """Compare every later arrival with the first: its headers, and its body where that differs."""
    first, *later = arrivals
    lines: list[str] = []
    for one in later:
        changed = _diff(_header_lines(first), _header_lines(one), 0) or ["  the same headers"]
        if one["id"] in others:
            another = _diff(readable(body, sort=True), readable(others[one["id"]], sort=True), 3)
            changed += another or ["  the same body, written in another way"]
        lines += [f"  {_arrival_line(one)}", *(f"  {line}" for line in changed)]
    return lines or ["  it came once"]


def _diff(before: Sequence[str], after: Sequence[str], around: int) -> list[str]:
    """Return a coloured diff with `around` lines of context; with 0, without line numbers."""
    import difflib  # only here: --help must not wait for it

    colors = {"+": "green", "-": "red", "@": "cyan"}
    lines = list(difflib.unified_diff(before, after, lineterm="", n=around))[2:]
    shown = [line for line in lines if around or not line.startswith("@@")]
    return [click.style(line, fg=colors.get(line[:1])) for line in shown]


def _show_delivery(api: Api, delivery: Mapping[str, Any], as_json: bool) -> int:
    attempts = api.get(at("deliveries", delivery["id"], "attempts"))["items"]
    facts = {
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
        "failed": text(last_failure(delivery), 500) if delivery["status"] != "done" else "",
        "category": delivery["category"] or "",
        "reason": text(delivery["reason"], 500),
        "run": str(delivery["run"]),
        "replayed": moment(delivery["last_replay_at"]),
        "replay": delivery["replay_id"] or "",
    }
    lines = [join_columns(delivery["id"], state(delivery["status"], delivery["note"])), *fields(facts, "  ")]
    if attempts:
        lines += ["", "attempts", *(line for one in attempts for line in attempt_lines(one))]
    return answer({**delivery, "timeline": attempts}, lines, as_json=as_json)


def attempt_lines(attempt: Mapping[str, Any]) -> list[str]:
    number = f"run {attempt['run']} attempt {attempt['attempt']}"
    outcome = state(attempt["outcome"]) + (f" {attempt['category']}" if attempt["category"] else "")
    code = f"HTTP {attempt['status']}" if attempt["status"] else ""
    took = show_elapsed(attempt["duration"])
    lines = ["  " + join_columns(moment(attempt["started_at"]), number, outcome, code, took, attempt["id"])]
    lines += [f"    {text(one, 500)}" for one in (attempt["error"] or "").splitlines()]
    lines += [f"    | {text(one, 500)}" for one in (attempt["answer"] or "").splitlines()]
    if attempt["result"] is not None:
        result = json.dumps(attempt["result"], ensure_ascii=False, separators=(",", ":"))
        lines.append(f"    returned {text(result, 2000)}")
    return lines


def last_failure(delivery: Mapping[str, Any]) -> str:
    """Print the cause of a delivery's last failure, in a line."""
    error = (delivery["last_error"] or "").splitlines()
    if error:
        return str(error[0])
    return f"HTTP {delivery['last_status']}" if delivery["last_status"] else str(delivery["reason"] or "")


def replay_lines(replay: Mapping[str, Any]) -> list[str]:
    counts = show_counts(replay, ("done", "dead", "skipped"))
    facts = {
        "deliveries": f"{replay['planned']} planned, {replay['fed']} handed out" + (f", {counts}" if counts else ""),
        "query": text(replay["query"], 500),
        "rate": rate_of(replay),
        "by": text(replay["actor"]),
        "reason": text(replay["reason"], 500),
        "created": moment(replay["created_at"]),
        "finished": moment(replay["finished_at"]),
        "command": text(replay["command"], 2000),
    }
    return [join_columns(replay["id"], state(replay["state"])), *fields(facts, "  ")]


def rate_of(replay: Mapping[str, Any]) -> str:
    return "" if replay["rate"] is None else show_rate(replay["rate"])
