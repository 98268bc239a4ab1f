"""A commit beside this tree: what both do, what only this tree is asked for, and that nothing of the commit stays."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from bench.engines import ROOT, BenchError
from bench.pairs import Figures
from bench.trees import HERE, check_out, name_commit
from bench.turns import Look

from bench import against, turns


def worktrees() -> list[str]:
    listed = subprocess.run(["git", "worktree", "list"], cwd=ROOT, capture_output=True, text=True, check=True)
    return re.findall(r"\S*oncehook-tree-\S*", listed.stdout)


@pytest.fixture
def stores() -> Iterator[Path]:
    """A folder that PostgreSQL's own user can reach; pytest closes that of its tests to all but its own."""
    with tempfile.TemporaryDirectory(prefix="oncehook-against-test-") as folder:
        yield Path(folder)


# -- trees -------------------------------------------------------------------------------------


def test_a_tree_is_removed_when_its_run_fails() -> None:
    with suppress(RuntimeError), check_out("HEAD") as tree:
        assert (tree / "src" / "oncehook" / "__init__.py").exists()
        raise RuntimeError
    assert not tree.parent.exists()
    assert str(tree) not in worktrees()


def test_a_revision_that_is_not_there_leaves_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    before = set(Path(tempfile.gettempdir()).glob("oncehook-tree-*"))
    assert against.main(["--against", "no-such-revision"]) == 1
    assert "no-such-revision" in capsys.readouterr().err
    assert set(Path(tempfile.gettempdir()).glob("oncehook-tree-*")) <= before


# -- figures -----------------------------------------------------------------------------------


def test_neither_start_nor_end_of_the_workers_counts() -> None:
    looks = [Look(10.0 + n, done, (1.0 + n, 0.0)) for n, done in enumerate((0, 50, 90, 100))]
    first, last = turns.choose_window(looks, 100)
    assert (first.at, last.at) == (11.0, 12.0)
    with pytest.raises(BenchError, match="use more --seconds"):
        turns.choose_window(looks[-2:], 100)


# -- the command -------------------------------------------------------------------------------


def test_the_script_hands_parts_over() -> None:
    text = (ROOT / "scripts/bench").read_text()
    parts = set(re.findall(r'(\w+):\*" --against"\*', text))
    assert parts == {*against.PARTS, "whole"}
    assert against.read_arguments(["--against", "HEAD"]).parts == against.PARTS
    assert against.read_arguments(["work", "--against", "HEAD"]).parts == ["work"]
    for wrong in (["memory"], ["--receivers", "2"], ["work", "--receivers", "2"], ["--rounds", "0"]):
        with pytest.raises(SystemExit):
            against.read_arguments([*wrong, "--against", "HEAD"])


def test_receivers_are_for_this_tree_only(
    stores: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[tuple[bool, list[str]]] = []

    def run_ingest(progress: object, label: str, *, place: Any, tree: Path, **about: object) -> Figures:
        seen.append((tree == ROOT, place.serve_options))
        return {"CPU µs": 60.0 if tree == ROOT else 100.0, "events/s": 1.0}

    monkeypatch.setattr(turns, "run_ingest", run_ingest)
    words = (
        "ingest --against HEAD --engine sqlite --rounds 1 --seconds 0.1 --receivers 2 --cpu-goal 0.6 --rate-goal 1.5"
    )
    path = tmp_path / "against.json"
    assert against.main([*words.split(), "--folder", str(stores), "--max-rate", "100", "--json", str(path)]) == 0
    assert seen == [
        (False, ["--no-worker"]),
        (True, ["--no-worker", "--receivers", "2"]),
        (False, ["--no-worker"]),
    ]
    text = capsys.readouterr().out
    assert "B: this tree with --receivers 2" in text
    assert "0.60× (0.60–0.60); noise 1.00–1.00; goal ≤ 0.6×: no verdict: 1 round" in text
    assert "goal ≥ 1.5×" in text


def test_a_short_run_of_the_same_revision(stores: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "ingest latency --against HEAD --rounds 1 --seconds 0.5 --engine sqlite"
    path = tmp_path / "against.json"
    assert against.main([*words.split(), "--folder", str(stores), "--json", str(path)]) == 0, capsys.readouterr().err
    found = json.loads(path.read_text())
    assert found["against"] == name_commit("HEAD")
    assert [(one["title"], one["a"], one["b"]) for one in found["pairs"]] == [
        ("ingest  sqlite", found["against"], HERE),
        ("latency  sqlite", found["against"], HERE),
    ]
    for pair in found["pairs"]:
        [turn] = pair["turns"]
        assert all(value > 0 for side in ("a", "b", "again") for value in turn[side]["figures"].values())
        assert pair["measures"][0]["measure"].startswith("CPU µs")
    assert "no verdict: 1 round, 5 are needed" in capsys.readouterr().out
    assert list(stores.iterdir()) == []


def test_ctrl_c_removes_the_tree(stores: Path) -> None:
    before = worktrees()
    words = ["ingest", "--against", "HEAD", "--engine", "sqlite", "--folder", str(stores)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]), "TMPDIR": str(stores)}
    with subprocess.Popen(
        [sys.executable, "-m", "bench.against", *words], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
    ) as run:
        assert run.stderr is not None
        assert "round 1 of 5" in next(line for line in run.stderr if "round" in line)
        time.sleep(0.5)
        run.send_signal(signal.SIGINT)
        assert run.wait(60) != 0
    assert worktrees() == before
    assert list(stores.iterdir()) == []
