"""Makes guessing slow: one count of wrong tokens and passwords for API, dashboard and metrics.

`Access` asks before it says whether a token is right. Addresses are counted as `network_of` groups them.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from oncehook import clock
from oncehook.errors import Refused

MOST_NETWORKS: Final = 1000
"""Whose wrong tokens are remembered."""
TRIES: Final = 5
"""Wrong tokens from one network before it has to wait."""
LONGEST_WAIT: Final = 60.0
ALL_TRIES: Final = 200
"""Wrong tokens from everywhere within a minute: beyond, nobody gets in with one that could be guessed."""


class TooManyTries(Refused):
    """Too many wrong tokens or passwords; wait a little."""

    code = "too_many_tries"
    status = 429

    def __init__(self, seconds: float) -> None:
        super().__init__(hint=f"Try again in {seconds:.0f} s.")
        self.retry_after = seconds


class Throttle:
    """Counts wrong tokens: each beyond the first few doubles the wait of its network."""

    def __init__(self) -> None:
        self._wrong: OrderedDict[str, tuple[int, float]] = OrderedDict()
        self._minute = 0
        self._in_minute = 0

    def check(self, network: str) -> None:
        """Raise TooManyTries while this network, or everybody, has to wait."""
        now = clock.steady()
        tries, last = self._wrong.get(network, (0, now))
        wait = 0.0 if tries < TRIES else min(2.0 ** (tries - TRIES + 1), LONGEST_WAIT) - (now - last)
        if wait <= 0 and self._in_minute >= ALL_TRIES and self._minute == int(now // 60):
            wait = 60 - now % 60
        if wait > 0:
            raise TooManyTries(wait)

    def wrong(self, network: str) -> None:
        """Count one more wrong token."""
        now = clock.steady()
        tries, last = self._wrong.pop(network, (0, now))
        self._wrong[network] = (1 if now - last > 10 * LONGEST_WAIT else tries + 1, now)
        while len(self._wrong) > MOST_NETWORKS:
            self._wrong.popitem(last=False)
        minute = int(now // 60)
        self._minute, self._in_minute = minute, (self._in_minute if minute == self._minute else 0) + 1

    def right(self, network: str) -> None:
        """Forget the wrong ones: it was the right one."""
        self._wrong.pop(network, None)
