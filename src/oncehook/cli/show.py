"""`oncehook show`: one event, delivery or replay with everything that is known about it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import click
import msgspec

from oncehook.cli.api import Api, Failed, Misused, Unreachable, at, json_option, speaks
from oncehook.cli.replay import replay_lines, why
from oncehook.cli.showing import document, fields, moment, next_moment, readable, say, state, text
from oncehook.human import words
from oncehook.query import show_moment

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
def command(
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
    lines += ["", "arrivals", *(f"  {_arrival(one)}" for one in arrivals)]
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


def _arrival(arrival: Mapping[str, Any]) -> str:
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
        lines += [f"  {_arrival(one)}", *(f"  {line}" for line in changed)]
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
        lines += ["", "attempts", *(line for one in attempts for line in _attempt(one))]
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


def _attempt(attempt: Mapping[str, Any]) -> list[str]:
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
