"""Ratios with a goal: all that are asked for are there, and a short run of one."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from bench.ratios import INGEST, MEASURES, RATIOS, WORK

from bench import ratios


def test_every_ratio_is_between_contestants_that_exist() -> None:
    for one in RATIOS:
        known = WORK if one.load == "http" else INGEST
        assert known[one.b].is_ours
        assert one.load in MEASURES
        assert known[one.b].engine in one.engines <= {"sqlite", "postgres", "none"}
    assert len({one.name for one in RATIOS}) == len(RATIOS)


def test_names_choose() -> None:
    assert ratios.read_arguments([]).names == [one.name for one in RATIOS]
    assert ratios.read_arguments(["sqlite-bare"]).names == ["sqlite-bare"]
    with pytest.raises(SystemExit):
        ratios.read_arguments(["sqlite-air"])


def test_a_short_run_with_duplicates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ratios.json"
    # pytest closes the folder of its tests to all but its own user, who is not PostgreSQL's.
    with tempfile.TemporaryDirectory(prefix="oncehook-ratios-test-") as stores:
        words = f"sqlite-duplicates --rounds 1 --seconds 0.5 --max-rate 20000 --folder {stores} --json {path}"
        assert ratios.main(words.split()) == 0, capsys.readouterr().err
        assert list(Path(stores).iterdir()) == []
    [pair] = json.loads(path.read_text())["pairs"]
    assert (pair["a"], pair["b"]) == ("oncehook_sqlite, unique keys", "oncehook_sqlite, 90% duplicates")
    assert [one["measure"] for one in pair["measures"]][:2] == ["CPU µs", "events/s"]
    assert "goal ≥ 1.3×: no verdict: 1 round, 5 are needed" in capsys.readouterr().out
