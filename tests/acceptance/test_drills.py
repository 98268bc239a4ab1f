"""What operators do once a year, done here: a backup is restored, and a version replaced while traffic goes on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

import oncehook
from tests.acceptance.conftest import Engine
from tests.acceptance.processes import Receiver
from tests.acceptance.test_admin_cli import SETTINGS, Admin, Done, Sink, make_desk, run, sink  # noqa: F401
from tests.servers import programs, shared_postgres
from tests.wire import SECRET


@pytest.fixture
def admin(
    engine: Engine,
    sink: Sink,  # noqa: F811
    run: Callable[..., Done],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Admin]:
    made = make_desk(engine, sink, run, monkeypatch)
    yield made
    made.receiver.stop()


# -- backup and restore ------------------------------------------------------------------------


def back_up(admin: Admin, copy: Path) -> None:
    """As docs/how-to/run/backups.md says, while everything runs on."""
    if admin.engine.name == "sqlite":
        admin.good("db", "backup", str(copy))
    else:
        schema = admin.engine.url.partition("?schema=")[2]
        dump: list[str | Path] = [programs() / "pg_dump", "--schema", schema, "--file", copy, shared_postgres().url]
        subprocess.run(dump, check=True, capture_output=True)


def bring_back(engine: Engine, copy: Path) -> None:
    """Put the copy in the place of what is there."""
    if engine.name == "sqlite":
        for file in engine.folder.glob("inbox.db*"):
            file.unlink()
        shutil.copy(copy, engine.folder / "inbox.db")
        (engine.folder / "inbox.db").chmod(0o600)
        return
    schema = engine.url.partition("?schema=")[2]
    with psycopg.connect(shared_postgres().url, autocommit=True) as connection:
        connection.execute(f"DROP SCHEMA {schema} CASCADE")
    load: list[str | Path] = [
        programs() / "psql",
        "--set",
        "ON_ERROR_STOP=1",
        "--quiet",
        "--file",
        copy,
        shared_postgres().url,
    ]
    subprocess.run(load, check=True, capture_output=True)


def test_a_backup_is_restored(admin: Admin, tmp_path: Path) -> None:
    """What was there at the backup is there again and goes on; what came later is lost, and taken when it is sent
    again."""
    admin.send("finished")
    admin.wait_for("done", "finished")
    admin.sink.hold.clear()
    admin.send("under way", customer="c1")
    while len(admin.sink.bodies) < 2:
        time.sleep(0.02)
    back_up(admin, tmp_path / "copy")
    admin.sink.hold.set()
    admin.wait_for("done", "under way")
    admin.send("later")
    admin.wait_for("done", "later")
    admin.receiver.kill()

    bring_back(admin.engine, tmp_path / "copy")
    assert "1 lease ended" in admin.good("db", "restored", *(["--yes"] * (admin.engine.name == "postgres"))).out
    admin.good("doctor")
    assert admin.stand() == {"finished": "done", "under way": "pending"}
    admin.receiver.start()
    admin.wait_for("done", "under way")
    assert admin.send("finished")[0]["status"] == "duplicate"
    assert admin.send("under way", customer="c1")[0]["status"] == "duplicate"
    assert admin.send("later")[0]["status"] == "accepted", "its key is forgotten"
    admin.wait_for("done", "later")
    assert [body.count(b"under way") for body in admin.sink.bodies].count(1) == 2, "made once more, as the page says"


# -- upgrade -----------------------------------------------------------------------------------

NEXT = """
ALTER TABLE deliveries ADD COLUMN of_the_next_version text;
CREATE TABLE of_the_next_version (id integer PRIMARY KEY);
"""


@pytest.fixture
def next_version(tmp_path: Path) -> Path:
    """A copy of this program that knows one more migration: what it adds, old processes do not know."""
    source = Path(oncehook.__file__).parent
    copy = tmp_path / "next" / "oncehook"
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "store/migrations/postgres/0002_next.sql").write_text(NEXT)
    return copy.parent


def test_old_and_new_work_on_one_store(
    postgres: Engine,
    sink: Sink,  # noqa: F811
    run: Callable[..., Done],  # noqa: F811
    next_version: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """docs/how-to/run/upgrades.md, step by step: nobody is turned away, and everything is delivered once."""
    old = make_desk(postgres, sink, run, monkeypatch)
    as_next = {"PYTHONPATH": f"{next_version}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    sent = [f"old-{n}" for n in range(20)]
    old.send(*sent)

    migrate = [sys.executable, "-m", "oncehook", "db", "migrate", "--config", "oncehook.toml"]
    subprocess.run(migrate, check=True, env={**os.environ, "ORDERS_SECRET": SECRET, **as_next}, capture_output=True)
    assert postgres.rows("SELECT max(version) FROM migrations") == [(2,)]

    receiver: Receiver = postgres.receiver("next")
    receiver.config = SETTINGS.replace("PORT", str(sink.port))
    receiver.start(env=as_next)
    new = Admin(postgres, receiver, sink, run)
    for n in range(20):
        old.send(f"beside-old-{n}", customer=f"c{n % 3}")
        new.send(f"beside-new-{n}", customer=f"c{n % 3}")
        sent += [f"beside-old-{n}", f"beside-new-{n}"]
    assert {one["status"] for one in new.send(*sent[:20])} == {"duplicate"}, "keys of the old one are known"
    new.wait_for("done", *sent)
    assert len(sink.bodies) == len(sent)

    old.receiver.stop()
    new.send("alone")
    new.wait_for("done", "alone")
    with pytest.raises(AssertionError, match=r"at version 2"):
        old.receiver.start()
    receiver.stop()
