"""`oncehook bench` measures on a store of its own, and leaves nothing behind."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psycopg
import pytest

from oncehook import clock
from oncehook.cli import bench as command
from tests.servers import shared_postgres


def bench(*words: str) -> subprocess.CompletedProcess[str]:
    typed = [sys.executable, "-m", "oncehook", "bench", "--seconds", "0.2", *words]
    return subprocess.run(typed, capture_output=True, text=True, timeout=120, check=False)


def check(found: dict[str, Any], store: str) -> None:
    assert found["store"] == store
    assert found["work"]["deliveries"] == found["intake"]["events"] > 64
    assert found["intake"]["per_second"] > 0
    assert found["work"]["per_second"] > 0
    assert 0 < found["alone"]["answered"]["p50_ms"] <= found["alone"]["answered"]["p99_ms"]
    assert found["alone"]["handled"]["p50_ms"] > 0


def test_on_sqlite(tmp_path: Path) -> None:
    done = bench("--json", "--folder", str(tmp_path))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    check(found, "sqlite")
    assert found["fsync_ms"]["p50_ms"] > 0
    assert list(tmp_path.iterdir()) == []


def test_for_people(tmp_path: Path) -> None:
    done = bench("--folder", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "events/s" in done.stdout
    assert "deliveries/s, one at a time per subject" in done.stdout


async def test_everybody_sends_although_the_machine_is_held_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = itertools.count()
    monkeypatch.setattr(clock, "perf", lambda: float(next(seconds)))
    found = await command._take_in(f"sqlite:{tmp_path}/bench.db", command._Traffic(), 0.1)
    assert found["events"] == 1 + command.SENDERS


def schemas(url: str) -> set[str]:
    with psycopg.connect(url) as connection:
        return {name for (name,) in connection.execute("SELECT nspname FROM pg_namespace")}


def test_on_postgresql() -> None:
    url = shared_postgres().url
    before = schemas(url)
    done = bench("--json", "--store", url)
    assert done.returncode == 0, done.stderr
    check(json.loads(done.stdout), "postgresql")
    assert {name for name in schemas(url) - before if name.startswith("oncehook_bench")} == set()


def test_a_schema_that_somebody_uses_is_not_touched() -> None:
    url = f"{shared_postgres().url}?schema=mine"
    done = bench("--store", url)
    assert done.returncode == 2
    assert "must name neither a schema" in done.stderr
    assert "mine" not in schemas(shared_postgres().url)


def test_a_server_that_is_not_there() -> None:
    done = bench("--store", "postgresql://127.0.0.1:9/nowhere")
    assert done.returncode == 3
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_sqlite_is_not_named() -> None:
    assert bench("--store", "sqlite:./mine.db").returncode == 2
