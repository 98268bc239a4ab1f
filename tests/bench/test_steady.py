"""The steady benchmark: a short run on both engines, what it reports and draws, and what it refuses."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from bench.engines import BenchError
from bench.steady_report import Alone, Hot, Scene, Steady, render, targets

from bench import plots, steady

COLUMNS = "subjects statistics CPU µs DB ours mean ms p50 ms p99 ms behind s left"


def one_scene(engine: str, rate: int, subjects: int, statistics: str, **about: Any) -> Steady:
    """A scene that went well, unless `about` says otherwise."""
    figures: dict[str, Any] = {
        "events": 60 * rate,
        "undelivered": 0,
        "mean_ms": 5.0,
        "p50_ms": 4.0,
        "p99_ms": 20.0,
        "behind_s": 0.1,
        "store_cpu_us": 500.0 if engine == "postgres" else 0.0,
        "our_cpu_us": 400.0,
        "backlog": [5, 6, 5, 0],
        "others_cores": 0.1,
    }
    return Steady(scene=Scene(engine, rate, subjects, statistics), **{**figures, **about})


def steady_run(*more: Steady, alone: list[Alone] | None = None, hot: list[Hot] | None = None) -> dict[str, Any]:
    """A finished run of this tree, with `more` beside it."""
    chosen = steady.scenes(steady.read_arguments([]))
    ones = [one_scene(one.engine, one.rate, one.subjects, one.statistics) for one in chosen]
    return {
        "disk": {"p50_ms": 0.2, "p99_ms": 0.3},
        "seconds": 60.0,
        "rounds": 1,
        "backlog_seconds": 0.5,
        "steady": [asdict(one) for one in [*ones, *more]],
        "alone": [asdict(one) for one in alone or []],
        "hot": [asdict(one) for one in hot or []],
    }


def judged(found: dict[str, Any]) -> dict[str, bool]:
    return {target.what: target.reached is not None for target in targets(found)}


def test_by_default_everything_is_measured_for_a_minute() -> None:
    arguments = steady.read_arguments([])
    assert (arguments.seconds, arguments.only) == (60.0, ["steady", "alone", "hot"])
    chosen = steady.scenes(arguments)
    assert {one.rate for one in chosen} == {200, 1000, 2000}
    assert {one.subjects for one in chosen} == {0, 500, 20, 3, 1}
    assert {(one.engine, one.statistics) for one in chosen} == {
        ("sqlite", "fresh"),
        ("postgres", "fresh"),
        ("postgres", "analysed"),
    }
    assert len(set(chosen)) == len(chosen) == 3 * 5 * 3


def test_options_choose() -> None:
    words = "--engine postgres --rate 5 --rate 7 --subjects unique 3"
    arguments = steady.read_arguments(words.split())
    assert [str(one) for one in steady.scenes(arguments)[:3]] == [
        "postgres  5/s  unique  fresh",
        "postgres  5/s  unique  analysed",
        "postgres  5/s  3 subjects  fresh",
    ]
    assert len(steady.scenes(arguments)) == 8


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("--subjects few", "'few' is neither a number of subjects nor `unique`"),
        ("--subjects -3", "'-3' is neither a number of subjects nor `unique`"),
        ("--rate 0", "'0' is not a whole number above 0"),
        ("--seconds nan", "'nan' is not a number above 0"),
        ("--engine mysql", "invalid choice: 'mysql'"),
        ("--only cold", "invalid choice: 'cold'"),
        ("--events 1999", "1999 are too few to compare the first 1,000 with the last"),
        ("--json nowhere/steady.json", "--json: there is no folder nowhere"),
        ("--folder nowhere", "--folder: there is no folder nowhere"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_is_measured(
    words: str, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        steady.main(words.split())
    assert ended.value.code == 2
    assert error in capsys.readouterr().err


# -- figures -----------------------------------------------------------------------------------


def test_delays_count_from_the_moment_an_event_was_due() -> None:
    due = [100 + n / 100 for n in range(100)]
    ends = [moment + (0.5 if n == 7 else 0.01) for n, moment in enumerate(due)]
    found = steady.measure(Scene("postgres", 100, 0, "fresh"), due=due, ends=ends, until=102.0, cpu=(0.1, 0.2),
                           others=0.0)  # fmt: skip
    assert found.undelivered == 0
    assert found.p50_ms == pytest.approx(10)
    assert found.mean_ms == pytest.approx(10 + 490 / 100)
    assert found.p99_ms == pytest.approx(500)
    assert found.behind_s == pytest.approx(0.5)
    assert (found.store_cpu_us, found.our_cpu_us) == (pytest.approx(1000), pytest.approx(2000))


def test_what_was_never_delivered_is_as_late_as_somebody_waited_and_stays_in_the_backlog() -> None:
    due = [100 + n / 100 for n in range(100)]
    ends = [*[moment + 0.001 for moment in due[:50]], *[None] * 50]
    found = steady.measure(Scene("postgres", 100, 0, "fresh"), due=due, ends=ends, until=105.0, cpu=(0.1, 0.1),
                           others=0.0)  # fmt: skip
    assert found.undelivered == 50
    assert found.behind_s == pytest.approx(4.5)
    assert found.backlog[1:] == [49, *[50] * 8]


def test_the_backlog_ends_where_nothing_waits() -> None:
    assert steady.count_backlog([0.0, 0.1, 0.6], [0.3, 0.4, 0.9], until=9.0) == [2, 1, 0]


# -- the report --------------------------------------------------------------------------------


def test_the_report_has_every_column_and_fits() -> None:
    late = {"mean_ms": 43_210.9, "p50_ms": 43_210.9, "p99_ms": 76_543.2, "behind_s": 76.6, "undelivered": 113_334}
    worst = [one_scene("postgres", rate, 7, "analysed", **late) for rate in steady.RATES]
    alone = [Alone(engine, 900.0, 600.0, 400.0, 300.0, 0.1) for engine in steady.ENGINES]
    hot = [Hot("postgres", [500.0] * 100, [400.0] * 100, 0.1)]
    text = render(steady_run(*worst, alone=alone, hot=hot))
    headings = [" ".join(line.split()) for line in text.splitlines() if line.startswith("  subjects")]
    assert headings == [COLUMNS] * 6
    assert max(map(len, text.splitlines())) <= 100
    [row, *_] = [" ".join(line.split()) for line in text.splitlines() if "113,334" in line]
    assert row == "7 analysed 900 500 400 ≥43,211 ≥43,211 ≥76,543 ≥76.60 113,334"


def test_rounds_are_reported_by_their_median() -> None:
    more = [one_scene("postgres", 200, 7, "fresh", mean_ms=mean) for mean in (1.0, 2.0, 30.0)]
    [row] = [line.split() for line in render(steady_run(*more)).splitlines() if line.startswith("  7 ")]
    assert row[5] == "2"


def test_one_bad_scene_misses_its_targets() -> None:
    at = "postgres, 1,000/s: "
    assert judged(steady_run()) == {
        f"{at}furthest behind": True,
        f"{at}worst mean delay / unique, fresh": True,
        f"{at}database's CPU per event, most / least": True,
    }
    found = steady_run()
    [bad] = [one for one in found["steady"] if list(one["scene"].values()) == ["postgres", 1000, 3, "analysed"]]
    bad |= {"behind_s": 1.2, "mean_ms": 15.1, "store_cpu_us": 751.0}
    assert set(judged(found).values()) == {False}


def test_a_hot_subject_that_becomes_expensive_is_seen() -> None:
    costs = [500.0 + 2 * n for n in range(100)]
    what = "postgres, hot subject: CPU per event, last / first thousand"
    assert not judged(steady_run(hot=[Hot("postgres", costs, [400.0] * 100, 0.1)]))[what]
    assert judged(steady_run(hot=[Hot("postgres", [500.0] * 100, costs, 0.1)]))[what]


def test_a_busy_machine_gives_no_verdict() -> None:
    assert "no verdict" not in render(steady_run())
    assert "no verdict" in render(steady_run(one_scene("sqlite", 200, 0, "fresh", others_cores=0.4)))


# -- a run -------------------------------------------------------------------------------------


@pytest.fixture
def stores() -> Iterator[Path]:
    """A folder that PostgreSQL's own user can reach; pytest closes that of its tests to all but its own."""
    with tempfile.TemporaryDirectory(prefix="oncehook-steady-test-") as folder:
        yield Path(folder)


def test_a_short_run_on_both_engines(
    stores: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(steady, "WARM_SECONDS", 0.2)
    # Enough for a fast machine to be watched while it drains them.
    monkeypatch.setattr(steady, "ALONE_PACE", 5000)
    analyse, analysed = steady.Running.analyse, []
    monkeypatch.setattr(steady.Running, "analyse", lambda self: (analysed.append(self.sent), analyse(self)))
    report = tmp_path / "steady.json"
    words = f"--seconds 0.6 --rate 100 --subjects 3 --events 2000 --folder {stores} --json {report}"
    assert steady.main(words.split()) == 0, capsys.readouterr().err
    found = json.loads(report.read_text())
    assert [str(Scene(**one["scene"])) for one in found["steady"]] == [
        "sqlite  100/s  3 subjects  fresh",
        "postgres  100/s  3 subjects  fresh",
        "postgres  100/s  3 subjects  analysed",
    ]
    # One more where the moments add up to a little less than the whole time.
    assert analysed in ([40], [41])  # after the warm-up, before what counts
    for one in found["steady"]:
        assert one["events"] in (60, 61)
        assert one["undelivered"] == 0
        assert 0 < one["p50_ms"] <= one["p99_ms"] <= one["behind_s"] * 1000
        assert 0 < one["mean_ms"] <= one["behind_s"] * 1000
        assert one["our_cpu_us"] > 0
        assert (one["store_cpu_us"] > 0) == (one["scene"]["engine"] == "postgres")
        assert one["backlog"][0] > 0
        assert one["backlog"][-1] == 0
    assert [(one["engine"], one["drained"] > 0 < one["under_load"]) for one in found["alone"]] == [
        ("sqlite", True),
        ("postgres", True),
    ]
    assert [(one["engine"], len(one["our_cpu_us"])) for one in found["hot"]] == [("sqlite", 2), ("postgres", 2)]
    assert list(stores.iterdir()) == []
    rows = [line.split()[:2] for line in capsys.readouterr().out.splitlines() if line.startswith("  3 ")]
    assert rows == [["3", "fresh"], ["3", "fresh"], ["3", "analysed"]]
    assert [path.name for path in plots.draw_all(tmp_path)] == ["steady-light.png", "steady-dark.png"]


def test_what_fails_is_named_and_the_rest_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_scene(turn: steady.Turn, *, scene: Scene, seconds: float) -> Steady:
        if scene.subjects == 3:
            raise BenchError("8 requests refused")
        return one_scene(**asdict(scene))

    monkeypatch.setattr(steady, "run_scene", run_scene)
    words = "--engine sqlite --only steady --rate 5 --subjects 3 20 --json"
    assert steady.main([*words.split(), str(tmp_path / "steady.json")]) == 1
    assert "sqlite  5/s  3 subjects  fresh failed: 8 requests refused" in capsys.readouterr().err
    assert len(json.loads((tmp_path / "steady.json").read_text())["steady"]) == 1


# -- the picture -------------------------------------------------------------------------------


def test_a_picture_is_drawn_of_what_was_asked_for(tmp_path: Path) -> None:
    few = {**steady_run(), "steady": [asdict(one_scene("postgres", 5, 7, "fresh"))]}
    for found in (few, steady_run(one_scene("sqlite", 200, 3, "fresh", backlog=[10, 100, 1000]))):
        (tmp_path / "steady.json").write_text(json.dumps(found))
        assert len(plots.draw_all(tmp_path)) == 2


def test_rounds_are_drawn_by_their_median() -> None:
    rounds = [{"backlog": [1, 9, 0]}, {"backlog": [3, 9, 9, 9, 0]}, {"backlog": [2, 0]}]
    assert plots.usual_backlog(rounds) == [2, 9, 0, 0, 0]
