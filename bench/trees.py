"""Commits of this repository, checked out beside this tree.

A commit runs in processes of its own: `BENCH_TREE` names the tree whose `src` they import. Used by `bench.against`.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.engines import ROOT, BenchError

HERE = "this tree"
SHOWN = 12
"""Characters of a commit's name that are shown."""


@contextmanager
def check_out(commit: str) -> Iterator[Path]:
    """Check a commit out beside this tree; remove it at the end."""
    with tempfile.TemporaryDirectory(prefix="oncehook-tree-") as folder:
        tree = Path(folder) / "tree"
        try:
            _git("worktree", "add", "--detach", "--quiet", str(tree), commit)
            yield tree
        finally:
            if tree.exists():
                _git("worktree", "remove", "--force", str(tree))


def name_commit(commit: str) -> str:
    """Return the first characters of a commit's hash."""
    return _git("rev-parse", "--verify", f"--short={SHOWN}", f"{commit}^{{commit}}")


def name_tree() -> str:
    """Name this tree for the record: its commit, and whether it was changed since."""
    try:
        return _git("describe", "--always", "--dirty", "--exclude=*", f"--abbrev={SHOWN}")
    except BenchError:
        return "unknown"


def _git(*words: str) -> str:
    # In a session of its own: Ctrl-C must not stop it from removing a tree.
    done = subprocess.run(
        ["git", *words], cwd=ROOT, capture_output=True, text=True, check=False, start_new_session=True
    )
    if done.returncode:
        raise BenchError(f"git {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout.strip()
