"""Numbered SQL migrations: those that exist, and those that a store still needs.

A migration is a file `NNNN_name.sql` under `migrations/{engine}/`. Engines run them at start, one process
at a time, each in one transaction together with its row in `migrations`: an aborted one leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from oncehook.errors import MigrationNeeded, SchemaTooNew
from oncehook.model import Engine, SchemaState


@dataclass(slots=True, frozen=True)
class Migration:
    version: int
    name: str
    sql: str


def migrations(engine: Engine) -> list[Migration]:
    """Return all steps this program knows for an engine, in order."""
    folder = files("oncehook.store") / "migrations" / engine.name
    steps = []
    for path in sorted(folder.iterdir(), key=lambda path: path.name):
        number, _, name = path.name.removesuffix(".sql").partition("_")
        steps.append(Migration(int(number), name, path.read_text("utf-8")))
    return steps


@cache
def latest(engine: Engine) -> int:
    """Return the version that this program brings a store to."""
    return migrations(engine)[-1].version


def state(engine: Engine, current: int) -> SchemaState:
    """Compare a store at version `current` with this program."""
    known = migrations(engine)
    pending = [f"{step.version:04d}_{step.name}" for step in known if step.version > current]
    return SchemaState(current=current, target=known[-1].version, pending=pending)


def steps_from(engine: Engine, current: int, *, migrate: bool) -> Sequence[Migration]:
    """Return the steps to run now. Raises SchemaTooNew, and MigrationNeeded for an old schema without `migrate`."""
    known = migrations(engine)
    if current > known[-1].version:
        raise SchemaTooNew(f"The store's schema is at version {current}; this oncehook knows {known[-1].version}.")
    steps = [step for step in known if step.version > current]
    if steps and not migrate:
        raise MigrationNeeded(f"The store's schema is at version {current}; this oncehook needs {known[-1].version}.")
    return steps
