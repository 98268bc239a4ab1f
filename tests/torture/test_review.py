"""The numbers of the security review, repeated in a bounded way (S1, S2, S15, S17, S18, S20, S29, S30, S32).

Each part tries what it has by heart and goes on by chance for TORTURE_REVIEW_SECONDS; `scripts/fuzz --minutes 60` goes
on for longer and prints one table. TORTURE_SEED repeats the dice.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.effort import effort, first_seed
from tests.torture import review

SECONDS = effort("REVIEW_SECONDS", 1)
SEED = first_seed(1)
AT_LEAST = {
    "framings": 1000,
    "damaged": 400,
    "readers": 600,
    "signatures": 10_000,
    "addresses": 135,
    "pages": 300,
    "roles": 1800,
}
"""What is known by heart, so that a busy machine does not matter."""


@pytest.mark.parametrize("name", AT_LEAST)
def test_nothing_of_the_review_comes_back(name: str) -> None:
    tally = review.run(name, review.parts()[name], SECONDS, SEED)
    sys.stdout.write(review.table([tally]) + "\n")
    assert not tally.findings, "\n".join(tally.printed)
    assert tally.tried >= AT_LEAST[name], "too little was tried to prove anything"


def test_every_part_is_in_the_suite() -> None:
    assert AT_LEAST.keys() == review.parts().keys()


def test_a_finding_is_counted_printed_and_ends_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def bad(tally: review.Tally, budget: review.Budget, folder: Path) -> None:
        with tally.trying():
            tally.accept("a forgery")

    monkeypatch.setattr(review, "parts", lambda: {"bad": bad})
    assert review.main(["--minutes", "0", "--only", "bad", "--seed", "7"]) == 1
    printed = capsys.readouterr().out
    assert "bad: accepted wrongly: a forgery" in printed
    assert "1 findings in 1 tries, seed 7" in printed
