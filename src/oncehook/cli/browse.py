"""Commands that only read: events, show, sources, destinations, stats, open, and the list of dead letters.

The lines of events, deliveries and destinations are printed here for `operate` and `tail`, too.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from textwrap import wrap
from typing import Any, Final

import click

from oncehook import clock
from oncehook.cli.api import Api, Failed, Misused, Unreachable, asks_api, at
from oncehook.cli.complete import complete_id, complete_query
from oncehook.cli.options import json_lines_option, json_option, wide_option
from oncehook.cli.output import (
    TableColumn,
    answer,
    can_browse,
    cell,
    fields,
    id_of,
    join_columns,
    json_line,
    moment,
    next_moment,
    readable,
    room,
    say,
    show_counts,
    state,
    state_of_replay,
    table,
    text,
    when,
)
from oncehook.human import count, show_duration, show_elapsed, show_id, show_moment, show_rate, show_streak

# -- events ------------------------------------------------------------------------------------


_NEGATED: Final = re.compile(r"-[A-Za-z_][^:=]*:.")
"""A negated word of a query, which is no option."""


class QueryCommand(click.Command):
    """A command that takes a query, and whose help ends with its words."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        rest = super().parse_args(ctx, [f"\0{one}" if _NEGATED.match(one) else one for one in args])
        for name, value in ctx.params.items():
            if isinstance(value, tuple):
                ctx.params[name] = tuple(one.removeprefix("\0") if isinstance(one, str) else one for one in value)
            elif isinstance(value, str):
                ctx.params[name] = value.removeprefix("\0")
        return rest

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from oncehook.query import BODY, JOINING, WORDS

        words = {f"{name}:{word.example}": word.about.replace("`", "") for name, word in WORDS.items()}
        body = (f"{BODY}data.amount:>1000", "the value at this place of a JSON body")
        joining = [(example, about.replace("`", "")) for example, about in JOINING.items()]
        with formatter.section("Words of a query"):
            formatter.write_dl([*words.items(), body, *joining])


@click.command("events", cls=QueryCommand)
@click.argument("query", nargs=-1, metavar="[QUERY]", shell_complete=complete_query)
@click.option("--limit", type=click.IntRange(1), default=50, show_default=True, help="At most so many, the newest.")
@click.option("--all", "everything", is_flag=True, help="All that match.")
@click.option("--query", "also", default="", metavar="QUERY", help="The query, as `replay` takes it.")
@wide_option
@json_lines_option
@asks_api
def events(api: Api, query: tuple[str, ...], also: str, limit: int, everything: bool, as_json: bool) -> int:
    """List events, newest first: all, or those that match QUERY."""
    query = (*query, also) if also else query
    found = api.pages("events", most=None if everything else limit, query=api.full_query(query))
    if as_json:
        # Printed page by page: the reader may stop early, or be slow.
        say(json_line(one) for one in found)
        return 0
    listed = list(found)
    if listed:
        say(_event_table(listed))
    else:
        say(["no events match" if query else "no events yet: oncehook send --list shows what can be sent"], err=True)
    return 0


def _event_table(events: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a table of events, with a column for accounts where one of them has any."""
    accounts = any(event["account"] is not None for event in events)
    head = (
        "received",
        "id",
        TableColumn("source", 6),
        *((TableColumn("account", 6, spare=3),) if accounts else ()),
        TableColumn("type", 18),
        TableColumn("subject", 8, spare=1),
        TableColumn("key", 8, spare=2),
        "came",
        TableColumn("deliveries", 20),
    )
    return table(head, [_event_row(event, accounts) for event in events])


def _event_row(event: Mapping[str, Any], accounts: bool) -> list[str]:
    return [
        when(event["received_at"]),
        id_of(event["id"]),
        cell(event["source"], 20),
        *([cell(event["account"], 20)] if accounts else []),
        cell(event["type"], 32),
        cell(event["subject"], 24),
        cell(event["key"] or ", ".join(event["marks"]), 28),
        (f"×{event['copies']}" if event["copies"] > 1 else "") + (" ≠" if event["has_conflict"] else ""),
        " ".join(map(_chip, event["deliveries"])),
    ]


def _chip(delivery: Mapping[str, Any]) -> str:
    chip = f"{cell(delivery['destination'], 20)}:{state(delivery['status'], delivery['note'])}"
    return f"{chip} (replayed)" if delivery["replayed"] else chip


# -- rejections --------------------------------------------------------------------------------


@click.command("rejected")
@click.option("--source", metavar="NAME", help="Only of this source.")
@click.option(
    "--limit", type=click.IntRange(1, 1000), default=20, show_default=True, help="At most so many, the newest."
)
@click.option("--headers", is_flag=True, help="The headers too; credentials are masked.")
@click.option("--body", is_flag=True, help="The first KiB of the body too; redacted.")
@json_lines_option
@asks_api
def rejected(api: Api, source: str | None, limit: int, headers: bool, body: bool, as_json: bool) -> int:
    """List rejected arrivals, newest first, and why each was rejected.

    Headers and the beginning of the body are kept for a few arrivals a second, and only of sources that exist. They and
    the diagnosis are for people who may see payloads.
    """
    found = list(api.pages("rejections", most=limit, source=source))
    if as_json:
        say(json_line(one) for one in found)
    elif found:
        say(line for one in found for line in _rejection_lines(one, headers, body))
    else:
        say(["none rejected"], err=True)
    return 0


def _rejection_lines(one: Mapping[str, Any], headers: bool, body: bool) -> list[str]:
    reason = "" if one["reason"] == one["code"] else text(one["reason"], 60)
    code = click.style(one["code"], fg="red")
    lines = [join_columns(when(one["at"]), text(one["source"], 40), code, reason, text(one["peer"]))]
    lines[0] += f"  {count(one['size'], 'byte')}"
    if one["diagnosis"]:
        lines += wrap(text(one["diagnosis"], 500), room() or 600, initial_indent="  ", subsequent_indent="  ")
    if headers and one["headers"] is not None:
        lines += [f"    {one['method']} {text(one['target'], 500)}", *(f"  {line}" for line in _header_lines(one))]
    if body and one["body"] is not None:
        lines += [f"    | {text(line, 1200)}" for line in one["body"].splitlines()]
    return lines


# -- lists -------------------------------------------------------------------------------------


def list_sources(api: Api, as_json: bool) -> int:
    """Show every source: its address, its verifier and what that covers, and what came in the last 24 hours."""
    head = (
        TableColumn("name", 8),
        TableColumn("preset", 6, spare=3),
        TableColumn("address", 12, spare=1),
        TableColumn("verifier", 12, spare=5),
        TableColumn("covers", 8, spare=8),
        TableColumn("secrets", spare=7),
        TableColumn("to", 6, spare=4),
        TableColumn("origin", 6, spare=9),
        TableColumn("last arrival", spare=2),
        "24 h",
        TableColumn("duplicates", spare=6),
        TableColumn("rejected", spare=5),
    )
    found = {"items": list(api.pages("sources")), "next": None}
    return _list(found, head, _source_row, "no sources: add a [source.NAME], or oncehook sources create", as_json)


def _list(
    found: Mapping[str, Any],
    head: Sequence[str | TableColumn],
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
        cell(found["name"]),
        found["preset"] or "",
        cell(found["address"] or "hidden", 60),
        verifier,
        "" if found["unverified"] else describe_coverage(found["body_authenticated"], found["key_authenticated"]),
        str(found["secrets"]),
        cell(", ".join(found["destinations"])),
        _origin(found),
        when(found["last_arrival"]),
        *(f"{found['figures'].get(word, 0):,}" for word in ("accepted", "duplicate", "rejected")),
    ]


def _origin(found: Mapping[str, Any]) -> str:
    return "store" + ("" if found["enabled"] else ", disabled") if found["origin"] == "store" else found["origin"]


def list_routes(api: Api, as_json: bool) -> int:
    """Show every route: its ends and conditions."""
    found = {"items": list(api.pages("routes")), "next": None}
    head = (
        "id",
        TableColumn("from", 6),
        TableColumn("to", 6),
        TableColumn("when", 8, spare=1),
        TableColumn("origin", 6, spare=2),
    )
    return _list(found, head, _route_row, "no routes: add a [[route]]", as_json)


def _route_row(found: Mapping[str, Any]) -> list[str]:
    conditions = ", ".join(
        f"{place} {one if isinstance(one, str) else ' or '.join(one)}" for place, one in found["when"].items()
    )
    return [found["id"] or "", cell(found["from"]), cell(found["to"]), cell(conditions), _origin(found)]


def list_destinations(api: Api, as_json: bool) -> int:
    """Show every destination: its address, its state, and when it is tried again."""
    head = (
        TableColumn("name", 8),
        TableColumn("kind", spare=3),
        TableColumn("address", 12, spare=1, comfortable=32),
        TableColumn("state", 20, is_main=True),
        "pending",
        TableColumn("leased", spare=2),
        "dead",
        "oldest due",
        TableColumn("retry", 8, spare=4),
        TableColumn("origin", 6, spare=5),
    )
    if_empty = "no destinations: add a [destination.NAME] and a [[route]] to it"
    found = {"items": list(api.pages("destinations")), "next": None}
    return _list(found, head, _destination_row, if_empty, as_json)


def _destination_row(found: Mapping[str, Any]) -> list[str]:
    oldest = found["oldest_due"]
    return [
        cell(found["name"]),
        found["kind"],
        cell(found["address"], 60),
        destination_state(found),
        *(f"{found[word]:,}" for word in ("pending", "leased", "dead")),
        "" if oldest is None else show_duration(round(oldest)),
        found["retry"],
        _origin(found),
    ]


def destination_state(found: Mapping[str, Any]) -> str:
    """Print a destination's state, with the reason of a pause or the number of failures."""
    word = found["state"]
    failures = show_streak(found["failures"])
    notes = {"paused": text(found["paused_why"]), "held_back": failures, "failing": failures}
    return state(word.replace("_", " "), notes.get(word))


def list_dead(api: Api, destination: str | None, as_json: bool) -> int:
    head = (
        "count",
        TableColumn("destination", 8),
        TableColumn("cause", 20, is_main=True),
        TableColumn("first", spare=2),
        TableColumn("last", spare=1),
        "sample",
    )
    return _list(api.get("dead", destination=destination), head, _cause_row, "no dead letters", as_json)


def _cause_row(cause: Mapping[str, Any]) -> list[str]:
    first, last = when(cause["first_at"]), when(cause["last_at"])
    sample = id_of(cause["sample"])
    return [f"{cause['count']:,}", cell(cause["destination"]), cell(cause["cause"], 80), first, last, sample]


# -- stats -------------------------------------------------------------------------------------


@click.command("stats")
@click.option("--since", default="24h", show_default=True, metavar="TIME", help="A duration ago, or an ISO time.")
@click.option("--by", type=click.Choice(["source", "destination"]), help="The same for each of them.")
@click.option("--account", metavar="ID", help="Of this account only.")
@json_option
@asks_api
def stats(api: Api, since: str, by: str | None, account: str | None, as_json: bool) -> int:
    """Show what came, what became of it, and every watermark."""
    found = api.get("stats", since=since, by=by, account=account)
    if as_json:
        return answer(found, (), as_json=True)
    has_volumes = any(mark["name"].startswith(VOLUME) for mark in found["watermarks"])
    sources = {one["name"]: one["preset"] for one in api.pages("sources")} if has_volumes else {}
    say(_stats_lines(found, by, sources))
    return 0


VOLUME: Final = "daily_volume."


def _stats_lines(stats: Mapping[str, Any], by: str | None, presets: Mapping[str, str | None]) -> list[str]:
    flows = ("duplicates", "conflicts", "rejected", "retries", "replays")
    lines = fields(
        {
            "since": moment(stats["since"]),
            "events": f"{stats['total']:,} accepted",
            **{word: f"{stats[word]:,}" for word in flows},
            "deliveries": show_counts(stats["by_status"]) or "none",
            "dead now": click.style(f"{stats['dead']:,}", fg="red" if stats["dead"] else None),
            "today": f"{count(stats['volume_today'], 'event')} since midnight UTC",
        }
    )
    if stats["watermarks"]:
        head = ("watermark", "level", "limit", "")
        lines += ["", *table(head, [_watermark_row(mark, presets) for mark in stats["watermarks"]])]
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


def _watermark_row(mark: Mapping[str, Any], presets: Mapping[str, str | None]) -> list[str]:
    level = "unknown" if mark["level"] is None else _level(mark["name"], mark["level"])
    word = click.style("crossed", fg="red") if mark["crossed"] else click.style("fine", fg="green")
    preset = presets.get(mark["name"].removeprefix(VOLUME)) if mark["name"].startswith(VOLUME) else None
    if preset is not None and _volume_of(preset) == mark["limit"]:
        word += "  (the preset's limit)"
    return [text(mark["name"]), level, _level(mark["name"], mark["limit"]), word]


def _volume_of(preset: str) -> int | None:
    from oncehook import presets

    return presets.load(preset).daily_volume if preset in presets.names() else None


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
@click.argument("id", shell_complete=complete_id)
@click.option("--body", is_flag=True, help="The body too, made readable.")
@click.option("--headers", is_flag=True, help="The headers too; credentials are masked.")
@click.option("--raw", is_flag=True, help="The body and nothing else, byte for byte.")
@click.option("--diff", is_flag=True, help="How later arrivals of the event differ from the first, bodies included.")
@click.option("--arrival", metavar="ID", help="With an event: body and headers as they came in this arrival (arr_…).")
@wide_option
@json_option
@asks_api
def show(api: Api, id: str, raw: bool, as_json: bool, **parts: Any) -> int:
    """Show an event (evt_…) with arrivals and attempts, a delivery (dlv_…) with its attempts, or a replay (rpl_…).

    A short id (evt_…3a5d2c) is enough where it is the only one among recent ones. An attempt (att_…) is shown with its
    delivery. An event's first arrival (arr_…) is shown as the event; a later one, duplicate or conflict, is found by
    its event: show evt_… --arrival arr_…
    """
    kind = id.partition("_")[0]
    if kind not in ("evt", "dlv", "rpl", "arr", "att"):
        raise Misused(f"{text(id)} is no id.", hint="Ids begin with evt_, dlv_, rpl_, arr_ or att_.")
    is_event = kind in ("evt", "arr")
    if (any(parts.values()) and not (is_event or raw)) or (raw and kind == "rpl"):
        raise click.UsageError("--body, --headers, --diff and --arrival are about events (evt_…).")
    whole = api.full_id(id)
    if kind == "rpl":
        replay = api.get(at("replays", whole))
        return answer(replay, replay_lines(replay), as_json=as_json)
    if is_event:
        event_id = whole if kind == "evt" else _event_of_arrival(api, whole)
        parts["arrival"] = _full_arrival(api, event_id, parts["arrival"])
        return _print_body(api, event_id, parts) if raw else _show_event(api, event_id, _Parts(**parts), as_json)
    delivery = api.get(at("deliveries", whole)) if kind == "dlv" else _delivery_of_attempt(api, whole)
    return _print_body(api, delivery["event_id"], parts) if raw else _show_delivery(api, delivery, as_json)


def _print_body(api: Api, event_id: str, parts: Mapping[str, Any]) -> int:
    click.echo(api.raw(_body_at(event_id, parts["arrival"])), nl=False)
    return 0


def _body_at(event_id: str, arrival: str | None) -> str:
    return at("events", event_id, *(("arrivals", arrival) if arrival else ()), "body")


def _full_arrival(api: Api, event_id: str, arrival: str | None) -> str | None:
    """Return the whole id of an arrival of this event that is named by its short one."""
    if arrival is None or "…" not in arrival:
        return arrival
    ids = [one["id"] for one in api.get(at("events", event_id, "arrivals"))["items"]]
    return next((one for one in ids if show_id(one) == arrival), arrival)


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
    waits = _waits(api, event["deliveries"])
    lines = [*event_lines(event, link=api.link(at("events", event_id)), waits=waits), *_attempts_of(api, event)]
    lines += ["", "arrivals", *(f"  {_arrival_line(one)}" for one in arrivals)]
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


MOST_SHOWN: Final = 20
"""Deliveries of an event whose attempts are listed."""


def _attempts_of(api: Api, event: Mapping[str, Any]) -> list[str]:
    lines: list[str] = []
    for one in event["deliveries"][:MOST_SHOWN]:
        if one["attempts"] or one["run"] > 1:
            attempts = api.get(at("deliveries", one["id"], "attempts"))["items"]
            lines += ["", f"attempts for {text(one['destination'])}"]
            lines += [line for attempt in attempts for line in attempt_lines({**attempt, "answer": None})]
    return lines


def _waits(api: Api, deliveries: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return by id why deliveries that are due wait: their destination is paused, or held back by its breaker."""
    waiting = [one for one in deliveries if one["status"] == "pending" and one["due_at"]]
    found: dict[str, str] = {}
    for name in {one["destination"] for one in waiting}:
        with contextlib.suppress(Failed):  # only the program that defines it knows its state
            destination = api.get(at("destinations", name))
            found |= {one["id"]: held_back(destination, one["due_at"]) for one in waiting if one["destination"] == name}
    return found


def held_back(destination: Mapping[str, Any], due_at: str) -> str:
    """Say why a destination would not get a delivery when it is due; empty where it would."""
    if destination["state"] == "paused":
        return "paused"
    if destination["open_until"] is None:
        return ""
    until, due = datetime.fromisoformat(destination["open_until"]), datetime.fromisoformat(due_at)
    if until > max(due, clock.now_utc()):
        return f"held back until {until:%H:%M:%S} UTC"
    return "" if due > clock.now_utc() else "held back until one attempt succeeds"


def event_lines(event: Mapping[str, Any], link: str = "", waits: Mapping[str, str] | None = None) -> list[str]:
    facts = {
        "source": text(event["source"]),
        "account": text(event["account"]),
        "type": text(event["type"], 200),
        "key": text(event["key"], 1000),
        "subject": text(event["subject"], 1000),
        "received": moment(event["received_at"]),
        "happened": moment(event["event_at"]),
        "marks": ", ".join(event["marks"]),
        "same body as": event["same_body_as"] or "",
        "size": count(event["size"], "byte"),
        "request": text(f"{event['method']} {event['target']}", 500),
        "dashboard": link,
    }
    lines = [event["id"], *fields(facts, "  ")]
    if event["deliveries"]:
        head = (TableColumn("delivery"), TableColumn("status", 12), TableColumn("tried", 8), TableColumn("", 16))
        lines += ["", *table(head, [_delivery_row(one, waits or {}) for one in event["deliveries"]])]
    return lines


def _delivery_row(delivery: Mapping[str, Any], waits: Mapping[str, str]) -> list[str]:
    tried = f"run {delivery['run']}, attempt {delivery['attempts']}" if delivery["attempts"] else "not tried yet"
    due = f"next {next_moment(delivery['due_at'])}" if delivery["status"] == "pending" and delivery["due_at"] else ""
    due = waits.get(delivery["id"]) or due
    failed = text(last_failure(delivery), 100) if delivery["status"] != "done" else ""
    status = f"{text(delivery['destination'])}: {state(delivery['status'], delivery['note'])}"
    status += f", replayed by {id_of(delivery['replay_id'])}" if delivery["replayed"] else ""
    return [id_of(delivery["id"]), status, tried, due or failed]


def _arrival_line(arrival: Mapping[str, Any]) -> str:
    differs = "another body" if arrival["body_differs"] else ""
    return join_columns(moment(arrival["at"]), state(arrival["outcome"]), differs, id_of(arrival["id"]))


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
        "due": _waits(api, [delivery]).get(delivery["id"]) or next_moment(delivery["due_at"]),
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
    took, attempt_id = show_elapsed(attempt["duration"]), attempt["id"] if room() is None else ""
    lines = ["  " + join_columns(moment(attempt["started_at"]), number, outcome, code, took, attempt_id)]
    if request := attempt["request"]:
        times = attempt["times"] or {}
        steps = [f"{name.replace('_', ' ')} {show_elapsed(took)}" for name, took in times.items() if took is not None]
        lines.append(f"    > {request['method']} {text(request['url'], 300)}{'  ' if steps else ''}{', '.join(steps)}")
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
    return [join_columns(replay["id"], state_of_replay(replay)), *fields(facts, "  ")]


def rate_of(replay: Mapping[str, Any]) -> str:
    return "" if replay["rate"] is None else show_rate(replay["rate"])


# -- open --------------------------------------------------------------------------------------


@click.command("open")
@click.argument("id", required=False, shell_complete=complete_id)
@click.option("--print", "only_print", is_flag=True, help="Print the link; open nothing.")
@asks_api
def open_(api: Api, id: str | None, only_print: bool) -> int:
    """Open the dashboard of the running server in your browser, logged in, or its page about ID (evt_…).

    The link works once, on this machine, for ten minutes. Of a server elsewhere the address is opened, and its login
    page asks.
    """
    api.connect_live()
    page = "/"
    if id is not None:
        if not id.startswith("evt_"):
            raise Misused(f"{text(id)} is no event.", hint="Pages are about events (evt_…).")
        page = "/" + at("events", api.full_id(id))
    link = api.login_link(page)
    if not only_print and can_browse() and click.launch(link) == 0:
        say([f"opened {link.partition('?')[0]}"], err=True)
        return 0
    say([link])
    return 0
