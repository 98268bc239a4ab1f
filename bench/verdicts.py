"""Do two sides differ by more than one of them differs from itself?

A and B are measured in the same rounds, A twice in each: B by A is the ratio, one A by the other is the noise. Pure
arithmetic, used by `bench.pairs`.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

MIN_ROUNDS = 5
"""With five, a program that is compared with itself is called different in 1 or 2 of 100 comparisons."""
NOISY_CORES = 0.3
"""What others may keep busy before nothing is judged."""
CPU = "CPU µs"
"""CPU per event of all processes."""


@dataclass(frozen=True)
class Spread:
    """Median and range."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Summarize one value of each round."""
        return cls(statistics.median(values), min(values), max(values))

    def covers(self, value: float) -> bool:
        """Tell whether a value is inside the range."""
        return self.least <= value <= self.most


@dataclass(frozen=True)
class Goal:
    """What the ratio should be: at least so much, or at most."""

    limit: float
    at_most: bool = False

    def is_reached(self, ratio: float) -> bool:
        """Tell whether a ratio is good enough."""
        return ratio <= self.limit if self.at_most else ratio >= self.limit

    def __str__(self) -> str:
        return f"goal {'≤' if self.at_most else '≥'} {self.limit:g}×"


@dataclass(frozen=True)
class Comparison:
    """One measure of both sides."""

    measure: str
    a: Spread
    b: Spread
    ratio: Spread | None
    """B by the mean of both A of its round; None where A is nothing."""
    noise: Spread | None
    """One A by the other A of its round."""
    goal: Goal | None
    verdict: str

    def __str__(self) -> str:
        if self.ratio is None or self.noise is None:
            return self.verdict
        ratio, noise = (f"{_short(one.least)}–{_short(one.most)}" for one in (self.ratio, self.noise))
        goal = f"; {self.goal}" if self.goal else ""
        return f"{_short(self.ratio.median)}× ({ratio}); noise {noise}{goal}: {self.verdict}"


def compare(
    measure: str,
    a: Sequence[float],
    b: Sequence[float],
    again: Sequence[float],
    *,
    others_cores: Sequence[float],
    goal: Goal | None = None,
) -> Comparison:
    """Compare one value of each round and side; `others_cores` are what others kept busy in each turn."""
    ratios, noise = [], []
    for first, ours, second in zip(a, b, again, strict=True):
        if first > 0 and second > 0:
            ratios.append(2 * ours / (first + second))
            noise.append(second / first)
    sides = Spread.of([*a, *again]), Spread.of(b)
    if not ratios:
        return Comparison(measure, *sides, None, None, goal, "no ratio: A is nothing")
    ratio, spread = Spread.of(ratios), Spread.of(noise)
    verdict = find_doubt(len(ratios), others_cores)
    if verdict is None:
        verdict = _judge(measure, ratio, spread) if goal is None else _judge_goal(goal, ratios)
    return Comparison(measure, *sides, ratio, spread, goal, verdict)


def find_doubt(rounds: int, others_cores: Sequence[float]) -> str | None:
    """Return why nothing can be judged.

    Of the neighbours the median counts: a short burst widens the ranges, and what is inside them is not judged.
    """
    if rounds < MIN_ROUNDS:
        return f"no verdict: {rounds} round{'s' * (rounds != 1)}, {MIN_ROUNDS} are needed"
    if (busy := statistics.median(others_cores)) > NOISY_CORES:
        return f"no verdict: neighbours kept {busy:.1f} cores busy"
    return None


def _judge(measure: str, ratio: Spread, noise: Spread) -> str:
    if noise.covers(ratio.median):
        return "within the noise"
    if ratio.covers(1.0):
        return "no verdict: the rounds disagree"
    is_more = ratio.median > 1
    if measure.startswith("CPU"):
        return "more CPU" if is_more else "less CPU"
    # Of a rate more is better, of a delay less.
    return "faster" if is_more == measure.endswith("/s") else "slower"


def _judge_goal(goal: Goal, ratios: Sequence[float]) -> str:
    reached = sum(map(goal.is_reached, ratios))
    word = "reached" if goal.is_reached(statistics.median(ratios)) else "missed"
    return (
        word if reached in (0, len(ratios)) else f"{word} by the median, reached in {reached} of {len(ratios)} rounds"
    )


def _short(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:.1f}"
