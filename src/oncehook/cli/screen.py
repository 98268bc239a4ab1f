"""`oncehook tail` on a terminal: the latest moments as a list, and single keys to walk through it and to act.

The terminal is read key by key and drawn anew when something has changed; whatever ends it, it is given back as it was.
Nothing is replayed by one key alone: it asks.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import sys
import termios
import tty
import webbrowser
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import click

from oncehook import clock
from oncehook.cli.api import Api, Failed, at
from oncehook.cli.moments import Feed, Moment
from oncehook.cli.showing import count, text
from oncehook.cli.tail import told
from oncehook.logs import plain

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
        from oncehook.cli.show import event_lines
        from oncehook.cli.showing import readable

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
