"""How answers of the API look to people: aligned columns, moments, spans, and no way for a stranger's text to act up.

Commands hand in the API's own fields and print what comes back. Colour is click's: on a terminal only, never with
NO_COLOR.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Final

import click

from oncehook import clock
from oncehook.cli.options import voice
from oncehook.human import words
from oncehook.logs import plain

WIDTH: Final = 24
PAUSE: Final = 0.1
"""Seconds between two drawings."""


class Progress:
    """How far something is."""

    def __init__(self, what: str, total: int | None = None, unit: str = "") -> None:
        self.done = 0
        self._what, self._total, self._unit = what, total, unit
        self._shown = sys.stderr.isatty() and not voice.quiet
        self._began = self._drawn = clock.perf()

    def __enter__(self) -> Progress:
        self._draw()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.clear()

    def add(self, more: int = 0) -> None:
        """So much more is done; nothing more: only show that it is still going on."""
        self.reach(self.done + more)

    def reach(self, done: int, total: int | None = None) -> None:
        """So much is done, of so much if that is known by now."""
        self.done = done
        self._total = total or self._total
        if clock.perf() - self._drawn >= PAUSE:
            self._draw()

    def clear(self) -> None:
        """Take the bar away, so that a line can be said."""
        if self._shown:
            click.echo("\r\x1b[K", nl=False, err=True)

    def line(self) -> str:
        """What is drawn."""
        spent = clock.perf() - self._began
        if not self._total:
            return f"{self._what}  {self.done:,} {self._unit}".rstrip() + f"  {words(round(spent))}"
        part = min(self.done / self._total, 1.0)
        bar = "#" * round(part * WIDTH)
        left = f"  {words(round(spent / part - spent))} left" if part and spent > 1 else ""
        return (
            f"{self._what}  [{bar:.<{WIDTH}}] {part:4.0%}  {self.done:,}/{self._total:,} {self._unit}".rstrip() + left
        )

    def _draw(self) -> None:
        self._drawn = clock.perf()
        if self._shown:
            click.echo(f"\r\x1b[K{self.line()}", nl=False, err=True)


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
"""Characters of a stranger's text in a column."""


def document(value: object, *, sort: bool = False) -> str:
    """One JSON document."""
    return json.dumps(value, indent=2, ensure_ascii=False, sort_keys=sort)


def line(value: object) -> str:
    """One JSON object on one line."""
    return json.dumps(value, ensure_ascii=False)


def text(value: object, widest: int = WIDEST) -> str:
    """A stranger's text for one line: nothing in it moves the cursor (S35), and it is cut where it is long."""
    said = plain("" if value is None else str(value))
    return said if len(said) <= widest else f"{said[: widest - 1]}…"


def moment(value: str | None) -> str:
    """A moment as it can also be written in a query: UTC, to the second."""
    if not value:
        return ""
    return datetime.fromisoformat(value).astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def next_moment(value: str | None) -> str:
    """A moment to come, with the time until then."""
    if not value:
        return ""
    left = (datetime.fromisoformat(value) - clock.now_utc()).total_seconds()
    return f"{moment(value)} ({f'in {words(round(left))}' if left >= 1 else 'now'})"


def count(number: int, one: str, many: str = "") -> str:
    """`1 delivery`, `1,204 deliveries`."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def state(word: str, note: str | None = None) -> str:
    """A word for how something stands, in its colour."""
    return click.style(word + (f" ({note})" if note else ""), fg=COLORS.get(word))


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Rows below a head, each column as wide as its widest entry."""
    lines = [[click.style(name, dim=True) for name in head], *rows]
    widths = [max(len(click.unstyle(row[column])) for row in lines) for column in range(len(head))]
    return [_aligned(row, widths) for row in lines]


def fields(pairs: Mapping[str, str], indent: str = "") -> list[str]:
    """Names and values below one another; what is empty is left out."""
    said = {name: value for name, value in pairs.items() if value}
    width = max((len(name) for name in said), default=0)
    return [f"{indent}{click.style(name.ljust(width), dim=True)}  {value}" for name, value in said.items()]


def _aligned(row: Sequence[str], widths: Sequence[int]) -> str:
    padded = [entry + " " * (width - len(click.unstyle(entry))) for entry, width in zip(row, widths, strict=True)]
    return "  ".join(padded).rstrip()


def say(lines: Iterable[str], *, err: bool = False) -> None:
    """Print lines: data on stdout, talk on stderr, and no talk with -q."""
    if err and voice.quiet:
        return
    for one in lines:
        click.echo(one, err=err)


def readable(body: bytes, *, sort: bool = False) -> list[str]:
    """A stranger's body for people: JSON indented, other text as it is, bytes as hexadecimal; nothing acts up.

    With `sort` the keys of JSON come in one order, to be compared.
    """
    try:
        said = body.decode()
    except UnicodeDecodeError:
        return [body[at : at + 32].hex(" ") for at in range(0, len(body), 32)]
    try:
        parsed: Any = json.loads(said)
    except (ValueError, RecursionError):
        return [plain(one) for one in said.splitlines()]
    return [plain(one) for one in document(parsed, sort=sort).splitlines()]
