"""The wait before the next attempt: one retry policy, for deliveries and for every sender.

A policy is a formula (base, factor, cap, jitter) or a list of waits. `quick` and `durable` have names. Randomness is
passed in, so that tests can fix it; the result is finite and never negative for any attempt number (R38).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from oncehook import clock
from oncehook.errors import ConfigError
from oncehook.human import seconds

Chance = Callable[[], float]
"""A number in [0, 1)."""

LONGEST: Final = 7 * 86_400.0
"""The longest wait in seconds, whatever a formula or a destination says."""


@dataclass(frozen=True, slots=True)
class Policy:
    """Policy of retries: when to try again, and when to give up."""

    attempts: int
    """Attempts in all, including the first."""
    base: float = 0.0
    factor: float = 2.0
    cap: float = LONGEST
    jitter: float | str = "full"
    """`full`: anywhere between 0 and the wait; `none`; or the most seconds that are added."""
    waits: Sequence[float] = ()
    """Explicit waits instead of the formula; at most a tenth is added."""

    def wait(self, attempt: int, chance: Chance = clock.chance.random) -> float | None:
        """Return the seconds to wait after this attempt (1 is the first) has failed; None to give up."""
        if attempt >= self.attempts:
            return None
        if self.waits:
            wait = self.waits[attempt - 1]
            return min(wait + wait * 0.1 * chance(), LONGEST)
        return min(self._formula(attempt, chance), LONGEST)

    def _formula(self, attempt: int, chance: Chance) -> float:
        try:
            full = min(self.cap, self.base * self.factor ** (attempt - 1))
        except OverflowError:  # beyond a float is beyond every cap
            full = self.cap if self.base else 0.0
        if self.jitter == "full":
            return full * chance()
        return full + (0.0 if isinstance(self.jitter, str) else self.jitter * chance())

    def in_words(self) -> Sequence[float]:
        """Return the longest possible waits, as text."""
        return [self.wait(n, lambda: 1.0) or 0.0 for n in range(1, self.attempts)]


QUICK: Final = Policy(attempts=3, base=2.0, factor=2.0, cap=8.0, jitter=0.5)
_DURABLE_WAITS: Final = tuple(map(seconds, ("10s", "1m", "5m", "30m", "2h", "6h", "12h", "24h", "24h")))
DURABLE: Final = Policy(attempts=len(_DURABLE_WAITS) + 1, waits=_DURABLE_WAITS)
NAMED: Final[Mapping[str, Policy]] = {"quick": QUICK, "durable": DURABLE}


def policy(spec: str | Sequence[str | float] | Mapping[str, object] | Policy) -> Policy:
    """Return the policy of a name, a list of waits (n waits are n + 1 attempts) or a table."""
    if isinstance(spec, Policy):
        return spec
    if isinstance(spec, str):
        if spec not in NAMED:
            raise ConfigError(f'{spec!r} is no retry policy; there are "quick" and "durable".')
        return NAMED[spec]
    if isinstance(spec, Mapping):
        from oncehook.settings.read import read_program
        from oncehook.settings.tables import RetrySettings, build_policy

        return build_policy(read_program(RetrySettings, ("retry",), spec))
    waits = tuple(seconds(wait) for wait in spec)
    return Policy(attempts=len(waits) + 1, waits=waits)


def retry_after(text: str | None, now: datetime) -> float | None:
    """Return the seconds of a `Retry-After` header, a number or a date; None when it is unusable."""
    if text is None:
        return None
    if text.strip().isascii() and text.strip().isdigit():
        return min(float(text), LONGEST)
    from email.utils import parsedate_to_datetime

    try:
        moment = parsedate_to_datetime(text)
    except (ValueError, TypeError, IndexError):
        return None
    if moment.tzinfo is None:  # asctime's form, which HTTP still allows: always GMT
        moment = moment.replace(tzinfo=UTC)
    return min(max((moment - now).total_seconds(), 0.0), LONGEST)
