"""Words for durations, sizes and rates: what can be read, what cannot, and that shown words read back the same."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncehook import human
from oncehook.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0.2s", 0.2),
        ("15s", 15),
        ("5m", 300),
        ("6h", 21_600),
        ("30d", 2_592_000),
        ("1w", 604_800),
        ("500ms", 0.5),
        ("1.5ms", 0.0015),
        ("1h30m", 5_400),
        ("1h 30m", 5_400),
        ("1w2d3h4m5s6ms", 604_800 + 2 * 86_400 + 3 * 3_600 + 4 * 60 + 5.006),
        ("1.1h", 3_960),
        ("0s", 0),
        (15, 15),
        (0.2, 0.2),
        (0, 0),
    ],
)
def test_durations(text: str | float, expected: float) -> None:
    assert human.seconds(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "15",
        "0",
        "s",
        "-5s",
        "+5s",
        "5 s",
        "5S",
        "5M",
        "5min",
        "1e3s",
        ".5s",
        "5.s",
        "30m1h",
        "5s5s",
        "1h30",
        "15s\n5",
        "٣s",
        "off",
        "9" * 40 + "s",
        "inf",
        -1,
        math.inf,
        math.nan,
        True,
        None,
        [],
    ],
)
def test_what_is_no_duration(text: str | float) -> None:
    with pytest.raises(ConfigError, match=r"is not a duration; write for example .*15s"):
        human.seconds(text)


@pytest.mark.parametrize("text", ["36526d", "999999999999999999w", 1e12])
def test_a_duration_that_no_database_could_add_to_a_time(text: str | float) -> None:
    with pytest.raises(ConfigError, match="longer than 100 years"):
        human.seconds(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1MB", 1_000_000),
        ("4MiB", 4_194_304),
        ("64kB", 64_000),
        ("64KB", 64_000),
        ("1MiB", 1_048_576),
        ("1.5 MiB", 1_572_864),
        ("512B", 512),
        ("2GiB", 2 << 30),
        ("1gb", 10**9),
        (4096, 4096),
        (0, 0),
    ],
)
def test_sizes(text: str | int, expected: int) -> None:
    assert human.size(text) == expected


@pytest.mark.parametrize("text", ["", "1024", "1M", "1iB", "MB", "-1MB", "1TB", "1e3B", True, -1, None])
def test_what_is_no_size(text: str | int) -> None:
    with pytest.raises(ConfigError, match=r"is not a size; write for example .*1MiB"):
        human.size(text)


def test_half_a_byte() -> None:
    with pytest.raises(ConfigError, match="whole number of bytes"):
        human.size("0.5B")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("50/s", 50), ("100/m", 100 / 60), ("1000/h", 1000 / 3600), ("0.5/s", 0.5), ("1/d", 1 / 86_400)],
)
def test_rates(text: str, expected: float) -> None:
    assert human.rate(text) == pytest.approx(expected)


@pytest.mark.parametrize("text", ["", "50", "50/", "/s", "50/w", "50/ms", "50 / s", "-1/s", 50, None])
def test_what_is_no_rate(text: str) -> None:
    with pytest.raises(ConfigError, match=r"is not a rate; write for example .*50/s"):
        human.rate(text)


def test_a_rate_that_lets_nothing_through() -> None:
    with pytest.raises(ConfigError, match="nothing through"):
        human.rate("0/s")


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (300, "5m"),
        (5_400, "1h 30m"),
        (0.2, "200ms"),
        (0.0005, "0.5ms"),
        (1.5, "1.5s"),
        (0, "0s"),
        (30 * 86_400, "30d"),
        (248_400, "2d 21h"),
        (90_061.5, "1d 1h 1m 1.5s"),
        (3_599.9999, "1h"),
        (-300, "-5m"),
        (math.inf, "no limit"),
    ],
)
def test_words(seconds: float, expected: str) -> None:
    assert human.show_duration(seconds) == expected


@given(st.integers(0, human.LONGEST * 1000))
def test_words_read_back_the_same(milliseconds: int) -> None:
    assert human.seconds(human.show_duration(milliseconds / 1000)) == pytest.approx(milliseconds / 1000, abs=1e-4)


@given(st.integers(0, human.LARGEST))
def test_sizes_read_back_the_same(count: int) -> None:
    assert human.size(human.show_size(count)) == count


@given(st.text() | st.floats() | st.integers())
def test_nothing_but_a_number_or_a_sentence(text: str | float) -> None:
    for read in (human.seconds, human.size, human.rate):
        said = _number_or_sentence(read, text)
        assert "write for example" in said if isinstance(said, str) else 0 <= said < math.inf


def _number_or_sentence(read: Callable[[Any], float], text: str | float) -> float | str:
    try:
        return read(text)
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize(
    ("number", "noun", "expected"),
    [
        (0, "route", "0 routes"),
        (1, "delivery", "1 delivery"),
        (1_204, "delivery", "1,204 deliveries"),
        (2, "open or dead delivery", "2 open or dead deliveries"),
        (2, "batch", "2 batches"),
        (3, "key", "3 keys"),
    ],
)
def test_counts_have_the_right_plural(number: int, noun: str, expected: str) -> None:
    assert human.count(number, noun) == expected


def test_the_nearest_word_is_suggested_and_otherwise_all() -> None:
    known = ("stripe", "github")
    assert (human.nearest("strip", known), human.nearest("xyz", known)) == ("stripe", None)
    assert human.suggest("strip", known) == 'Did you mean "stripe"?'
    assert human.suggest("xyz", known) == "There are: stripe, github."
    assert human.suggest("xyz", ()) == ""


def test_spans_are_shown_in_one_unit() -> None:
    assert [human.show_elapsed(one) for one in (0.084, 1.25, 90, 200_000)] == ["84 ms", "1.2 s", "1.5 min", "2 days"]


def test_a_moment_is_shown_in_utc() -> None:
    at = datetime(2026, 11, 17, 12, 0, 0, 250_000, tzinfo=timezone(timedelta(hours=2)))
    assert human.show_moment(at) == "2026-11-17T10:00:00.250000Z"
    assert human.show_moment(at, "seconds") == "2026-11-17T10:00:00Z"
    assert human.moment(human.show_moment(at), at) == at


@pytest.mark.parametrize(
    ("state", "dead", "skipped", "shown"),
    [
        ("done", 0, 1, "done"),
        ("done", 3, 0, "failed"),
        ("done", 2, 1, "failed"),
        ("done", 1, 1, "partly"),
        ("running", 2, 0, "running"),
        ("aborted", 2, 0, "aborted"),
    ],
)
def test_a_replay_is_done_only_where_nothing_failed(state: str, dead: int, skipped: int, shown: str) -> None:
    assert human.replay_state(state, 3, dead, skipped) == shown


def test_a_streak_is_of_deliveries() -> None:
    assert [human.show_streak(n) for n in (1, 3, 1200)] == [
        "1 delivery failed", "3 deliveries failed in a row", "1,200 deliveries failed in a row",
    ]  # fmt: skip
