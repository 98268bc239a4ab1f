"""Two revisions in one run: who has which turn, what is compared, and that nothing of the other one stays."""

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

import pytest
from bench.against import Look
from bench.engines import ROOT, BenchError
from bench.trees import HERE, check_out, take_turns

from bench import against

OTHER = "18c060b8c3d50589abc0"


def worktrees() -> list[str]:
    listed = subprocess.run(["git", "worktree", "list"], cwd=ROOT, capture_output=True, text=True, check=True)
    return re.findall(r"\S*oncehook-tree-\S*", listed.stdout)


@pytest.fixture
def stores() -> Iterator[Path]:
    """A folder that PostgreSQL's own user can reach; pytest closes that of its tests to all but its own."""
    with tempfile.TemporaryDirectory(prefix="oncehook-against-test-") as folder:
        yield Path(folder)


def measured(load: str, tree: str, number: int, **figures: float) -> dict[str, object]:
    return {"load": load, "tree": tree, "round": number, "figures": figures, "others_cores": 0.1}


def report(*ones: dict[str, object]) -> list[str]:
    """The rows of a report on these results, in words."""
    found = {"trees": [OTHER, HERE], "rounds": 3, "seconds": 5.0, "disk": {"p50_ms": 0.2}, "measured": ones}
    return [" ".join(line.split()) for line in against.render(found).split("\n\n")[1].splitlines()[1:]]


# -- turns -------------------------------------------------------------------------------------


def test_who_comes_first_changes_with_every_job_and_every_round() -> None:
    trees = {"a": Path("a"), "b": Path("b")}
    turns = [(number, job, tree) for number, job, tree, _ in take_turns(2, ["x", "y"], trees)]
    assert turns == [
        *[(0, "x", "a"), (0, "x", "b"), (0, "y", "b"), (0, "y", "a")],
        *[(1, "x", "b"), (1, "x", "a"), (1, "y", "a"), (1, "y", "b")],
    ]


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
    looks = [Look(10.0, 0, 1.0, 0.0), Look(11.0, 50, 2.0, 0.0), Look(12.0, 90, 3.0, 0.0), Look(13.0, 100, 3.1, 0.0)]
    first, last = against.choose_window(looks, 100)
    assert (first.at, last.at) == (11.0, 12.0)
    with pytest.raises(BenchError, match="use more --seconds"):
        against.choose_window(looks[-2:], 100)


def test_both_trees_are_shown_with_median_spread_and_ratio() -> None:
    slower = [measured("ingest", OTHER, n, **{"events/s": 1000.0 + n, "our CPU µs": 50.0}) for n in range(3)]
    faster = [measured("ingest", HERE, n, **{"events/s": 2000.0 + n, "our CPU µs": 40.0 + 10 * n}) for n in range(3)]
    assert report(*slower, *faster) == [
        "ingest",
        "events/s 1,001 1,000–1,002 2,001 2,000–2,002 1.999 2.00–2.00 better",
        "our CPU µs 50 50–50 50 40–60 1.000 0.80–1.20",
    ]


def test_less_is_better_of_everything_but_rates() -> None:
    ones = [measured("work", tree, n, **{"p50 ms": ms}) for n in range(3) for tree, ms in ((OTHER, 2.0), (HERE, 3.0))]
    assert report(*ones)[1].endswith("worse")
    assert not report(*ones[:4])[1].endswith("worse")  # two rounds may agree by chance


def test_only_rounds_that_both_have_finished_are_compared() -> None:
    ones = [measured("work", OTHER, 0, ms=1.0), measured("work", OTHER, 1, ms=7.0), measured("work", HERE, 1, ms=7.0)]
    assert report(*ones) == ["work", "ms 7 7–7 7 7–7 1.000 1.00–1.00"]
    assert report(ones[0]) == []


# -- the command -------------------------------------------------------------------------------


def test_the_script_hands_parts_over() -> None:
    text = (ROOT / "scripts/bench").read_text()
    parts = set(re.findall(r'(\w+):\*" --against"\*', text))
    assert parts == {*against.PARTS, "whole"}
    assert against.read_arguments(["--against", "HEAD"]).parts == against.PARTS
    assert against.read_arguments(["work", "--against", "HEAD"]).parts == ["work"]
    with pytest.raises(SystemExit):
        against.read_arguments(["memory", "--against", "HEAD"])


def test_a_short_run_of_the_same_revision(stores: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "ingest latency --against HEAD --rounds 1 --seconds 0.5 --engine sqlite"
    path = tmp_path / "against.json"
    assert against.main([*words.split(), "--folder", str(stores), "--json", str(path)]) == 0, capsys.readouterr().err
    found = json.loads(path.read_text())
    assert found["trees"] == ["HEAD", HERE]
    assert [(one["load"], one["tree"]) for one in found["measured"]] == [
        ("ingest  oncehook_sqlite", "HEAD"),
        ("ingest  oncehook_sqlite", HERE),
        ("latency  sqlite", HERE),
        ("latency  sqlite", "HEAD"),
    ]
    for one in found["measured"]:
        assert all(value > 0 for value in one["figures"].values())
    assert "at 1,000/s: done p50 ms" in capsys.readouterr().out
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
