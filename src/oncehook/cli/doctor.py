"""`oncehook doctor`: one line per check, each failure with what to do."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import click

from oncehook import clock
from oncehook.assembly import open_store
from oncehook.cli.setup import config_option
from oncehook.config import load
from oncehook.errors import OncehookError
from oncehook.inbox import Inbox
from oncehook.model import Check, Engine
from oncehook.store.base import Store

LEAST_FREE = 256 << 20
"""Below this much free disk the doctor worries."""


@click.command("doctor")
@config_option
@click.option("--json", "as_json", is_flag=True, help="As one JSON document.")
def command(config_file: Path | None, as_json: bool) -> int:
    """Look at settings, secrets, store, schema, disk and clock, and count everything that must add up."""
    checks = asyncio.run(_examine(config_file))
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


async def _examine(config_file: Path | None) -> list[Check]:
    try:
        loaded = load(config_file)
        inbox = Inbox.from_config(loaded.config)
    except OncehookError as error:
        return [Check("settings", False, str(error), error.hint)]
    detail = f"{loaded.origin or 'defaults'}: {len(inbox.sources)} sources, {len(inbox.routes)} routes, secrets set"
    return [Check("settings", True, detail), *await _examine_store(open_store(loaded.config.store))]


async def _examine_store(store: Store) -> list[Check]:
    try:
        state = await store.schema_state()
        reached = f"version {state.current} of {state.target}"
        if state.pending:
            return [Check("schema", False, reached, "Run: oncehook db migrate")]
        await store.open(migrate=False, write=False)
        checks = [Check("schema", True, reached), *await store.check()]
        return checks + (_examine_file(store) if store.engine is Engine.sqlite else [])
    except OncehookError as error:
        return [Check("store", False, str(error), error.hint)]
    finally:
        await store.close()


def _examine_file(store: Store) -> list[Check]:
    from oncehook.store.sqlite import SqliteStore
    from oncehook.store.sqlite.hold import holder
    from oncehook.store.sqlite.opening import warn_of_old_library

    assert isinstance(store, SqliteStore)
    free = shutil.disk_usage(store.path.parent).free
    enough = free >= LEAST_FREE
    old = warn_of_old_library()
    held = holder(store.path)
    return [
        Check("disk", enough, f"{free >> 20} MiB free beside {store.path}", "Make room; a full disk means 503."),
        Check("library", True, old or "SQLite is recent enough", "Use a newer Python or SQLite.", warning=bool(old)),
        Check("writer", True, f"process {held.pid} {held.address}".strip() if held else "nobody writes it now"),
        Check("clock", True, f"this machine says {clock.now_utc():%Y-%m-%d %H:%M:%S} UTC"),
    ]
