"""One policy for every wait (R38): finite, never negative, within its cap, spread by chance."""

from __future__ import annotations

import math
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncehook.errors import ConfigError
from oncehook.retry import DURABLE, LONGEST, QUICK, Policy, policy, retry_after

NOW = datetime(2026, 11, 15, 12, 0, tzinfo=UTC)


def test_quick_is_the_second_storys_policy() -> None:
    """Three attempts, 2^n seconds and up to half a second more, never above 8."""
    assert [QUICK.wait(n, lambda: 0.0) for n in (1, 2, 3)] == [2.0, 4.0, None]
    assert [QUICK.wait(n, lambda: 1.0) for n in (1, 2)] == [2.5, 4.5]


def test_durable_tries_ten_times_over_69_hours() -> None:
    waits = [DURABLE.wait(n, lambda: 0.0) for n in range(1, 11)]
    assert waits == [10, 60, 300, 1800, 7200, 21600, 43200, 86400, 86400, None]
    assert sum(wait for wait in waits if wait) / 3600 == pytest.approx(68.6, abs=0.1)


def test_a_list_of_waits_gets_a_tenth_of_jitter_at_most() -> None:
    listed = policy(["10s", "1m"])
    assert listed.attempts == 3
    assert [listed.wait(n, lambda: 1.0) for n in (1, 2, 3)] == [11.0, 66.0, None]


@given(
    attempt=st.integers(1, 10**6),
    base=st.floats(0, 1e6),
    factor=st.floats(1, 100),
    cap=st.floats(0, 1e9),
    chance=st.floats(0, 1, exclude_max=True),
)
def test_every_wait_is_finite_and_within_bounds(
    attempt: int, base: float, factor: float, cap: float, chance: float
) -> None:
    wait = Policy(attempts=10**7, base=base, factor=factor, cap=cap).wait(attempt, lambda: chance)
    assert wait is not None
    assert math.isfinite(wait)
    assert 0 <= wait <= min(cap, LONGEST)


def test_full_jitter_spreads_over_the_whole_wait() -> None:
    growing = policy({"attempts": 8, "base": "10s", "factor": 2, "cap": "6h", "jitter": "full"})
    assert growing.wait(3, lambda: 0.0) == 0.0
    assert growing.wait(3, lambda: 0.5) == 20.0
    plain = policy({"attempts": 8, "base": "10s", "jitter": "none"})
    assert plain.wait(2, lambda: 0.9) == 20.0


@pytest.mark.parametrize(
    "spec", ["slow", {"tries": 3}, ["soon"], {"attempts": 0}, {"attempts": "few"}, {"factor": -1}, {"factor": "nan"}]
)
def test_what_is_no_policy_is_refused(spec: object) -> None:
    with pytest.raises(ConfigError):
        policy(spec)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("120", 120.0),
        (" 0 ", 0.0),
        ("Sun, 15 Nov 2026 12:01:00 GMT", 60.0),
        ("Sun, 15 Nov 2026 11:00:00 GMT", 0.0),
        ("Sunday, 15-Nov-26 12:01:00 GMT", 60.0),
        ("Sun Nov 15 12:01:00 2026", 60.0),
        ("99999999999", LONGEST),
        ("soon", None),
        ("-5", None),
        ("٣", None),
        ("", None),
        (None, None),
    ],
)
def test_retry_after_in_both_forms(text: str | None, wanted: float | None) -> None:
    assert retry_after(text, NOW) == wanted


@pytest.mark.parametrize("factor", [2.0, 1e6, 1e300])
def test_a_steep_formula_ends_at_its_cap_for_any_attempt(factor: float) -> None:
    steep = Policy(attempts=10**9, base=1.0, factor=factor, cap=60.0, jitter="none")
    assert [steep.wait(attempt) for attempt in (2000, 10**6)] == [60.0, 60.0]
