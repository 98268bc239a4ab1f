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
from oncehook.cli.help import CommandGroup
from oncehook.cli.options import app_option, build_setup, config_option, json_option
from oncehook.cli.output import Progress, answer, say
from oncehook.errors import ConfigError
from oncehook.human import count
from oncehook.model import Engine

if TYPE_CHECKING:
    from oncehook.archive import Archive
    from oncehook.model import ArchivedEvent, Pruned, SchemaState
    from oncehook.settings import Config
    from oncehook.store.base import Store


@click.group("db", cls=CommandGroup)
def db() -> None:
    """Manage the store: its schema, what it keeps, a backup, and what to do after a restore."""


def _config(config_file: Path | None, app: str | None = None, *, secrets: bool = False) -> Config:
    from oncehook.settings import load

    if app:
        return build_setup(app, config_file).config
    return load(config_file, secrets=secrets, whole=False).config


def _store(config: Config, *, reads_payloads: bool = False) -> Store:
    from oncehook.settings.build import cipher_of, open_store

    return open_store(config.store, cipher_of(config.encrypt) if reads_payloads else None)


@asynccontextmanager
async def _open_store(config: Config, *, migrate: bool, reads_payloads: bool = False) -> AsyncIterator[Store]:
    from oncehook.store.base import CommandObserver

    store = _store(config, reads_payloads=reads_payloads)
    try:
        await store.open(CommandObserver(), migrate=migrate)
        yield store
    finally:
        await store.close()


@db.command("migrate")
@config_option
@app_option
def migrate(config_file: Path | None, app: str | None) -> None:
    """Bring the schema up to date. Safe to run at any time and from several machines at once."""
    before, after = asyncio.run(_migrate(_store(_config(config_file, app))))
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
@app_option
@json_option
def status(config_file: Path | None, app: str | None, as_json: bool) -> int:
    """Show how far the schema is; exit 1 when it is behind."""
    schema = asyncio.run(_schema_state(_store(_config(config_file, app))))
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
@app_option
@json_option
def prune(config_file: Path | None, app: str | None, as_json: bool) -> int:
    """Remove now what has outlived its time: keep_events and keep_keys say how long that is.

    Servers and workers do this by themselves. With `archive` in the settings, events are written there first. Pending
    deliveries and dead letters stay, however old they are.
    """
    removed = asyncio.run(_prune(_config(config_file, app)))
    counts = {"events": removed.events, "keys": removed.keys, "batches": removed.batches, "others": removed.others}
    summary = ", ".join(f"{number} {what}" for what, number in counts.items())
    return answer(counts, [f"removed {summary}"], as_json=as_json)


async def _prune(config: Config) -> Pruned:
    from oncehook.model import Pruned
    from oncehook.settings.stored import read_keep_events

    async with _open_store(config, migrate=False, reads_payloads=config.archive is not None) as store:
        ids = await store.register_names((), ())
        keep = {
            ids.sources[name]: source.keep_events
            for name, source in config.source.items()
            if source.keep_events is not None and name in ids.sources
        }
        keep |= read_keep_events(await store.find_kept_sources())
        removed, only = Pruned(), None
        with Progress("pruning", unit="events") as bar:
            if config.archive is not None:
                async with _open_archive(config, store) as archive:
                    removed, only = Pruned(await archive.prune(keep, config.retention.keep_events)), ()
            while batch := await store.prune(keep, config.retention.keep_events, only=only):
                removed = Pruned(
                    removed.events + batch.events,
                    removed.keys + batch.keys,
                    removed.batches + batch.batches,
                    removed.others + batch.others,
                )
                bar.reach(removed.events)
        return removed


@asynccontextmanager
async def _open_archive(config: Config, store: Store) -> AsyncIterator[Archive]:
    """Open the archive of the settings, or the current folder where they name none."""
    from oncehook.archive import Archive
    from oncehook.objects import FolderObjects
    from oncehook.settings.build import bodies_of, objects_of

    bodies = bodies_of(config.bodies, config.store, lambda: store)
    objects = FolderObjects(Path()) if config.archive is None else objects_of(config.archive)
    try:
        yield Archive(store, bodies, objects)
    finally:
        await bodies.close()
        await objects.close()


@click.command("archive")
@config_option
@click.argument("what", nargs=-1, required=True, metavar="DAY|FILE...")
@click.option("--keep", default="7d", show_default=True, help="For how long they are kept this time.")
@json_option
def import_archive(config_file: Path | None, what: tuple[str, ...], keep: str, as_json: bool) -> int:
    """Bring archived events back to be replayed: all of a DAY (2026-11-18), or those in a FILE of an archive.

    What is there already stays as it is. Nothing is delivered: replay what you need.
    """
    from oncehook.human import seconds

    counts = asyncio.run(_bring_back(_config(config_file, secrets=True), what, seconds(keep)))
    return answer(counts, [f"{count(counts['read'], 'event')} read, {counts['new']:,} brought back"], as_json=as_json)


async def _bring_back(config: Config, what: tuple[str, ...], keep: float) -> dict[str, int]:
    counts = {"read": 0, "new": 0}
    with Progress("bringing back", unit="events") as bar:
        async with (
            _open_store(config, migrate=config.migrate, reads_payloads=True) as store,
            _open_archive(config, store) as archive,
        ):
            for one in what:
                async for events in _read_archive(archive, one, store):
                    async for read, new in archive.bring_back(events, keep, "cli"):
                        counts["read"] += read
                        counts["new"] += new
                        bar.reach(counts["read"])
    return counts


def _read_file(name: str) -> bytes | None:
    return Path(name).read_bytes() if Path(name).is_file() else None


async def _read_archive(archive: Archive, what: str, store: Store) -> AsyncIterator[list[ArchivedEvent]]:
    if (kept := _read_file(what)) is not None:
        from oncehook.archive import unpack

        yield unpack(kept, what, store.cipher)
        return
    names = await archive.names(what)
    if not names:
        raise Failed(f"Nothing of {what} is archived at {archive.objects.address}.", hint="Check `archive`.")
    for name in names:
        yield await archive.read(name)


@db.command("backup")
@config_option
@app_option
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
def backup(config_file: Path | None, app: str | None, file: Path) -> None:
    """Copy a SQLite store into FILE while everything runs on. Of PostgreSQL, say which command does it.

    Large bodies that are kept beside the store are copied into FILE-bodies. To take it up again, put both in the
    store's place and run: oncehook db restored
    """
    from oncehook.settings.values import hide_password

    config = _config(config_file, app)
    store = _store(config)
    if store.engine is not Engine.sqlite:
        url = hide_password(config.store).replace(":***@", "@")
        raise Misused(
            "PostgreSQL is backed up by its own tools; nothing was written.",
            hint=f"Run: pg_dump --format=custom --file={shlex.quote(str(file))} {shlex.quote(url)}",
        )
    from oncehook.objects import copy_folder
    from oncehook.settings.build import bodies_beside
    from oncehook.store.sqlite import SqliteStore
    from oncehook.store.sqlite.connection import copy

    assert isinstance(store, SqliteStore)
    if file.exists():
        raise Failed(f"{file} is there already, and stays as it is.", hint="Name a file that is not there yet.")
    beside = (bodies_beside(store.path), bodies_beside(file))
    with Progress("copying", unit="pages") as bar:
        if config.bodies is None:
            copy_folder(*beside)  # before the store, because some may be pruned while that is copied
        copy(store.path, file, lambda done, total: bar.reach(done, total))
        if config.bodies is None:
            copy_folder(*beside)  # those that came since
    say([str(file), *([str(beside[1])] if beside[1].exists() else [])])


@db.command("restored")
@config_option
@app_option
@click.option("--yes", is_flag=True, help="Although workers have been heard of in the last minute.")
def mark_restored(config_file: Path | None, app: str | None, yes: bool) -> None:
    """After a restore from a backup, before anything is started: end all leases and raise all fences.

    A worker that held a lease when the backup was made can then write nothing any more; what was leased is due again.
    """
    ended = asyncio.run(_end_leases(_config(config_file, app), yes))
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
