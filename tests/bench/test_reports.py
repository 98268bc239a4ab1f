"""What the reports and pictures say, from figures that are made up: ratios, targets, and nothing drawn from nothing."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from bench.drive import Figures
from bench.engines import ROOT
from bench.report import Measured, Mixed, Results, as_json, render, targets

from bench import growth, ingest, latency, memory, plots, prune, stack, steady, whole
from tests.bench.test_steady import steady_run

PNG = b"\x89PNG"
SPEEDS = {"oncehook_sqlite": 9000.0, "oncehook_postgres": 8000.0, "fastapi_asyncpg": 3000.0, "flask_sqlalchemy": 450.0}


def measured(per_second: float) -> Measured:
    figures = Figures(100, 0, 0, 0, per_second, 1.0, 2.0, 3.0, 0.0, 100)
    return Measured(figures, 100.0, 10.0, 0.1)


def settings(*words: str) -> Any:
    return ingest.settings_from(ingest.read_arguments(words), None)


def results(*words: str) -> Results:
    made = Results(settings(*words))
    for name, speed in SPEEDS.items():
        made.rounds[name] = [measured(speed)]
        made.large[name] = [measured(speed / 4)]
    for engine in ("sqlite", "postgres"):
        unique = SPEEDS[f"oncehook_{engine}"]
        made.duplicates[f"oncehook_{engine}"] = [Mixed(0.5, unique, unique * 1.1), Mixed(0.9, unique, unique * 1.3)]
    return made


def layers() -> dict[str, float]:
    return dict.fromkeys(stack.Layers.__dataclass_fields__, 10.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A finished run."""
    paces = [latency.Pace(rate, 10, 1.0, 2.0, 3.0, 4.0, 5.0, 300.0, 0.0, 0.0) for rate in latency.RATES]
    speeds = dict.fromkeys(plots.WORK_NAMES, 1000.0) | {"oncehook_subject": 20_000.0}
    files: dict[str, Any] = {
        "ingest": as_json(results()),
        "work": {"contestants": {name: {"jobs_per_second": speed} for name, speed in speeds.items()}},
        "latency": {"engines": {engine: [vars(one) for one in paces] for engine in latency.ENGINES}},
        "growth": {
            "intake": {e: [{"events": n, "per_second": 9.0} for n in (0, 1_000_000)] for e in growth.ENGINES},
            "leases": {e: {str(d): 20.0 for d in growth.DEPTHS} for e in growth.ENGINES},
        },
        "steady": steady_run(),
        "stack": {
            "sockets": 10.0,
            "layers": {engine: layers() for engine in stack.ENGINES},
            "whole": {engine: {"server_cpu_us": 100.0} for engine in stack.ENGINES},
        },
    }
    for name, found in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(found))
    return tmp_path


def test_the_product_does_not_work_while_it_is_compared_unless_asked_to() -> None:
    assert settings().serve_options == ["--no-worker"]
    assert settings("--with-worker").serve_options == []
    assert settings("--receivers", "2").serve_options == ["--no-worker", "--receivers", "2"]


def test_ratios_of_repeated_keys_are_taken_within_their_turn() -> None:
    found = results()
    assert found.mixed_ratio("oncehook_sqlite", 0.9) == pytest.approx(1.3)
    assert found.mixed_ratio("fastapi_asyncpg", 0.9) is None
    (target,) = (one for one in targets(found) if "oncehook_sqlite, 90" in one.what)
    assert target.reached == "floor"


def test_the_report_shows_every_load_and_how_each_is_set_up() -> None:
    said = render(results())
    assert "50% duplicates" in said
    assert "64 KB bodies" in said
    assert "gunicorn 4 workers; SELECT, then INSERT" in said


def test_the_cpu_of_all_processes_comes_first() -> None:
    lines = [line.split() for line in render(results()).splitlines()]
    assert ["contestant", "CPU", "µs/event", "events/s", "spread"] in [line[:5] for line in lines]
    assert ["oncehook_sqlite", "110", "=", "100", "+", "10", "9,000"] in [line[:7] for line in lines]


def test_few_rounds_give_no_verdict() -> None:
    assert "targets (no verdict: 2 of 5 rounds" in render(results("--rounds", "2"))
    assert "no verdict" not in render(results("--rounds", "5"))


def test_a_bar_carries_its_ratio() -> None:
    (bar,) = (one for one in plots.ingest_bars(as_json(results())) if one.label.startswith("Flask"))
    assert bar.note == "450/s · oncehook on SQLite 20×"
    assert not bar.is_ours


def test_every_picture_is_drawn_light_and_dark(folder: Path) -> None:
    made = plots.draw_all(folder)
    assert {path.name for path in made} == {f"{name}-{tone}.png" for name in plots.PLOTS for tone in ("light", "dark")}
    assert all(path.read_bytes().startswith(PNG) for path in made)
    assert len({path.read_bytes() for path in made}) == len(made)


def test_growth_of_one_engine_is_drawn(folder: Path) -> None:
    found = json.loads((folder / "growth.json").read_text())
    only = {part: {"postgres": found[part]["postgres"]} for part in ("intake", "leases")}
    (folder / "growth.json").write_text(json.dumps(found | only))
    assert {"growth", "filled"} <= {path.stem.partition("-")[0] for path in plots.draw_all(folder)}


def test_intake_beside_pruning_is_judged_by_the_medians() -> None:
    def load(keep: str, p99: float) -> dict[str, Any]:
        return vars(prune.Load(keep, 1000, 500 if keep == prune.ENDED else 0, 2.0, 1.0, p99))

    loads = [load(prune.KEPT, p99) for p99 in (9.0, 10.0, 50.0)] + [load(prune.ENDED, p99) for p99 in (8.0, 16.0, 99.0)]
    found = {"rate": 500, "engines": {"sqlite": loads}}
    (target,) = prune.targets(found)
    assert (target.value, target.reached) == (pytest.approx(1.6), None)
    assert "250" in prune.render(found), "pruned a second"


def test_what_was_not_measured_is_not_drawn(folder: Path) -> None:
    for name in ("work", "latency", "growth", "stack", "steady"):
        (folder / f"{name}.json").unlink()
    found = json.loads((folder / "ingest.json").read_text())
    (folder / "ingest.json").write_text(json.dumps(found | {"duplicates": {}}))
    assert {path.stem.partition("-")[0] for path in plots.draw_all(folder)} == {"ingest"}


def test_the_layers_add_up() -> None:
    one = layers() | {"read": 12.0, "plan": 2.0}
    rows = dict(stack.rows({"sockets": 7.0, "layers": {"sqlite": one}}, "sqlite"))
    assert rows["sockets and loop"] == 7.0
    assert rows["key, hashes, id"] + rows["plan the deliveries"] == 12.0
    assert len(rows) == 8


def test_memory_and_growth_are_held_against_their_targets() -> None:
    one = {"idle_mb": 59.0, "loaded_mb": 150.0, "after_mb": 100.0, "idle_cpu": 2.0, "events": 1}
    found = memory.targets({"engines": {"sqlite": one}, "imports": {"python -c pass": 1.0, "import oncehook": 100.0}})
    assert [target.reached for target in found] == ["moonshot", "floor", None, "floor"]
    sizes = [{"events": 0, "per_second": 1000.0}, {"events": 1_000_000, "per_second": 890.0}]
    leases = {"1": 20.0, str(growth.DEPTHS[-1]): 22.5}
    found = growth.targets({"intake": {"sqlite": sizes}, "leases": {"sqlite": leases}})
    assert [target.reached for target in found] == [None, None]


def test_every_part_understands_what_the_whole_tells_it(tmp_path: Path) -> None:
    arguments = whole.read_arguments(["--out", str(tmp_path), "--seconds", "1", "--events", "5"])
    for part in whole.PARTS:
        words = whole.words_for(part, arguments)
        assert words[:2] == ["--json", str(tmp_path / f"{part}.json")]
    assert growth.read_arguments(whole.words_for("growth", arguments)).events == [5]
    assert ingest.read_arguments(whole.words_for("ingest", arguments)).rounds == 2
    short = steady.read_arguments(whole.words_for("steady", arguments))
    assert (short.rate, short.only) == ([1000], ["steady", "alone"])


def test_the_script_knows_every_part() -> None:
    text = (ROOT / "scripts/bench").read_text()
    [listed] = re.findall(r'case "\$\{1:-\}" in (.*?)\)', text)
    assert {*whole.PARTS, "prune", "scale", "plots", "ratios"} == set(listed.split(" | "))
    assert {*whole.PARTS, "prune", "scale"} == set(re.findall(r"scripts/bench (\S+)` one part", text)[0].split("|"))
