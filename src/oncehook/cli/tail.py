"""`oncehook tail`: arrivals and attempts as they happen, one line each, or on a terminal a list with keys to act.

`open_feed` returns the feed for `tail` and `forward`: `StreamFeed` reads the server's stream on a thread of its own and
connects again when it ends; `PollFeed` compares the latest events and deliveries once a second, where no server is
named and the store is PostgreSQL, or a program owns the SQLite file and serves no API.
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
from oncehook.cli.api import PREFIX, Api, Failed, asks_api, at, no_answer
from oncehook.cli.complete import complete_source
from oncehook.cli.options import json_lines_option, wide_option
from oncehook.cli.output import can_browse, cut, id_of, join_columns, json_line, readable, room, say, state, text
from oncehook.errors import OncehookError
from oncehook.human import count, show_duration, show_elapsed, show_streak
from oncehook.logs import plain

if TYPE_CHECKING:
    from oncehook.cli.transport import HttpTransport

Moment = tuple[str, dict[str, Any]]
"""Its kind (arrival, attempt, watermark, breaker, dropped; lost and back for the connection itself), and its fields."""

CONNECTION: Final = ("lost", "back", "dropped")
"""Kinds of moments about the connection, which are always shown."""

RECONNECT_AFTER: Final = (0.5, 1.0, 2.0, 5.0)
"""Seconds before each try to reconnect; the last value repeats."""

POLL_EVERY: Final = 1.0
MOST_POLLED: Final = 1000
"""Events between two polls; beyond that the oldest are skipped."""


# -- the command -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MomentFilter:
    """A filter of moments. An empty field lets all of them through."""

    sources: tuple[str, ...] = ()
    statuses: tuple[str, ...] = ()
    subjects: tuple[str, ...] = ()

    def __call__(self, moment: Moment) -> bool:
        kind, fields = moment
        if kind in CONNECTION:
            return True
        named = {"source": self.sources, "outcome": self.statuses, "subject": self.subjects}
        return all(not values or fields.get(name) in values for name, values in named.items())


@click.command("tail")
@click.option(
    "--source", "sources", multiple=True, metavar="NAME", shell_complete=complete_source,
    help="Only of this source; may be repeated.",
)  # fmt: skip
@click.option(
    "--status",
    "statuses",
    multiple=True,
    type=click.Choice(["accepted", "duplicate", "conflict", "rejected", "done", "retry", "dead"]),
    help="Only this outcome; may be repeated.",
)
@click.option("--subject", "subjects", multiple=True, help="Only about this subject; may be repeated.")
@click.option("--plain", is_flag=True, help="Plain lines instead of the interactive list.")
@wide_option
@json_lines_option
@asks_api
def tail(api: Api, plain: bool, as_json: bool, **names: Any) -> int:
    """Show arrivals and attempts as they happen, until Ctrl-C.

    On a terminal: j and k move, enter shows, r replays, o opens the dashboard, q ends. When the server goes away, tail
    waits for it.
    """
    is_wanted = MomentFilter(**names)
    feed = open_feed(api)
    with contextlib.suppress(KeyboardInterrupt):
        if not (as_json or plain) and sys.stdin.isatty() and sys.stdout.isatty():
            Screen(api, feed, is_wanted).run()
        else:
            _print(feed, is_wanted, as_json)
    return 0


def _print(feed: Feed, is_wanted: MomentFilter, as_json: bool) -> None:
    say(["watching; Ctrl-C ends"], err=True)
    while True:
        for kind, fields in filter(is_wanted, feed.take(3600)):
            if as_json and kind not in ("lost", "back"):
                say([json_line({"moment": kind, "at": clock.now_utc().isoformat(), **fields})])
            else:
                say([moment_line(kind, fields, read_moment(fields))], err=kind in CONNECTION)
            sys.stdout.flush()


# -- lines -------------------------------------------------------------------------------------


NARROW: Final = 100
"""Columns of a terminal below which names have less room."""


def read_moment(fields: Mapping[str, Any]) -> datetime:
    """Return when a moment happened; now, where it does not say."""
    return datetime.fromisoformat(fields["at"]) if "at" in fields else clock.now_utc()


def moment_line(kind: str, fields: Mapping[str, Any], at: datetime) -> str:
    """Format a moment as a line, by this machine's clock: in columns, and within the terminal."""
    if kind in CONNECTION:
        columns = [_connection(kind, fields)]
    else:
        columns = _COLUMNS[kind](fields) if kind in _COLUMNS else [text(json_line(fields), 200)]
    line = join_columns(at.astimezone().strftime("%H:%M:%S"), *columns)
    width = room()
    return line if width is None else cut(line, width)


def _columns(id: str, fields: Mapping[str, Any], outcome: str, to: str, error: str, *rest: str) -> list[str]:
    """Align what all moments have: id, outcome, source and type, and the destination of an attempt.

    On a terminal the error comes before source and type.
    """
    width = room()
    what = text(f"{fields['source']} {fields.get('type', '')}".rstrip())
    if width is None:
        return [id, what, to, outcome, *rest, error]
    names, reached = (24, 10) if width < NARROW else (34, 18)
    first, to = [_fill(id, 11), _fill(outcome, 9)], _fill(to, reached) if to else ""
    return [*first, to, error, what, *rest] if error else [*first, _fill(what, names), to, *rest]


def _fill(entry: str, width: int) -> str:
    fitting = cut(entry, width)
    return fitting + " " * (width - len(click.unstyle(fitting)))


def _arrival(fields: Mapping[str, Any]) -> list[str]:
    reason = text(f"{fields['reason']} from {fields['peer']}") if "reason" in fields else ""
    counts = ", ".join(f"{n} {word}" for word, n in fields.get("outcomes", {}).items())
    about = (counts, text(fields.get("subject"), 24), _took(fields))
    return _columns(first_id(fields), fields, state(fields["outcome"]), "", reason, *about)


def first_id(fields: Mapping[str, Any]) -> str:
    """Format the event's id; for a batch, the first id and how many more there are."""
    ids = fields.get("event_ids")
    if ids and room() is not None:
        return id_of(ids[0])
    return f"{ids[0]} and {len(ids) - 1} more" if ids else id_of(fields.get("event_id"))


def _attempt(fields: Mapping[str, Any]) -> list[str]:
    failed = fields.get("error") or (f"HTTP {fields['status']}" if fields.get("status") else "")
    is_done = fields["outcome"] == "done"
    return _columns(
        id_of(fields["event_id"]),
        fields,
        state(fields["outcome"], fields.get("note")),
        f"→ {text(fields['destination'])}",
        "" if is_done else text(str(failed).partition("\n")[0], 80),
        "" if is_done and fields["attempt"] == 1 else f"attempt {fields['attempt']}",
        f"run {fields['run']}" if fields.get("run", 1) > 1 else "",
        f"again in {show_duration(round(fields['again_in_s'], 1))}" if "again_in_s" in fields else "",
        _took(fields),
    )


def _took(fields: Mapping[str, Any]) -> str:
    return show_elapsed(fields["duration_s"]) if "duration_s" in fields else ""


def _watermark(fields: Mapping[str, Any]) -> list[str]:
    word = click.style("crossed", fg="red") if fields["crossed"] else click.style("back", fg="green")
    return [f"watermark {text(fields['watermark'])}", word, f"level {fields['level']:,g}, limit {fields['limit']:,g}"]


def _breaker(fields: Mapping[str, Any]) -> list[str]:
    if fields["state"] == "closed":
        return [f"→ {text(fields['destination'])}", click.style("goes on", fg="green"), "its breaker has closed"]
    until = datetime.fromisoformat(fields["until"]).astimezone()
    held = click.style(f"held back until {until:%H:%M:%S}", fg="red")
    return [f"→ {text(fields['destination'])}", held, show_streak(fields["failures"])]


def _connection(kind: str, fields: Mapping[str, Any]) -> str:
    if kind == "back":
        return click.style("connected again; what happened meanwhile is in `oncehook events`", fg="green")
    lost = f"the connection is lost ({text(fields.get('error'), 80)}); trying again"
    return click.style(
        lost if kind == "lost" else f"{count(fields['count'], 'moment')} left out: too many", fg="yellow"
    )


_COLUMNS: Final = {"arrival": _arrival, "attempt": _attempt, "watermark": _watermark, "breaker": _breaker}


# -- feeds -------------------------------------------------------------------------------------


class Feed(Protocol):
    def take(self, seconds: float) -> list[Moment]:
        """Return what has happened since the last call; wait up to `seconds` for the first moment."""


def open_feed(api: Api) -> Feed:
    """Open the feed of this server or store. Raises Unreachable where there is nothing to listen to."""
    from oncehook.cli.transport import HttpTransport

    return StreamFeed(api) if isinstance(api.connect_live(or_read=True), HttpTransport) else PollFeed(api)


class StreamFeed:
    def __init__(self, api: Api) -> None:
        self._api = api
        self._waiting: queue.SimpleQueue[Moment] = queue.SimpleQueue()
        lines = self._listen()  # here, so that a wrong address or token ends the command at once
        threading.Thread(target=self._read, args=(lines,), daemon=True).start()

    def take(self, seconds: float) -> list[Moment]:
        found = []
        try:
            found.append(self._waiting.get(timeout=seconds))
            while True:
                found.append(self._waiting.get_nowait())
        except queue.Empty:
            return found

    def _listen(self) -> Iterator[bytes]:
        transport: HttpTransport = self._api.transport  # type: ignore[assignment]
        try:
            response, lines = transport.listen(PREFIX + "stream")
        except OSError as error:
            raise no_answer(transport, error) from error
        self._api.check(response)
        return lines

    def _read(self, lines: Iterator[bytes]) -> None:
        while True:
            why = "the server has stopped"
            try:
                for moment in decode_events(lines):
                    self._waiting.put(moment)
            except OSError as error:
                why = str(error)
            self._waiting.put(("lost", {"error": why}))
            lines = self._reconnect()
            self._waiting.put(("back", {}))

    def _reconnect(self) -> Iterator[bytes]:
        tries = 0
        while True:
            threading.Event().wait(RECONNECT_AFTER[min(tries, len(RECONNECT_AFTER) - 1)])
            tries += 1
            with contextlib.suppress(Failed, OncehookError):
                self._api.connect_live()
                return self._listen()


def decode_events(lines: Iterator[bytes]) -> Iterator[Moment]:
    """Decode moments from server-sent events. Skips other lines."""
    kind, data = "", b""
    for line in lines:
        name, _, value = line.partition(b": ")
        if name == b"event":
            kind = value.decode()
        elif name == b"data":
            data += value
        elif not line and data:
            yield kind, json.loads(data)
        if not line:
            kind, data = "", b""


class PollFeed:
    """Moments found by comparing the latest events and deliveries with those of a second ago."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._newest = ""
        self._before: dict[str, tuple[str, int, int]] | None = None
        self._at = clock.steady()
        self._poll()

    def take(self, seconds: float) -> list[Moment]:
        due = self._at + POLL_EVERY - clock.steady()
        self._api.transport.sleep(max(min(seconds, due), 0.0))
        if due > seconds:
            return []
        self._at = clock.steady()
        return self._poll()

    def _poll(self) -> list[Moment]:
        return [*self._arrivals(), *self._attempts()]

    def _arrivals(self) -> list[Moment]:
        new = []
        for event in self._api.pages("events", most=MOST_POLLED if self._newest else 1):
            if event["id"] <= self._newest:
                break
            new.append(event)
        is_first, self._newest = not self._newest, new[0]["id"] if new else self._newest or "evt_"
        names = ("source", "type", "key", "subject")
        return [
            ("arrival", {"outcome": "accepted", "event_id": one["id"], **{name: one[name] for name in names}})
            for one in reversed([] if is_first else new)
        ]

    def _attempts(self) -> list[Moment]:
        """Return the last attempts of those deliveries that have made one within the last second."""
        latest = self._api.get("deliveries", limit=200)["items"]
        now = {one["id"]: (one["status"], one["run"], one["attempts"]) for one in latest}
        before, self._before = self._before, now
        if before is None:
            return []
        ended = [one for one in reversed(latest) if one["attempts"] and one["status"] != "leased"]
        return [_attempt_of(one) for one in ended if _attempt_before(before, one) != now[one["id"]][1:]]


def _attempt_before(before: dict[str, tuple[str, int, int]], delivery: dict[str, Any]) -> tuple[int, int] | None:
    status, run, attempts = before.get(delivery["id"], ("", 0, 0))
    # A leased delivery counts the attempt that runs now; that attempt is shown when it has ended.
    return None if status == "leased" else (run, attempts)


def _attempt_of(delivery: dict[str, Any]) -> Moment:
    names = ("event_id", "source", "destination", "type", "subject", "run", "category", "note")
    return "attempt", {
        **{name: delivery[name] for name in names if delivery[name] is not None},
        "outcome": "retry" if delivery["status"] == "pending" else delivery["status"],
        "delivery_id": delivery["id"],
        "attempt": delivery["attempts"],
        "status": delivery["last_status"],
        "error": delivery["last_error"],
    }


# -- the list on a terminal --------------------------------------------------------------------

KEPT: Final = 500
TICK: Final = 0.1
"""Seconds between two looks at the keyboard."""

KEYS: Final = {"\x1b[A": "k", "\x1b[B": "j", "\r": "\n", "\x03": "q", "\x04": "q"}
HELP: Final = "j k move   enter show   r replay   o open   q quit"


class Screen:
    """A list that grows at its end, with keys to move and act. It scrolls to the newest until a line is chosen.

    The terminal is read key by key and redrawn on change. A replay needs a second key to confirm it.
    """

    def __init__(self, api: Api, feed: Feed, is_wanted: Callable[[Moment], bool]) -> None:
        self._api, self._feed, self._is_wanted = api, feed, is_wanted
        self._rows: deque[tuple[dict[str, Any], str]] = deque(maxlen=KEPT)
        self._chosen: int | None = None
        """Position counted from the newest; None follows the newest."""
        self._message = ""
        self._plan: dict[str, Any] | None = None
        """The replay that y confirms."""
        self._event: list[str] = []

    def run(self) -> None:
        with _raw_terminal():
            self._draw()
            while True:
                changed = self._listen()
                for key in _read_keys():
                    if key == "q" and not self._event:
                        return
                    self.press(key)
                    changed = True
                if changed:
                    self._draw()

    def _listen(self) -> bool:
        new = [one for one in self._feed.take(TICK) if self._is_wanted(one)]
        for kind, fields in new:
            self._rows.append((fields, moment_line(kind, fields, read_moment(fields))))
        if self._chosen is not None:
            self._chosen = min(self._chosen + len(new), len(self._rows) - 1)  # the same event stays chosen
        return bool(new)

    def press(self, key: str) -> None:
        """Act on a key. An error becomes the line at the bottom."""
        plan, self._plan, self._message = self._plan, None, ""
        try:
            if plan is not None:
                self._message = self._replay(plan) if key == "y" else "nothing was done"
            elif self._event:
                self._event = []
            elif key in "jk" and self._rows:
                self._move(-1 if key == "j" else 1)
            elif key in "\nro" and self._rows:
                self._act(key, self._rows[-1 - (self._chosen or 0)][0])
        except Failed as error:
            self._message = plain(f"{error.message} {error.hint}".strip())

    def _move(self, by: int) -> None:
        place = min((self._chosen or 0) + by, len(self._rows) - 1)
        self._chosen = None if place < 0 or (by < 0 and place == 0) else place

    def _act(self, key: str, fields: dict[str, Any]) -> None:
        event_id = fields.get("event_id") or next(iter(fields.get("event_ids", ())), None)
        if event_id is None:
            self._message = "there is no event behind this line"
        elif key == "o":
            page = at("events", event_id)
            address = self._api.link(page) or "no server is asked here, so there is no page to open"
            is_opened = (
                address.startswith("http") and can_browse() and webbrowser.open(self._api.login_link(f"/{page}"))
            )
            self._message = f"opened {address}" if is_opened else address
        elif key == "\n":
            from oncehook.cli.browse import event_lines

            body = readable(self._api.raw(at("events", event_id, "body")))
            self._event = [*event_lines(self._api.get(at("events", event_id))), "", *body]
        else:
            self._ask(fields.get("delivery_id", event_id))

    def _ask(self, id: str) -> None:
        self._api.check_may_act()
        plan = self._api.post("replays/plan", {"ids": [id]})
        if not plan["total"]:
            self._message = "nothing of it can be replayed now: only what is dead or discarded"
            return
        to = ", ".join(text(one["destination"]) for one in plan["recipients"])
        self._plan, self._message = plan, f"replay {count(plan['total'], 'delivery')} to {to}? [y/N]"

    def _replay(self, plan: dict[str, Any]) -> str:
        key = clock.random_bytes(16).hex()
        if plan["total"] == 1:
            made = self._api.post(at("deliveries", plan["sample"][0]["id"], "replay"), {}, key=key)
        else:
            made = self._api.post("replays", {"plan": plan["plan"]}, key=key)
        return str(made["replay_id"])

    def lines(self, width: int, height: int) -> list[str]:
        """Return the screen's lines: the list or one event, and at the bottom the keys or a message."""
        rows = height - 1
        body = [cut(one, width) for one in self._event[:rows]] if self._event else self._list(width, rows)
        foot = "any key goes back" if self._event else HELP
        bottom = click.style(cut(self._message or foot, width), dim=not self._message)
        return [*body, *[""] * (rows - len(body)), bottom]

    def _list(self, width: int, rows: int) -> list[str]:
        if not self._rows:
            return ["waiting for something to happen"]
        above = max((self._chosen or 0) - rows + 1, 0)
        end = len(self._rows) - above
        drawn = []
        for place in range(max(end - rows, 0), end):
            line = cut(self._rows[place][1], width)
            is_chosen = self._chosen is not None and place == len(self._rows) - 1 - self._chosen
            drawn.append(click.style(click.unstyle(line), reverse=True) if is_chosen else line)
        return drawn

    def _draw(self) -> None:
        size = shutil.get_terminal_size()
        drawn = "\x1b[K\r\n".join(self.lines(size.columns, size.lines))
        if os.environ.get("NO_COLOR"):  # the chosen line is shown in reverse, also without colours
            for code in (*range(30, 38), *range(90, 98), 2):
                drawn = drawn.replace(f"\x1b[{code}m", "")
        sys.stdout.write(f"\x1b[H{drawn}\x1b[K")
        sys.stdout.flush()


@contextlib.contextmanager
def _raw_terminal() -> Iterator[None]:
    """Read the terminal key by key, on a page of its own; restore it whatever happens."""
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


def _read_keys() -> Sequence[str]:
    """Return the keys pressed since the last call. A terminal that is gone ends the list, like q."""
    keyboard = sys.stdin.fileno()
    if not select.select([keyboard], [], [], 0)[0]:
        return ()
    try:
        typed = os.read(keyboard, 64).decode(errors="replace")
    except OSError:
        typed = ""
    if typed in KEYS or typed.startswith("\x1b"):
        return [KEYS.get(typed, typed)]
    return [KEYS.get(one, one) for one in typed or "q"]
