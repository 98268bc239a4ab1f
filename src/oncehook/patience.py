"""How long a sender waits for its answer: its source's budget, and no longer (R9).

A timer for every arrival would be one of the dearest things in its path. Instead all that wait for the same time stand
in one line, oldest first, and one timer looks at the front of every line; while nobody waits there is none.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from oncehook.errors import StoreUnavailable
from oncehook.store.base import Pending

STEP: Final = 0.02
"""Seconds between two looks. An answer is due one step before the budget ends, so that it is never late."""


class Patience:
    """Watches over the arrivals of one receiver, on one loop."""

    def __init__(self) -> None:
        self._lines: dict[float, deque[tuple[float, Pending]]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, pending: Pending, budget: float) -> None:
        """Give up on this arrival when its budget is spent."""
        loop = pending.future.get_loop()  # asking which one is running would cost a system call
        line = self._lines.get(budget)
        if line is None:
            line = self._lines[budget] = deque()
        line.append((loop.time() + budget - STEP, pending))
        if self._timer is None:
            self._timer = loop.call_later(STEP, self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        waiting = False
        for line in self._lines.values():
            while line and (line[0][1].future.done() or line[0][0] <= now):
                _give_up(line.popleft()[1])
            waiting = waiting or bool(line)
        self._timer = loop.call_later(STEP, self._look, loop) if waiting else None


def _give_up(pending: Pending) -> None:
    """What the writer has not taken yet is withdrawn; what it has, the key will tell at the sender's next try."""
    if not pending.future.done():
        pending.abandoned = True
        pending.future.set_exception(StoreUnavailable("The store did not answer within this source's budget."))
