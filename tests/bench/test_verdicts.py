"""What follows from rounds of A, B and A again: ratio, noise, and a verdict only where it can be given."""

from __future__ import annotations

import math
import random

import pytest
from bench.verdicts import CPU, MIN_ROUNDS, Comparison, Goal, Spread, compare

QUIET = [0.1] * 15
SAME = [100.0] * 5
NOISE = [97.0, 104.0, 100.0, 101.0, 99.0]
"""The second A, where the first is 100."""


def judge(
    ratios: list[float], measure: str = CPU, *, noise: list[float] | None = None, goal: Goal | None = None
) -> Comparison:
    """Compare rounds in which B by A is so much."""
    again = noise or NOISE[: len(ratios)]
    ours = [ratio * (100.0 + second) / 2 for ratio, second in zip(ratios, again, strict=True)]
    return compare(measure, SAME[: len(ratios)], ours, again, others_cores=QUIET, goal=goal)


def test_median_and_range() -> None:
    assert Spread.of([3.0, 1.0, 9.0]) == Spread(3.0, 1.0, 9.0)
    assert Spread.of([4.0, 1.0, 2.0, 9.0]).median == 3.0


def test_the_sentence_has_ratio_noise_and_verdict() -> None:
    found = judge([0.62, 0.60, 0.65, 0.61, 0.63])
    assert str(found) == "0.62× (0.60–0.65); noise 0.97–1.04: less CPU"
    assert found.a == Spread(100.0, 97.0, 104.0)


def test_b_is_divided_by_both_a_of_its_round() -> None:
    # The machine is slower from round to round: B and both A of a round are slow together.
    found = compare(CPU, [100.0, 200.0], [90.0, 180.0], [80.0, 160.0], others_cores=QUIET)
    assert found.ratio == Spread(1.0, 1.0, 1.0)
    assert found.noise == Spread(0.8, 0.8, 0.8)


@pytest.mark.parametrize(
    ("measure", "less", "more"),
    [(CPU, "less CPU", "more CPU"), ("events/s", "slower", "faster"), ("p50 ms", "faster", "slower")],
)
def test_of_rates_more_is_better_of_everything_else_less(measure: str, less: str, more: str) -> None:
    assert judge([0.8] * 5, measure).verdict == less
    assert judge([1.2] * 5, measure).verdict == more


def test_what_the_same_program_also_does_is_no_difference() -> None:
    assert judge([1.03] * 5).verdict == "within the noise"
    assert judge([1.05] * 5).verdict == "more CPU"
    assert judge([1.05] * 5, noise=[90.0, 110.0, 100.0, 100.0, 100.0]).verdict == "within the noise"


def test_rounds_that_disagree_are_not_judged() -> None:
    assert judge([1.3, 1.3, 1.3, 1.3, 0.99]).verdict == "no verdict: the rounds disagree"


def test_fewer_than_five_rounds_give_figures_only() -> None:
    found = judge([0.5] * (MIN_ROUNDS - 1))
    assert str(found).endswith("0.50× (0.50–0.50); noise 0.97–1.04: no verdict: 4 rounds, 5 are needed")
    assert judge([0.5], goal=Goal(0.6, at_most=True)).verdict == "no verdict: 1 round, 5 are needed"


def test_busy_neighbours_leave_no_verdict_a_short_burst_does() -> None:
    def among(others: list[float]) -> str:
        return compare(CPU, SAME, [50.0] * 5, NOISE, others_cores=others).verdict

    assert among([0.7] * 15) == "no verdict: neighbours kept 0.7 cores busy"
    assert among([*[0.1] * 12, *[1.9] * 3]) == "less CPU"


@pytest.mark.parametrize(
    ("goal", "ratios", "verdict"),
    [
        (Goal(4.0), [4.1, 4.2, 4.0, 4.3, 5.0], "reached"),
        (Goal(4.0), [3.1, 3.2, 3.0, 3.3, 3.9], "missed"),
        (Goal(4.0), [3.9, 4.2, 4.1, 4.3, 5.0], "reached by the median, reached in 4 of 5 rounds"),
        (Goal(4.0), [3.9, 3.8, 3.7, 4.3, 5.0], "missed by the median, reached in 2 of 5 rounds"),
        (Goal(0.6, at_most=True), [0.5, 0.6, 0.55, 0.4, 0.5], "reached"),
        (Goal(0.6, at_most=True), [0.7, 0.9, 0.65, 0.8, 0.7], "missed"),
    ],
)
def test_a_goal_is_judged_by_the_median_and_the_rounds_are_counted(
    goal: Goal, ratios: list[float], verdict: str
) -> None:
    found = judge(ratios, goal=goal)
    assert found.verdict == verdict
    assert f"; goal {'≤' if goal.at_most else '≥'} {goal.limit:g}×: {verdict}" in str(found)


def test_nothing_has_no_ratio() -> None:
    found = compare(CPU, [0.0] * 5, [1.0] * 5, [0.0] * 5, others_cores=QUIET)
    assert (found.ratio, str(found)) == (None, "no ratio: A is nothing")


@pytest.mark.parametrize("scatter", [0.03, 0.3])
def test_a_program_is_seldom_called_different_from_itself(scatter: float) -> None:
    chance = random.Random(19)

    def rounds(factor: float = 1.0) -> list[float]:
        return [factor * chance.lognormvariate(0, scatter) for _ in range(MIN_ROUNDS)]

    def share(factor: float) -> float:
        found = [compare(CPU, rounds(), rounds(factor), rounds(), others_cores=QUIET) for _ in range(2_000)]
        return sum(one.verdict.endswith("CPU") for one in found) / len(found)

    assert share(1.0) < 0.03
    assert share(math.exp(5 * scatter)) > 0.9
