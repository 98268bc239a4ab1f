"""Printed answers: aligned tables, fields, moments and a progress bar; untrusted text cannot move the cursor.

Commands hand in the API's own fields and print the lines that come back. Click adds colour: on a terminal only, never
with NO_COLOR.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import click

from oncehook import clock
from oncehook.cli.options import voice
from oncehook.human import show_duration, show_moment
from oncehook.logs import plain

COLORS: Final = {
    "done": "green",
    "accepted": "green",
    "pending": "blue",
    "leased": "cyan",
    "running": "cyan",
    "retry": "yellow",
    "paused": "yellow",
    "duplicate": "blue",
    "conflict": "magenta",
    "dead": "red",
    "crashed": "red",
    "aborted": "red",
    "failing": "yellow",
    "held back": "red",
}
WIDEST: Final = 48
"""Characters of untrusted text in a column."""


def say(lines: Iterable[str], *, err: bool = False) -> None:
    """Print lines: data on stdout, messages on stderr, and no messages with -q."""
    if err and voice.quiet:
        return
    for one in lines:
        click.echo(one, err=err)


def answer(value: object, lines: Iterable[str], *, as_json: bool) -> int:
    """Print a command's answer on stdout, as one JSON document or for people, and return the exit code of success."""
    say([document(value)] if as_json else lines)
    return 0


def document(value: object, *, sort: bool = False) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False, sort_keys=sort)


def json_line(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


# -- values ------------------------------------------------------------------------------------


def text(value: object, widest: int = WIDEST) -> str:
    """Format untrusted text as one line of limited length; nothing in it moves the cursor (S35)."""
    shown = plain("" if value is None else str(value))
    return shown if len(shown) <= widest else f"{shown[: widest - 1]}…"


def moment(value: str | None) -> str:
    """Format the API's time as a query takes it: UTC, to the second."""
    return show_moment(datetime.fromisoformat(value), "seconds") if value else ""


def next_moment(value: str | None) -> str:
    """Format a time to come, and how long it is until then."""
    if not value:
        return ""
    left = (datetime.fromisoformat(value) - clock.now_utc()).total_seconds()
    return f"{moment(value)} ({f'in {show_duration(round(left))}' if left >= 1 else 'now'})"


def state(word: str, note: str | None = None) -> str:
    return click.style(word + (f" ({note})" if note else ""), fg=COLORS.get(word))


def show_counts(numbers: Mapping[str, int], words: Iterable[str] | None = None) -> str:
    """Format the counts that are not zero: `3 done, 1 dead`."""
    return ", ".join(f"{numbers[word]:,} {word}" for word in words or numbers if numbers.get(word))


def readable(body: bytes, *, sort: bool = False) -> list[str]:
    """Format an untrusted body: JSON indented, other text as is, bytes as hexadecimal. `sort` orders JSON's keys."""
    try:
        decoded = body.decode()
    except UnicodeDecodeError:
        return [body[at : at + 32].hex(" ") for at in range(0, len(body), 32)]
    try:
        parsed: Any = json.loads(decoded)
    except (ValueError, RecursionError):
        return [plain(one) for one in decoded.splitlines()]
    return [plain(one) for one in document(parsed, sort=sort).splitlines()]


# -- layout ------------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Iterable[Sequence[str]], indent: str = "") -> list[str]:
    """Align rows below a header, which may be empty."""
    lines = [*([[click.style(name, dim=True) for name in head]] if head else []), *rows]
    widths = [max(len(click.unstyle(entry)) for entry in column) for column in zip(*lines, strict=True)]
    return [indent + _pad(row, widths) for row in lines]


def _pad(row: Sequence[str], widths: Sequence[int]) -> str:
    padded = [entry + " " * (width - len(click.unstyle(entry))) for entry, width in zip(row, widths, strict=True)]
    return "  ".join(padded).rstrip()


def fields(pairs: Mapping[str, str], indent: str = "") -> list[str]:
    """Format names and values line by line, without empty ones."""
    return table((), [(click.style(name, dim=True), value) for name, value in pairs.items() if value], indent)


def join_columns(*parts: str) -> str:
    """Join the parts that are not empty as columns of one line."""
    return "  ".join(part for part in parts if part)


# -- progress ----------------------------------------------------------------------------------


class Progress:
    """A bar for long work: on stderr, on a terminal only, never with -q; removed when the work is done.

    `with Progress("importing", total) as bar: bar.add(500)`. Without a total it counts.
    """

    WIDTH: Final = 24
    PAUSE: Final = 0.1
    """Seconds between two drawings."""

    def __init__(self, what: str, total: int | None = None, unit: str = "") -> None:
        self.done = 0
        self._what, self._total, self._unit = what, total, unit
        self._shown = sys.stderr.isatty() and not voice.quiet
        self._began = self._drawn = clock.perf()

    def __enter__(self) -> Progress:
        self._draw()
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def add(self, more: int = 0) -> None:
        """Add to what is done; 0 redraws the bar."""
        self.reach(self.done + more)

    def reach(self, done: int, total: int | None = None) -> None:
        """Set how much is done, and the total where it is known by now."""
        self.done = done
        self._total = total or self._total
        if clock.perf() - self._drawn >= self.PAUSE:
            self._draw()

    def clear(self) -> None:
        """Remove the bar, so that a line can be printed."""
        if self._shown:
            click.echo("\r\x1b[K", nl=False, err=True)

    def line(self) -> str:
        spent = clock.perf() - self._began
        if not self._total:
            return join_columns(self._what, f"{self.done:,} {self._unit}".rstrip(), show_duration(round(spent)))
        part = min(self.done / self._total, 1.0)
        bar = f"[{'#' * round(part * self.WIDTH):.<{self.WIDTH}}] {part:4.0%}"
        left = f"{show_duration(round(spent / part - spent))} left" if part and spent > 1 else ""
        return join_columns(self._what, bar, f"{self.done:,}/{self._total:,} {self._unit}".rstrip(), left)

    def _draw(self) -> None:
        self._drawn = clock.perf()
        if self._shown:
            click.echo(f"\r\x1b[K{self.line()}", nl=False, err=True)
