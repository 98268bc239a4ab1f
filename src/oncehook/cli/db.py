"""`oncehook db`: the store itself: its schema, what it keeps, and what to do after a restore.

These commands open the store in this process. A running server keeps a SQLite file for itself, and prunes by itself.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import click

from oncehook.assembly import open_store
from oncehook.cli.setup import config_option
from oncehook.config import Config, load
from oncehook.deliveries import Pruned
from oncehook.errors import ConfigError
from oncehook.model import Engine, SchemaState
from oncehook.store.base import Store
from oncehook.store.migrate import migrations


@click.group("db")
def command() -> None:
    """The store: bring its schema up to date, look at it, print it; prune; take up a restored backup."""


@command.command("migrate")
@config_option
def migrate(config_file: Path | None) -> None:
    """Bring the schema up to date. Safe to run at any time and from several machines at once."""
    url = load(config_file, secrets=False).config.store

    before, after = asyncio.run(_migrate(open_store(url)))
    for name in before.pending:
        click.echo(f"applied {name}")
    click.echo(f"schema at version {after.current}", err=True)


async def _migrate(store: Store) -> tuple[SchemaState, SchemaState]:
    try:
        before = await store.schema_state()
        if before.current == before.target:
            return before, before  # nothing to write, so a server that holds the store is not in the way
        await store.open(migrate=True)
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
    state = asyncio.run(_look(open_store(load(config_file, secrets=False).config.store)))
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
    removed = asyncio.run(_prune(load(config_file, secrets=False).config))
    counts = {"events": removed.events, "keys": removed.keys, "batches": removed.batches, "others": removed.others}
    if as_json:
        click.echo(json.dumps(counts))
    else:
        click.echo("removed " + ", ".join(f"{number} {what}" for what, number in counts.items()))


async def _prune(config: Config) -> Pruned:
    store = open_store(config.store)
    try:
        await store.open(migrate=False)
        numbers = await store.enroll((), ())
        keep = {
            numbers.sources[name]: source.keep_events
            for name, source in config.source.items()
            if source.keep_events is not None and name in numbers.sources
        }
        removed = Pruned()
        while batch := await store.prune(keep, config.retention.keep_events):
            removed = Pruned(
                removed.events + batch.events,
                removed.keys + batch.keys,
                removed.batches + batch.batches,
                removed.others + batch.others,
            )
        return removed
    finally:
        await store.close()


@command.command("restored")
@config_option
@click.option("--yes", is_flag=True, help="Although workers have been heard of in the last minute.")
def restored(config_file: Path | None, yes: bool) -> None:
    """After a restore from a backup, before anything is started: end all leases and raise all fences.

    Whoever held a lease when the backup was made can then write nothing any more; what was leased is due again.
    """
    config = load(config_file, secrets=False).config
    ended = asyncio.run(_restored(config, yes))
    click.echo(f"{ended} leases ended, all fences raised")


async def _restored(config: Config, yes: bool) -> int:
    store = open_store(config.store)
    try:
        await store.open(migrate=config.migrate)
        # Whoever has opened a SQLite file for writing is alone with it: workers it speaks of are those of the backup.
        workers = [] if store.engine is Engine.sqlite else await store.workers()
        if workers and not yes:
            raise ConfigError(
                f"{len(workers)} workers have been heard of in the last minute, on {workers[0].host}.",
                hint="Stop them first; their attempts would be made twice. --yes goes on all the same.",
            )
        return await store.void_leases()
    finally:
        await store.close()
