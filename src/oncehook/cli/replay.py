"""`oncehook replay`: plan, show the plan, ask, run; and pause, resume or abort what runs.

Ids or a query come in; the server makes the plan and fixes its times. What is printed on stdout is the plan of a dry
run, or the replay that was made; everything said on the way there is talk.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import click

from oncehook import clock
from oncehook.cli.api import Api, Failed, Unreachable, at, json_option, speaks
from oncehook.cli.progress import Progress
from oncehook.cli.showing import count, document, fields, moment, say, state, table, text
from oncehook.human import words

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
def command(
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
    return _follow(api, made, as_json) if wait else _told(api, made, as_json)


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


def _told(api: Api, replay_id: str, as_json: bool) -> int:
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
