"""`oncehook db`: the store's schema."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import click

from oncehook.cli.setup import config_option
from oncehook.config import load
from oncehook.inbox import open_store
from oncehook.model import Engine, SchemaState
from oncehook.store.base import Store
from oncehook.store.migrate import migrations


@click.group("db")
def command() -> None:
    """The store's schema: bring it up to date, look at it, print it."""


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
