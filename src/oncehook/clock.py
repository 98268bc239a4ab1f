"""The one source of time and chance, so that tests can hold both.

Nothing else in the package imports `time` or `random` (a static test sees to it). Leases, windows and
retries are measured by the *store's* clock; this one serves signatures' timestamps, ids and durations.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

_skew = 0.0

# For tests: a file with the seconds by which this process's wall clock is wrong; it is read each time.
_wrong = os.environ.get("ONCEHOOK_CLOCK")

# The clock that goes on while a laptop sleeps, where the system has one; it never runs backward.
_STEADY = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

_holders = 0
_stopped: float | None = None
held: float | None = None
"""The time of an embedded store, in seconds of `steady`, while a test holds it."""

# Added to it, because it begins with the machine: the demo and tests set it back by more than a new machine is old, and
# a moment of 0.0 must mean "long ago".
_ORIGIN = 1e9

perf: Callable[[], float] = time.perf_counter
chance = random.SystemRandom()


def now() -> float:
    """Return the seconds since 1970, by this machine's wall clock."""
    wall = time.time() if _stopped is None else _stopped
    return wall + _skew + (float(Path(_wrong).read_text()) if _wrong else 0.0)


def now_utc() -> datetime:
    return datetime.fromtimestamp(now(), UTC)


def steady() -> float:
    """Return seconds that only ever grow, whatever happens to the wall clock."""
    return time.clock_gettime(_STEADY) + _ORIGIN + _skew


def forward(seconds: float) -> None:
    """Advance all clocks, for tests."""
    global _skew, held
    _skew += seconds
    if held is not None:
        held += seconds


def hold() -> None:
    """Stop the wall clock and the store's, for tests; `steady` goes on, because workers wait by it."""
    global _stopped, _holders, held
    _holders += 1
    if _holders == 1:
        _stopped, held = time.time(), steady()


def release() -> None:
    """Undo one `hold`."""
    global _stopped, _holders, held
    _holders -= 1
    if _holders == 0:
        _stopped = held = None


def random_bytes(count: int) -> bytes:
    return os.urandom(count)


_dice = random.Random()  # noqa: S311 - ids must be unique, not secret
# A forked child must not draw the same numbers as its parent.
os.register_at_fork(after_in_child=_dice.seed)
random_bits: Callable[[int], int] = _dice.getrandbits
