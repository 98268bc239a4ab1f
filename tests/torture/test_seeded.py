"""T13: our own tests find every mistake that others have made; a suite that lets one through is blind to it."""

from __future__ import annotations

from pathlib import Path

import pytest

import oncehook
from tests.torture import seeded, seeded_bugs

PROMISES = 18


@pytest.mark.parametrize("bug", seeded.BUGS)
def test_every_seeded_bug_is_caught(bug: str) -> None:
    """That the same tests are green without a bug is seen in this suite itself."""
    run = seeded.run(bug, seeded.BUGS[bug])
    assert run.caught, (run.code, run.missed, run.said[-2000:])


def test_no_seeded_bug_is_forgotten() -> None:
    assert len(seeded.BUGS) == PROMISES
    assert seeded.BUGS.keys() == seeded_bugs.SEEDS.keys()


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
