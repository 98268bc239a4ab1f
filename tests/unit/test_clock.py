"""The steady clock on a machine that has only just been started."""

from __future__ import annotations

from oncehook import clock

YEAR = 365 * 86_400.0


def test_a_clock_that_is_set_back_stays_above_zero() -> None:
    """Because 0.0 means "long ago" wherever a moment is kept: on a machine younger than the demo's history, a clock
    below zero would never reach it, and no worker would look for work."""
    clock.forward(-YEAR)
    try:
        assert clock.steady() > 0
    finally:
        clock.forward(YEAR)
