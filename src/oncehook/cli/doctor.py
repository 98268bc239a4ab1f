"""`oncehook doctor`: one line per check, each failure with what to do.

Where nothing has been served yet it says what a start would do. Destinations are connected to and asked nothing: one
that is away is a warning, since deliveries wait for it.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from oncehook import clock
from oncehook.cli.setup import config_option, from_app
from oncehook.errors import OncehookError
from oncehook.model import Check, Engine, SchemaState

if TYPE_CHECKING:  # the store brings much with it: --help must not wait for that
    from oncehook.destinations.base import Destination
    from oncehook.destinations.http import HttpDestination
    from oncehook.inbox import Inbox
    from oncehook.sources import Source
    from oncehook.store.base import Store
    from oncehook.store.sqlite import SqliteStore

LEAST_FREE: Final = 256 << 20
"""Below this much free disk the doctor worries."""
REACH_SECONDS: Final = 3.0
"""How long a destination has to answer the door."""


@click.command("doctor")
@click.argument("app", required=False)
@config_option
@click.option("--json", "as_json", is_flag=True, help="As one JSON document.")
def command(app: str | None, config_file: Path | None, as_json: bool) -> int:
    """Look at settings, secrets, store, schema, disk, clock and destinations, and count everything that must add up.

    With APP (module:inbox) also at what it defines. Destinations are connected to, and sent nothing.
    """
    checks = asyncio.run(_examine(app, config_file))
    if as_json:
        fields = ("name", "ok", "warning", "detail", "hint")
        click.echo(json.dumps([{field: getattr(check, field) for field in fields} for check in checks], indent=2))
    else:
        for check in checks:
            _show(check)
    return 0 if all(check.ok for check in checks) else 1


def _show(check: Check) -> None:
    word, color = ("ok", "green") if check.ok else ("FAIL", "red")
    if check.ok and check.warning:
        word, color = "warn", "yellow"
    click.echo(f"{click.style(f'{word:<5}', fg=color)} {check.name:<12} {check.detail}")
    if check.hint and (not check.ok or check.warning):
        click.echo(f"{'':<18} → {check.hint}")


async def _examine(app: str | None, config_file: Path | None) -> list[Check]:
    try:
        inbox, origin = _whole(app, config_file)
    except OncehookError as error:
        return [Check("settings", False, str(error), error.hint)]
    detail = f"{origin}: {len(inbox.sources)} sources, {len(inbox.routes)} routes, secrets set"
    store, reached = await asyncio.gather(_examine_store(inbox), _examine_destinations(inbox.destinations.values()))
    return [Check("settings", True, detail), *_examine_sources(inbox.sources.values()), *store, *reached]


def _whole(app: str | None, config_file: Path | None) -> tuple[Inbox, str]:
    from oncehook.inbox import Inbox
    from oncehook.settings import load

    if app:
        setup = from_app(app, config_file)
        return setup.inbox, setup.origin
    loaded = load(config_file)
    return Inbox.from_config(loaded.config), str(loaded.origin or "defaults")


# -- sources -----------------------------------------------------------------------------------


def _examine_sources(sources: Iterable[Source]) -> list[Check]:
    from oncehook.reports import proven
    from oncehook.verify import Nothing

    checks = []
    for source in sources:
        body, key = source.body_authenticated, source.key_authenticated
        if not isinstance(source.scheme, Nothing):
            checks.append(Check("covers", True, f"{source.name}: the check covers {proven(body, key)}"))
        checks += [Check("secret", True, *warning, warning=True) for warning in source.secret_warnings()]
    return checks


# -- the store ---------------------------------------------------------------------------------


async def _examine_store(inbox: Inbox) -> list[Check]:
    store = inbox.store
    try:
        state = await store.schema_state()
        if state.pending:
            return [_behind(state, inbox.migrates), *_examine_file(store)]
        await store.open(migrate=False, write=False)
        checks = [Check("schema", True, f"version {state.current} of {state.target}"), *await store.check()]
        return [*checks, *await _examine_strays(inbox), *_examine_file(store), *await _examine_server(store)]
    except OncehookError as error:
        return [Check("store", False, str(error), error.hint)]
    finally:
        await store.close()


def _behind(state: SchemaState, migrates: bool) -> Check:
    if not migrates:
        return Check("schema", False, f"version {state.current} of {state.target}", "Run: oncehook db migrate")
    if state.current == 0:
        return Check("schema", True, "nothing is kept here yet", "The first `oncehook serve` makes it.", warning=True)
    detail = f"version {state.current} of {state.target}: the next start brings it up to date"
    return Check("schema", True, detail, "To do it now, run: oncehook db migrate", warning=True)


async def _examine_strays(inbox: Inbox) -> list[Check]:
    from oncehook.upkeep import STRAY_HINT, strays

    return [
        Check("waiting", True, f'{number:,} for "{name}", which nobody here knows', STRAY_HINT, warning=True)
        for name, number in (await strays(inbox.store, inbox.destinations)).items()
    ]


async def _examine_server(store: Store) -> list[Check]:
    if store.engine is Engine.sqlite:
        return []
    try:
        await store.ping()
    except OncehookError as error:
        return [Check("writable", False, str(error), "Give the role of `store` the right to write to its schema.")]
    return [Check("writable", True, "a write was made and committed")]


def _examine_file(store: Store) -> list[Check]:
    if store.engine is not Engine.sqlite:
        return []
    from oncehook.store.sqlite import SqliteStore
    from oncehook.store.sqlite.connection import holder, warn_of_old_library

    assert isinstance(store, SqliteStore)
    folder = _folder(store)
    free = shutil.disk_usage(folder).free
    enough = free >= LEAST_FREE
    old = warn_of_old_library()
    held = holder(store.path) if store.path.exists() else None
    return [
        _examine_rights(store, folder),
        Check("disk", enough, f"{free >> 20} MiB free beside {store.path}", "Make room; a full disk means 503."),
        Check("library", True, old or "SQLite is recent enough", "Use a newer Python or SQLite.", warning=bool(old)),
        Check("writer", True, f"process {held.pid} {held.address}".strip() if held else "nobody writes it now"),
        Check("clock", True, f"this machine says {clock.now_utc():%Y-%m-%d %H:%M:%S} UTC"),
    ]


def _folder(store: SqliteStore) -> Path:
    """Where the file is, or the nearest folder that is there already: a start makes the others."""
    return next(folder for folder in store.path.absolute().parents if folder.exists())


def _examine_rights(store: SqliteStore, folder: Path) -> Check:
    places = [folder, *([store.path] if store.path.exists() else [])]
    if all(os.access(place, os.W_OK) for place in places):
        return Check("writable", True, "may be written, and so may its folder")
    hint = "Give them to the user that oncehook runs as."
    return Check("writable", False, f"{store.path} or its folder may not be written", hint)


# -- destinations ------------------------------------------------------------------------------


async def _examine_destinations(destinations: Iterable[Destination]) -> list[Check]:
    from oncehook.destinations.http import HttpDestination

    return await asyncio.gather(*(_reach(one) for one in destinations if isinstance(one, HttpDestination)))


async def _reach(destination: HttpDestination) -> Check:
    await destination.open()
    try:
        tried = await destination.reach(REACH_SECONDS)
    except OncehookError as error:
        hint = "Deliveries to it are tried again by its policy; nothing is lost."
        return Check("reachable", True, f"{destination.name}: {error}", hint, warning=True)
    finally:
        await destination.close()
    return Check("reachable", True, f"{destination.name}: {'connected' if tried else 'not tried, behind a proxy'}")
