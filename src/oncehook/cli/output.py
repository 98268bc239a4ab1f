"""Printed answers: aligned tables, fields, moments and a progress bar; untrusted text cannot move the cursor.

Commands hand in the API's own fields and print the lines that come back. On a terminal tables fit its width: short ids,
relative times, long cells cut, columns left out; in a pipe and with --wide everything is printed in full. Click adds
colour: on a terminal only, never with NO_COLOR.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple

import click

from oncehook import clock
from oncehook.cli.options import voice
from oncehook.human import replay_state, show_ago, show_duration, show_id, show_moment
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
    "failed": "red",
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


def can_browse() -> bool:
    """Tell whether a browser can be opened: there is a screen, and somebody in front of it.

    Without a screen, a text browser would take over the terminal.
    """
    has_screen = sys.platform == "darwin" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
    return has_screen and sys.stderr.isatty()


# -- values ------------------------------------------------------------------------------------


def text(value: object, widest: int = WIDEST) -> str:
    """Format untrusted text as one line of limited length; nothing in it moves the cursor (S35)."""
    shown = plain("" if value is None else str(value))
    return shown if len(shown) <= widest else f"{shown[: widest - 1]}…"


def cell(value: object, widest: int = WIDEST) -> str:
    """Format untrusted text for a table: of limited length on a terminal, otherwise in full."""
    return text(value, sys.maxsize if room() is None else widest)


def moment(value: str | None) -> str:
    """Format the API's time as a query takes it: UTC, to the second."""
    return show_moment(datetime.fromisoformat(value), "seconds") if value else ""


def when(value: str | None) -> str:
    """Format a time of the past for a table: how long ago on a terminal, otherwise as `moment`."""
    if not value or room() is None:
        return moment(value)
    return show_ago(datetime.fromisoformat(value), clock.now_utc())


def id_of(value: str | None) -> str:
    """Format an id for a table: short on a terminal, otherwise in full."""
    return "" if not value else value if room() is None else show_id(value)


def next_moment(value: str | None) -> str:
    """Format a time to come, and how long it is until then."""
    if not value:
        return ""
    left = (datetime.fromisoformat(value) - clock.now_utc()).total_seconds()
    until = f"in {show_duration(round(left))}" if left >= 1 else "now"
    return f"{moment(value)} ({until})" if room() is None else until


def state(word: str, note: str | None = None) -> str:
    return click.style(word + (f" ({note})" if note else ""), fg=COLORS.get(word))


def state_of_replay(replay: Mapping[str, Any]) -> str:
    """Format a replay's state, with the number that failed where it was not all of them."""
    word = replay_state(replay["state"], replay["planned"], replay["dead"], replay["skipped"])
    return click.style(f"{replay['dead']:,} failed", fg="yellow") if word == "partly" else state(word)


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


class TableColumn(NamedTuple):
    """A column that may give way on a narrow terminal."""

    name: str
    least: int | None = None
    """The width to which it may be cut; None: never cut."""
    spare: int = 0
    """Columns of a higher number are left out first; 0: never left out."""
    comfortable: int = 0
    """The width below which it is not cut before columns of a higher number are left out."""
    is_main: bool = False
    """Cut after all other columns, except below their headers, and in the middle: a cause ends with its place."""


def room(*, err: bool = False) -> int | None:
    """Return the width that tables on stdout, or messages on stderr, must fit; None where they are printed in full."""
    stream = sys.stderr if err else sys.stdout
    if voice.wide or not stream.isatty():
        return None
    try:  # of stderr, where stdout is no terminal
        size = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError):
        size = os.terminal_size((0, 0))
    return shutil.get_terminal_size((size.columns or 80, size.lines or 24)).columns


def table(
    head: Sequence[str | TableColumn], rows: Iterable[Sequence[str]], indent: str = "", width: int | None = None
) -> list[str]:
    """Align rows below a header, within `width` or the terminal's; without a header they are never cut."""
    body = [list(row) for row in rows]
    columns = [TableColumn(one) if isinstance(one, str) else one for one in head]
    names = [[click.style(one.name, dim=True) for one in columns]] if any(one.name for one in columns) else []
    lines = [*names, *body]
    if not lines:
        return []
    widths = [max(map(_length, column)) for column in zip(*lines, strict=True)]
    limit = room() if width is None else width
    if limit is None or not head:
        return [indent + _pad(line, widths) for line in lines]
    limit -= len(indent)
    used = [n for n in range(len(columns)) if any(row[n] for row in body)]
    kept = _fit(columns, widths, used, limit)
    shown = [[(_cut_middle if columns[n].is_main else cut)(line[n], widths[n]) for n in kept] for line in lines]
    return [indent + cut(_pad(line, [widths[n] for n in kept]), limit) for line in shown]


def _fit(columns: Sequence[TableColumn], widths: list[int], kept: list[int], limit: int) -> list[int]:
    """Return those columns that there is room for, and cut the widths of those that may be cut."""
    least = [width if one.least is None else min(one.least, width) for one, width in zip(columns, widths, strict=True)]
    # A header is cut only when the main column cannot be cut further.
    headed = [
        small if one.is_main else max(small, min(len(one.name), width))
        for one, small, width in zip(columns, least, widths, strict=True)
    ]

    def excess(sizes: Sequence[int]) -> int:
        return sum(sizes[n] for n in kept) + 2 * (len(kept) - 1) - limit

    def wanted() -> list[int]:
        last = max((columns[n].spare for n in kept), default=0)
        return [
            width if one.is_main else max(small, min(one.comfortable, width)) if one.spare < last else small
            for one, width, small in zip(columns, widths, headed, strict=True)
        ]

    while excess(wanted()) > 0 and any(columns[n].spare for n in kept):
        kept.remove(max(kept, key=lambda n: columns[n].spare))
    for smallest in (headed, least):
        while excess(widths) > 0 and (cuttable := [n for n in kept if widths[n] > smallest[n]]):
            widths[max(cuttable, key=lambda n: (not columns[n].is_main, widths[n]))] -= 1
    return kept


_CODE: Final = re.compile(r"(\x1b\[[0-9;]*m)")


def cut(line: str, width: int) -> str:
    """Cut a line to a width; colours stay, and end where the line does."""
    if _length(line) <= width:
        return line
    kept, left = [], max(width - 1, 0)
    for piece in _CODE.split(line):
        if _CODE.fullmatch(piece):
            kept.append(piece)
        elif left:
            kept.append(piece[:left] if len(piece) < left else piece[:left] + ("…" if width else ""))
            left -= min(len(piece), left)
    return "".join(kept)


def _cut_middle(entry: str, width: int) -> str:
    end = width // 3
    is_whole = _length(entry) <= width or _CODE.search(entry)
    return cut(entry, width) if is_whole else f"{entry[: width - end - 1]}…{entry[-end:]}"


def _length(entry: str) -> int:
    return len(click.unstyle(entry))


def _pad(row: Sequence[str], widths: Sequence[int]) -> str:
    padded = [entry + " " * (width - _length(entry)) for entry, width in zip(row, widths, strict=True)]
    return "  ".join(padded).rstrip()


def fields(pairs: Mapping[str, str], indent: str = "") -> list[str]:
    """Format names and values line by line, without empty ones."""
    return table((), [(click.style(name, dim=True), value) for name, value in pairs.items() if value], indent)


_COMMAND: Final = re.compile(r"`[^`]+`|(?:^|(?<=: ))(?:oncehook|export|openssl) .+?(?=[.;,]?$|[.;,] )")
"""A command to be copied: in backticks, or by itself at the start or after a colon."""
_KEPT_SPACE: Final = "\xa0"


def sentence(words: str, first: str = "", indent: str = "", *, err: bool = False) -> list[str]:
    """Break a sentence between words where the terminal ends: `first` begins it, `indent` its further lines.

    A command to be copied stays whole. `err`: it is printed on stderr.
    """
    width = room(err=err)
    if width is None:
        return [first + words]
    start = _length(first)
    lines = textwrap.wrap(
        _COMMAND.sub(lambda found: found[0].replace(" ", _KEPT_SPACE), words),
        width,
        initial_indent=" " * start,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    if not lines:
        return [first]
    lines = [line.replace(_KEPT_SPACE, " ") for line in lines]
    return [first + lines[0][start:], *lines[1:]]


def message(words: str, first: str = "") -> list[str]:
    """Break each line of a message on stderr between words; further lines begin below the words of the first."""
    if room(err=True) is None:
        return [first + words]
    lines = []
    for n, line in enumerate(words.split("\n")):
        said = line.lstrip(" ")
        lead = ("" if n else first) + " " * (len(line) - len(said))
        lines += sentence(said, lead, " " * (len(lead) or len(first)), err=True)
    return lines


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
