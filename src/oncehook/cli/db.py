"""`oncehook db`: the store itself: its schema, what it keeps, a copy of it, and what to do after a restore.

These commands open the store in this process, on SQLite as a client of whatever process owns the file.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from oncehook.cli.api import Failed, Misused
from oncehook.cli.options import config_option, json_option
from oncehook.cli.output import Progress, answer, say
from oncehook.errors import ConfigError
from oncehook.human import count
from oncehook.model import Engine

if TYPE_CHECKING:
    from oncehook.model import Pruned, SchemaState
    from oncehook.settings import Config
    from oncehook.store.base import Store


@click.group("db")
def db() -> None:
    """Manage the store: its schema, what it keeps, a backup, and what to do after a restore."""


def _config(config_file: Path | None) -> Config:
    from oncehook.settings import load

    return load(config_file, secrets=False, whole=False).config


def _store(config: Config) -> Store:
    from oncehook.settings.build import open_store

    return open_store(config.store)


@asynccontextmanager
async def _open_store(config: Config, *, migrate: bool) -> AsyncIterator[Store]:
    from oncehook.store.base import CommandObserver

    store = _store(config)
    try:
        await store.open(CommandObserver(), migrate=migrate)
        yield store
    finally:
        await store.close()


@db.command("migrate")
@config_option
def migrate(config_file: Path | None) -> None:
    """Bring the schema up to date. Safe to run at any time and from several machines at once."""
    before, after = asyncio.run(_migrate(_store(_config(config_file))))
    say(f"applied {name}" for name in before.pending)
    say([f"schema at version {after.current}"], err=True)


async def _migrate(store: Store) -> tuple[SchemaState, SchemaState]:
    try:
        before = await store.schema_state()
        if before.current == before.target:
            return before, before  # nothing to migrate, so it does not matter that a server holds the store
        with Progress(f"applying {count(len(before.pending), 'migration')}") as bar:
            opening = asyncio.ensure_future(store.open(migrate=True))
            while not opening.done():
                await asyncio.wait([opening], timeout=0.2)
                bar.add()
            await opening
        return before, await store.schema_state()
    finally:
        await store.close()


@db.command("status")
@config_option
@json_option
def status(config_file: Path | None, as_json: bool) -> int:
    """Show how far the schema is; exit 1 when it is behind."""
    schema = asyncio.run(_schema_state(_store(_config(config_file))))
    facts = {"current": schema.current, "target": schema.target, "pending": list(schema.pending)}
    lines = [f"version {schema.current} of {schema.target}", *(f"pending {name}" for name in schema.pending)]
    answer(facts, lines, as_json=as_json)
    return 1 if schema.pending else 0


async def _schema_state(store: Store) -> SchemaState:
    try:
        return await store.schema_state()
    finally:
        await store.close()


@db.command("sql")
@click.option("--engine", type=click.Choice([engine.name for engine in Engine]), default="postgres", show_default=True)
def sql(engine: str) -> None:
    """Print the schema as plain SQL. Connects to nothing."""
    from oncehook.store.migrate import migrations

    for step in migrations(Engine[engine]):
        say([f"-- {step.version:04d}_{step.name}", step.sql])


@db.command("prune")
@config_option
@json_option
def prune(config_file: Path | None, as_json: bool) -> int:
    """Remove now what has outlived its time: keep_events and keep_keys say how long that is.

    Servers and workers do this by themselves. Pending deliveries and dead letters stay, however old they are.
    """
    removed = asyncio.run(_prune(_config(config_file)))
    counts = {"events": removed.events, "keys": removed.keys, "batches": removed.batches, "others": removed.others}
    summary = ", ".join(f"{number} {what}" for what, number in counts.items())
    return answer(counts, [f"removed {summary}"], as_json=as_json)


async def _prune(config: Config) -> Pruned:
    from oncehook.model import Pruned

    async with _open_store(config, migrate=False) as store:
        ids = await store.register_names((), ())
        keep = {
            ids.sources[name]: source.keep_events
            for name, source in config.source.items()
            if source.keep_events is not None and name in ids.sources
        }
        removed = Pruned()
        with Progress("pruning", unit="events") as bar:
            while batch := await store.prune(keep, config.retention.keep_events):
                removed = Pruned(
                    removed.events + batch.events,
                    removed.keys + batch.keys,
                    removed.batches + batch.batches,
                    removed.others + batch.others,
                )
                bar.reach(removed.events)
        return removed


@db.command("backup")
@config_option
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
def backup(config_file: Path | None, file: Path) -> None:
    """Copy a SQLite store into FILE while everything runs on. Of PostgreSQL, say which command does it.

    To take it up again, put it in the store's place and run: oncehook db restored
    """
    from oncehook.settings.values import hide_password

    config = _config(config_file)
    store = _store(config)
    if store.engine is not Engine.sqlite:
        url = hide_password(config.store).replace(":***@", "@")
        raise Misused(
            "PostgreSQL is backed up by its own tools; nothing was written.",
            hint=f"Run: pg_dump --format=custom --file={shlex.quote(str(file))} {shlex.quote(url)}",
        )
    from oncehook.store.sqlite import SqliteStore
    from oncehook.store.sqlite.connection import copy

    assert isinstance(store, SqliteStore)
    if file.exists():
        raise Failed(f"{file} is there already, and stays as it is.", hint="Name a file that is not there yet.")
    with Progress("copying", unit="pages") as bar:
        copy(store.path, file, lambda done, total: bar.reach(done, total))
    say([str(file)])


@db.command("restored")
@config_option
@click.option("--yes", is_flag=True, help="Although workers have been heard of in the last minute.")
def mark_restored(config_file: Path | None, yes: bool) -> None:
    """After a restore from a backup, before anything is started: end all leases and raise all fences.

    A worker that held a lease when the backup was made can then write nothing any more; what was leased is due again.
    """
    ended = asyncio.run(_end_leases(_config(config_file), yes))
    say([f"{count(ended, 'lease')} ended, all fences raised"])


async def _end_leases(config: Config, yes: bool) -> int:
    async with _open_store(config, migrate=config.migrate) as store:
        # Who is alone with a file has no workers beside it: those it reads of are those of the backup.
        workers = [] if store.is_alone else await store.workers()
        if store.embedded and not store.is_alone:
            raise ConfigError(f"Process {store.owner} and others have the store open.", hint="Stop all of them first.")
        if workers and not yes:
            seen = "workers have" if len(workers) > 1 else "worker has"
            raise ConfigError(
                f"{len(workers)} {seen} been heard of in the last minute, on {workers[0].host}.",
                hint="Stop them first; their attempts would be made twice. --yes goes on all the same.",
            )
        return await store.invalidate_leases()
