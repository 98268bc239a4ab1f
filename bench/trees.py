"""Revisions of this repository that take turns in one run.

A shared machine changes its speed from minute to minute, so two revisions are compared in one run only, each in
processes of its own: `BENCH_TREE` names the tree whose `src` they import. Used by `bench.against` and `bench.steady`.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from bench.engines import ROOT, BenchError

Job = TypeVar("Job")

HERE = "this tree"
SHOWN = 12
"""Characters of a revision's name that are shown."""


@contextmanager
def check_out(revision: str) -> Iterator[Path]:
    """Check another revision out beside this one; remove it at the end."""
    with tempfile.TemporaryDirectory(prefix="oncehook-tree-") as folder:
        tree = Path(folder) / "tree"
        try:
            _git("worktree", "add", "--detach", "--quiet", str(tree), revision)
            yield tree
        finally:
            if tree.exists():
                _git("worktree", "remove", "--force", str(tree))


@contextmanager
def check_out_both(against: str | None) -> Iterator[dict[str, Path]]:
    """Give this tree by its name, after the one that it is compared with."""
    if against is None:
        yield {HERE: ROOT}
        return
    with check_out(against) as other:
        yield {against: other, HERE: ROOT}


def take_turns(rounds: int, jobs: Sequence[Job], trees: Mapping[str, Path]) -> Iterator[tuple[int, Job, str, Path]]:
    """Yield the number of the round, a job, and the tree that has its turn.

    The trees do the same job one right after the other, and in another order each time, because the second might
    always find a warmer machine.
    """
    for number in range(rounds):
        for at, job in enumerate(jobs):
            for tree, path in list(trees.items())[:: -1 if (number + at) % 2 else 1]:
                yield number, job, tree, path


def _git(*words: str) -> None:
    # In a session of its own: Ctrl-C must not stop it from removing a tree.
    done = subprocess.run(
        ["git", *words], cwd=ROOT, capture_output=True, text=True, check=False, start_new_session=True
    )
    if done.returncode:
        raise BenchError(f"git {' '.join(words)}: {done.stderr.strip()}")
