"""`oncehook tail`: what happens, as it happens: a line each, or on a terminal a list to walk through.

The list and its keys are in `screen`; here is which moments are meant, and how each reads in a line.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import shutil
import sys
import termios
import threading
import tty
import webbrowser
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, Protocol

import click

from oncehook import clock
from oncehook.cli.api import PREFIX, Api, Failed, Unreachable, at, speaks
from oncehook.cli.output import count, line, say, state, text
from oncehook.errors import OncehookError
from oncehook.human import words
from oncehook.logs import plain

if TYPE_CHECKING:
    from oncehook.cli.transport import Wire

Moment = tuple[str, dict[str, Any]]
"""What kind it is (arrival, attempt, watermark, dropped; lost, back: the line itself), and its fields."""

PAUSES: Final = (0.5, 1.0, 2.0, 5.0)
"""Seconds before each try to connect again; the last one holds from then on."""

LOOK_EVERY: Final = 1.0
MOST_LOOKED_AT: Final = 1000
"""Events that may have come between two looks; of more, the oldest are passed over."""


class Feed(Protocol):
    """Where moments come from."""

    def take(self, seconds: float) -> list[Moment]:
        """What has happened since the last call; waits so long for the first of it."""


def feed(api: Api) -> Feed:
    """The feed that there is. Raises Unreachable where nobody could tell anything."""
    from oncehook.cli.transport import Wire

    return Heard(api) if isinstance(api.live(or_read=True), Wire) else Looked(api)


# -- from a server -----------------------------------------------------------------------------


class Heard:
    """A server's stream."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._waiting: queue.SimpleQueue[Moment] = queue.SimpleQueue()
        lines = self._listen()  # here, so that a wrong address or token ends the command
        threading.Thread(target=self._hear, args=(lines,), daemon=True).start()

    def take(self, seconds: float) -> list[Moment]:
        found = []
        try:
            found.append(self._waiting.get(timeout=seconds))
            while True:
                found.append(self._waiting.get_nowait())
        except queue.Empty:
            return found

    def _listen(self) -> Iterator[bytes]:
        line: Wire = self._api.line  # type: ignore[assignment]
        try:
            answer, lines = line.listen(PREFIX + "stream")
        except OSError as error:
            raise Unreachable(f"nobody answers at {line} ({error})", hint="Is `oncehook serve` running?") from error
        self._api.checked(answer)
        return lines

    def _hear(self, lines: Iterator[bytes]) -> None:
        while True:
            why = "the server has stopped"
            try:
                for moment in read(lines):
                    self._waiting.put(moment)
            except OSError as error:
                why = str(error)
            self._waiting.put(("lost", {"error": why}))
            lines = self._again()
            self._waiting.put(("back", {}))

    def _again(self) -> Iterator[bytes]:
        tries = 0
        while True:
            threading.Event().wait(PAUSES[min(tries, len(PAUSES) - 1)])
            tries += 1
            try:
                self._api.live()
                return self._listen()
            except (Failed, OncehookError):
                continue


def read(lines: Iterator[bytes]) -> Iterator[Moment]:
    """Moments out of server-sent events. What is no event of ours is passed over."""
    kind, data = "", b""
    for raw in lines:
        name, _, value = raw.partition(b": ")
        if name == b"event":
            kind = value.decode()
        elif name == b"data":
            data += value
        elif not raw and data:
            yield kind, json.loads(data)
        if not raw:
            kind, data = "", b""


# -- from the store ----------------------------------------------------------------------------


class Looked:
    """The latest events and deliveries, compared with what they were a moment ago."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._newest = ""
        self._stood: dict[str, tuple[str, int, int]] | None = None
        self._at = clock.steady()
        self._look()

    def take(self, seconds: float) -> list[Moment]:
        due = self._at + LOOK_EVERY - clock.steady()
        self._api.line.rest(max(min(seconds, due), 0.0))
        if due > seconds:
            return []
        self._at = clock.steady()
        return self._look()

    def _look(self) -> list[Moment]:
        return [*self._arrivals(), *self._attempts()]

    def _arrivals(self) -> list[Moment]:
        new = []
        for event in self._api.pages("events", most=MOST_LOOKED_AT if self._newest else 1):
            if event["id"] <= self._newest:
                break
            new.append(event)
        first, self._newest = not self._newest, new[0]["id"] if new else self._newest or "evt_"
        fields = ("source", "type", "key", "subject")
        return [
            ("arrival", {"outcome": "accepted", "event_id": one["id"], **{name: one[name] for name in fields}})
            for one in reversed([] if first else new)
        ]

    def _attempts(self) -> list[Moment]:
        """Deliveries whose last attempt is another one than a moment ago, among the latest."""
        latest = self._api.get("deliveries", limit=200)["items"]
        stands = {one["id"]: (one["status"], one["run"], one["attempts"]) for one in latest}
        before, self._stood = self._stood, stands
        if before is None:
            return []
        told = [one for one in reversed(latest) if one["attempts"] and one["status"] != "leased"]
        return [attempt_moment(one) for one in told if _was(before, one) != stands[one["id"]][1:]]


def _was(before: dict[str, tuple[str, int, int]], delivery: dict[str, Any]) -> tuple[int, int] | None:
    status, run, attempts = before.get(delivery["id"], ("", 0, 0))
    # While it was leased, that attempt was counted already; it is told when it has ended.
    return None if status == "leased" else (run, attempts)


def attempt_moment(delivery: dict[str, Any]) -> Moment:
    outcome = {"done": "done", "pending": "retry"}.get(delivery["status"], delivery["status"])
    fields = ("event_id", "source", "destination", "type", "subject", "run", "category", "note")
    told = {name: delivery[name] for name in fields if delivery[name] is not None}
    return "attempt", {
        **told,
        "outcome": outcome,
        "delivery_id": delivery["id"],
        "attempt": delivery["attempts"],
        "status": delivery["last_status"],
        "error": delivery["last_error"],
    }


KEPT: Final = 500
TICK: Final = 0.1
"""Seconds between two looks at the keyboard."""

KEYS: Final = {"\x1b[A": "k", "\x1b[B": "j", "\r": "\n", "\x03": "q", "\x04": "q"}
HELP: Final = "j k move   enter show   r replay   o open   q quit"


class Screen:
    """A list that grows at its end. While nothing is chosen it follows the newest."""

    def __init__(self, api: Api, feed: Feed, is_wanted: Callable[[Moment], bool]) -> None:
        self._api, self._feed, self._is_wanted = api, feed, is_wanted
        self._rows: deque[tuple[dict[str, Any], str]] = deque(maxlen=KEPT)
        self._chosen: int | None = None
        """Counted from the newest; None: the newest, whichever that is."""
        self._said = ""
        self._asked: dict[str, Any] | None = None
        """What is about to be replayed, until somebody says y."""
        self._shown: list[str] = []
        """What enter shows, instead of the list."""

    def run(self) -> None:
        """Until q."""
        with _raw():
            self._draw()
            while True:
                changed = self._listen()
                for key in _pressed():
                    if key == "q" and not self._shown:
                        return
                    self.press(key)
                    changed = True
                if changed:
                    self._draw()

    def _listen(self) -> bool:
        new = [one for one in self._feed.take(TICK) if self._is_wanted(one)]
        for kind, fields in new:
            self._rows.append((fields, told(kind, fields, clock.now_utc())))
        if self._chosen is not None:
            self._chosen = min(self._chosen + len(new), len(self._rows) - 1)  # what is chosen stays chosen
        return bool(new)

    # -- keys ----------------------------------------------------------------------------------

    def press(self, key: str) -> None:
        """Do what a key means. A failure is a line at the bottom."""
        asked, self._asked, self._said = self._asked, None, ""
        try:
            if asked is not None:
                self._said = self._replay(asked) if key == "y" else "nothing was done"
            elif self._shown:
                self._shown = []
            elif key in "jk" and self._rows:
                self._move(-1 if key == "j" else 1)
            elif key in "\nro" and self._rows:
                self._act(key, self._rows[-1 - (self._chosen or 0)][0])
        except Failed as error:
            self._said = plain(f"{error.message} {error.hint}".strip())

    def _move(self, by: int) -> None:
        place = min((self._chosen or 0) + by, len(self._rows) - 1)
        self._chosen = None if place < 0 or (by < 0 and place == 0) else place

    def _act(self, key: str, fields: dict[str, Any]) -> None:
        event_id = fields.get("event_id") or next(iter(fields.get("event_ids", ())), None)
        if event_id is None:
            self._said = "there is no event behind this line"
        elif key == "o":
            address = f"{self._api.line}/events/{event_id}"
            self._said = f"opened {address}" if address.startswith("http") and webbrowser.open(address) else address
        elif key == "\n":
            self._shown = self._look_at(event_id)
        else:
            self._ask(fields, event_id)

    def _look_at(self, event_id: str) -> list[str]:
        from oncehook.cli.browse import event_lines
        from oncehook.cli.output import readable

        body = readable(self._api.raw(at("events", event_id, "body")))
        return [*event_lines(self._api.get(at("events", event_id))), "", *body]

    def _ask(self, fields: dict[str, Any], event_id: str) -> None:
        self._api.check_may_act()
        ids = [fields["delivery_id"]] if "delivery_id" in fields else [event_id]
        plan = self._api.post("replays/plan", {"ids": ids})
        if not plan["total"]:
            self._said = "nothing of it can be replayed now: only what is dead or discarded"
            return
        to = ", ".join(text(one["destination"]) for one in plan["recipients"])
        self._asked, self._said = plan, f"replay {count(plan['total'], 'delivery', 'deliveries')} to {to}? [y/N]"

    def _replay(self, plan: dict[str, Any]) -> str:
        key = clock.random_bytes(16).hex()
        if plan["total"] == 1:
            made = self._api.post(at("deliveries", plan["sample"][0]["id"], "replay"), {}, key=key)
        else:
            made = self._api.post("replays", {"plan": plan["plan"]}, key=key)
        return str(made["replay_id"])

    # -- drawing -------------------------------------------------------------------------------

    def lines(self, width: int, height: int) -> list[str]:
        """What the terminal shows: the list or one event, and below it a line of help or of news."""
        room = height - 1
        if self._shown:
            body = [_cut(one, width) for one in self._shown[:room]]
            foot = "any key goes back"
        else:
            body, foot = self._list(width, room), HELP
        return [*body, *[""] * (room - len(body)), click.style(_cut(self._said or foot, width), dim=not self._said)]

    def _list(self, width: int, room: int) -> list[str]:
        if not self._rows:
            return ["waiting for something to happen"]
        above = max((self._chosen or 0) - room + 1, 0)
        end = len(self._rows) - above
        drawn = []
        for place in range(max(end - room, 0), end):
            said = _cut(self._rows[place][1], width)
            chosen = self._chosen is not None and place == len(self._rows) - 1 - self._chosen
            drawn.append(click.style(click.unstyle(said), reverse=True) if chosen else said)
        return drawn

    def _draw(self) -> None:
        size = shutil.get_terminal_size()
        drawn = "\x1b[K\r\n".join(self.lines(size.columns, size.lines))
        plainly = os.environ.get("NO_COLOR")
        sys.stdout.write("\x1b[H" + (_without_color(drawn) if plainly else drawn) + "\x1b[K")
        sys.stdout.flush()


def _without_color(drawn: str) -> str:
    """All but the mark of what is chosen, which is no colour."""
    for code in (*range(30, 38), *range(90, 98), 2):
        drawn = drawn.replace(f"\x1b[{code}m", "")
    return drawn


def _cut(said: str, width: int) -> str:
    """A line that fits. Where it has to be cut, its colours go too."""
    bare = click.unstyle(said)
    return said if len(bare) <= width else bare[: width - 1] + "…"


@contextlib.contextmanager
def _raw() -> Iterator[None]:
    """The terminal, key by key and on a page of its own; given back whatever happens."""
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)
    sys.stdout.write("\x1b[?1049h\x1b[?25l\x1b[2J")
    try:
        tty.setraw(keyboard)
        yield
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
        sys.stdout.write("\x1b[?25h\x1b[?1049l")
        sys.stdout.flush()


def _pressed() -> Sequence[str]:
    """The keys that were pressed since the last look. A terminal that is gone ends it, as q does."""
    keyboard = sys.stdin.fileno()
    if not select.select([keyboard], [], [], 0)[0]:
        return ()
    try:
        typed = os.read(keyboard, 64).decode(errors="replace")
    except OSError:
        typed = ""
    return (
        [KEYS.get(typed, typed)]
        if typed in KEYS or typed.startswith("\x1b")
        else [KEYS.get(c, c) for c in typed or "q"]
    )


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
def tail(
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
