"""Tells a person how far the benchmark is: a bar that moves on a terminal, plain lines elsewhere.

Talk goes to stderr, so that stdout holds nothing but the report. Called by `bench.ingest`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

_WIDTH = 24


class Progress:
    """Counts the steps of a run."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._step = 0
        self._moving = sys.stderr.isatty()

    def step(self, title: str) -> Callable[[float], None]:
        """Begin the next step; the function it returns moves its bar, from 0 to 1."""
        self._step += 1
        place = f"[{self._step:>3}/{self._steps}]"
        if not self._moving:
            self._line(f"{place} {title}")
            return lambda share: None

        def move(share: float) -> None:
            filled = round(share * _WIDTH)
            bar = "█" * filled + "·" * (_WIDTH - filled)
            sys.stderr.write(f"\r\x1b[2K{place} {bar} {share:>4.0%}  {title}")
            sys.stderr.flush()

        move(0.0)
        return move

    def result(self, text: str) -> None:
        """Show the result of the step."""
        self._line(f"          {text}")

    def _line(self, text: str) -> None:
        sys.stderr.write(f"\r\x1b[2K{text}\n" if self._moving else f"{text}\n")
        sys.stderr.flush()
