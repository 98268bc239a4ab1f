"""`oncehook db`: the store itself: its schema, what it keeps, a copy of it, and what to do after a restore.

These commands open the store in this process. A running server keeps a SQLite file for itself, and prunes by itself.
"""

from __future__ import annotations

import asyncio
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from oncehook.cli.api import Failed, Misused
from oncehook.cli.progress import Progress
from oncehook.cli.setup import config_option
from oncehook.cli.showing import say
from oncehook.errors import ConfigError
from oncehook.model import Engine

if TYPE_CHECKING:
    from oncehook.model import Pruned, SchemaState
    from oncehook.settings import Config
    from oncehook.store.base import Store


@click.group("db")
def command() -> None:
    """The store: bring its schema up to date, look at it, print it; prune; make a backup, take up a restored one."""


def _config(config_file: Path | None) -> Config:
    from oncehook.settings import load

    return load(config_file, secrets=False, whole=False).config


def _store(config: Config) -> Store:
    from oncehook.settings.build import open_store

    return open_store(config.store)


@command.command("migrate")
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
            return before, before  # nothing to write, so a server that holds the store is not in the way
        with Progress(f"applying {len(before.pending)} migrations") as bar:
            opening = asyncio.ensure_future(store.open(migrate=True))
            while not opening.done():
                await asyncio.wait([opening], timeout=0.2)
                bar.add()
            await opening
        return before, await store.schema_state()
    finally:
        await store.close()


async def _look(store: Store) -> SchemaState:
    try:
        return await store.schema_state()
    finally:
        await store.close()


@command.command("status")
@config_option
@click.option("--json", "as_json", is_flag=True, help="As one JSON document.")
def status(config_file: Path | None, as_json: bool) -> int:
    """Show how far the schema is; exit 1 when it is behind."""
    state = asyncio.run(_look(_store(_config(config_file))))
    if as_json:
        click.echo(json.dumps({"current": state.current, "target": state.target, "pending": list(state.pending)}))
    else:
        click.echo(f"version {state.current} of {state.target}")
        for name in state.pending:
            click.echo(f"pending {name}")
    return 1 if state.pending else 0


@command.command("sql")
@click.option("--engine", type=click.Choice([engine.name for engine in Engine]), default="postgres", show_default=True)
def sql(engine: str) -> None:
    """Print the schema as plain SQL. Connects to nothing."""
    from oncehook.store.migrate import migrations

    for step in migrations(Engine[engine]):
        click.echo(f"-- {step.version:04d}_{step.name}")
        click.echo(step.sql)


@command.command("prune")
@config_option
@click.option("--json", "as_json", is_flag=True, help="As one JSON document.")
def prune(config_file: Path | None, as_json: bool) -> None:
    """Remove now what has outlived its time: keep_events and keep_keys say how long that is.

    Servers and workers do this by themselves. Pending deliveries and dead letters stay, however old they are.
    """
    removed = asyncio.run(_prune(_config(config_file)))
    counts = {"events": removed.events, "keys": removed.keys, "batches": removed.batches, "others": removed.others}
    if as_json:
        click.echo(json.dumps(counts))
    else:
        click.echo("removed " + ", ".join(f"{number} {what}" for what, number in counts.items()))


async def _prune(config: Config) -> Pruned:
    from oncehook.model import Pruned

    store = _store(config)
    try:
        await store.open(migrate=False)
        numbers = await store.register_names((), ())
        keep = {
            numbers.sources[name]: source.settings.keep_events
            for name, source in config.source.items()
            if source.settings.keep_events is not None and name in numbers.sources
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
    finally:
        await store.close()


@command.command("backup")
@config_option
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
def backup(config_file: Path | None, file: Path) -> int:
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
    from oncehook.store.sqlite.backup import copy

    assert isinstance(store, SqliteStore)
    if file.exists():
        raise Failed(f"{file} is there already, and stays as it is.", hint="Name a file that is not there yet.")
    with Progress("copying", unit="pages") as bar:
        copy(store.path, file, lambda done, total: bar.reach(done, total))
    say([str(file)])
    return 0


@command.command("restored")
@config_option
@click.option("--yes", is_flag=True, help="Although workers have been heard of in the last minute.")
def restored(config_file: Path | None, yes: bool) -> None:
    """After a restore from a backup, before anything is started: end all leases and raise all fences.

    Whoever held a lease when the backup was made can then write nothing any more; what was leased is due again.
    """
    ended = asyncio.run(_restored(_config(config_file), yes))
    click.echo(f"{ended} leases ended, all fences raised")


async def _restored(config: Config, yes: bool) -> int:
    store = _store(config)
    try:
        await store.open(migrate=config.migrate)
        # Whoever has opened a SQLite file for writing is alone with it: workers it speaks of are those of the backup.
        workers = [] if store.engine is Engine.sqlite else await store.workers()
        if workers and not yes:
            raise ConfigError(
                f"{len(workers)} workers have been heard of in the last minute, on {workers[0].host}.",
                hint="Stop them first; their attempts would be made twice. --yes goes on all the same.",
            )
        return await store.invalidate_leases()
    finally:
        await store.close()
