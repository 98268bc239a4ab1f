"""A bar for everything long: on stderr, on a terminal only, never with -q; gone when the work is done.

`with Progress("importing", total) as bar: bar.add(500)`. Without a total it counts. It draws a few times a second at
most, whatever it is told.
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Final

import click

from oncehook import clock
from oncehook.cli.manners import voice
from oncehook.human import words

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
