"""T13: our own tests find every mistake that others have made; a suite that lets one through is blind to it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import oncehook
from tests.torture import seeded

PROMISES = 18


@pytest.mark.timeout(900)
def test_every_seeded_bug_is_caught() -> None:
    clean, runs = seeded.run_all()
    sys.stdout.write(seeded.report(clean, runs) + "\n")
    assert clean.code == 0, clean.said
    escaped = {one.bug: (one.code, one.missed, one.said[-2000:]) for one in runs if not one.caught}
    assert escaped == {}
    assert len(runs) == PROMISES


def test_a_bug_that_nobody_finds_is_told() -> None:
    """The judge itself: a test that stays green under the bug, and one that cannot even be collected, are no catch."""
    for test in (
        "tests/torture/test_seeded.py::test_the_package_has_no_switch",
        "tests/torture/test_seeded.py::absent",
    ):
        run = seeded.run("key concatenation", [test])
        assert not run.caught
        assert run.missed == [test]


def test_the_package_has_no_switch() -> None:
    """No setting of the product can make a bug: what makes them is not in the package."""
    text = "".join(path.read_text() for path in Path(oncehook.__file__).parent.rglob("*.py"))
    assert "seeded" not in text.lower()
