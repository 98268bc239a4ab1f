"""Check docs/promises.md and SECURITY.md against the repository: `python scripts/promises.py`.

Every promise has tests, and they exist; every number in the source, the tests and the pages is a promise, and every
promise is named there; every line of the threat model names promises and tests. Prints what is wrong and ends with 1.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/promises.md"
SECURITY = ROOT / "SECURITY.md"
NUMBERS = [f"R{n}" for n in range(1, 78)] + [f"S{n}" for n in range(1, 42)]
READ = {".py", ".sql", ".md", ".js", ".html"}

_LINE = re.compile(r"(?ms)^- \*\*(\w+)\*\* (.*?)(?=^- |^#|\Z)")
_TEST = re.compile(r"\[`(test_\w+)`\]\(([^)]+)\)")
_NUMBER = re.compile(r"\b[RS]\d{1,2}\b")


@dataclass(frozen=True)
class Link:
    """A test that a page names."""

    name: str
    path: Path

    @property
    def exists(self) -> bool:
        return self.name in tests_in(self.path)

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}::{self.name}"


@cache
def tests_in(path: Path) -> frozenset[str]:
    """Return the names of the tests in a file; none where there is no such file."""
    if not path.is_file():
        return frozenset()
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(
        node.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, functions) and node.name.startswith("test_")
    )


def links(text: str, page: Path) -> list[Link]:
    """Return the tests that a part of a page links to."""
    return [Link(name, (page.parent / target).resolve()) for name, target in _TEST.findall(text)]


def promises(text: str | None = None) -> list[tuple[str, list[Link]]]:
    """Return the numbers of the page in its order, each with its tests."""
    return [(number, links(rest, PAGE)) for number, rest in _LINE.findall(text or PAGE.read_text())]


def threats(text: str | None = None) -> list[tuple[str, set[str], list[Link]]]:
    """Return the rows of the threat model: who, the promises named, the tests named."""
    rows = [line for line in (text or SECURITY.read_text()).splitlines() if re.match(r"\| (?!---|who \|)", line)]
    return [(row.split("|")[1].strip(), set(_NUMBER.findall(row)), links(row, SECURITY)) for row in rows]


def named() -> dict[str, set[Path]]:
    """Return every number that the repository names beside the page, and the files that name it."""
    found: dict[str, set[Path]] = {}
    for folder in ("src", "tests", "docs"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in READ and path != PAGE and "vendor" not in path.parts:
                for number in _NUMBER.findall(path.read_text()):
                    found.setdefault(number, set()).add(path)
    return found


def check_promises(listed: list[tuple[str, list[Link]]]) -> Iterator[str]:
    """Yield what is wrong with the lines of the page."""
    numbers = [number for number, _ in listed]
    if numbers != NUMBERS:
        odd = sorted(set(numbers) ^ set(NUMBERS)) or "their order"
        yield f"The page must have R1 to R77 and S1 to S41, each once and in order; look at {odd}."
    for number, tests in listed:
        if not tests:
            yield f"{number} has no test."
        yield from (f"{number} names {test}, which does not exist." for test in tests if not test.exists)


def check_numbers(listed: list[tuple[str, list[Link]]], used: dict[str, set[Path]]) -> Iterator[str]:
    """Yield numbers that are used and no promise, and promises whose number nobody uses."""
    numbers = {number for number, _ in listed}
    for number in sorted(used.keys() - numbers):
        yield f"{number} is no promise: {', '.join(str(path.relative_to(ROOT)) for path in sorted(used[number]))}"
    tested = {
        number
        for number, paths in used.items()
        if any(path.is_relative_to(ROOT / part) for path in paths for part in ("src", "tests"))
    }
    yield from (f"{number} is named in neither src nor tests." for number in NUMBERS if number not in tested)


def check_threats(rows: list[tuple[str, set[str], list[Link]]]) -> Iterator[str]:
    """Yield what is wrong with the threat model."""
    for who, numbers, tests in rows:
        if not numbers or not tests:
            yield f"The threat «{who}» names no promise, or no test."
        yield from (f"The threat «{who}» names {number}, which is no promise." for number in numbers - set(NUMBERS))
        yield from (f"The threat «{who}» names {test}, which does not exist." for test in tests if not test.exists)


def problems() -> list[str]:
    """Return everything that is wrong."""
    listed = promises()
    return [*check_promises(listed), *check_numbers(listed, named()), *check_threats(threats())]


if __name__ == "__main__":
    found = problems()
    sys.stdout.write("\n".join(found or [f"{len(NUMBERS)} promises, each with a test"]) + "\n")
    sys.exit(bool(found))
