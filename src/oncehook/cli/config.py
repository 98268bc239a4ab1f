"""`oncehook config`: check the settings, show which ones hold and why, describe them to an editor.

Problems are lines on stderr and exit code 1; what was asked for goes to stdout. No command here ever prints the
value of a secret.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypeAlias

import click

from oncehook.errors import ConfigError
from oncehook.settings import Loaded, load

_config_option = click.option(
    "--config",
    "config_file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Settings file, instead of ./oncehook.toml.",
)
_json_option = click.option("--json", "as_json", is_flag=True, help="As one JSON document.")

Counts: TypeAlias = tuple[int, int, int]
"""How many sources, destinations and routes there are."""


@click.group("config")
def command() -> None:
    """The settings: check them, show them, describe them."""


@command.command("check")
@click.argument("app", required=False)
@_config_option
@_json_option
@click.option("--without-secrets", is_flag=True, help="Do not ask whether secrets are set: for CI, which has none.")
def check(app: str | None, config_file: Path | None, as_json: bool, without_secrets: bool) -> int:
    """Find everything that is wrong with the settings, and with APP (module:inbox) beside them; exit 1 if so."""
    if app and without_secrets:
        raise click.UsageError("An app is made with its secrets; --without-secrets is for the file alone.")
    try:
        loaded, counts = _whole(app, config_file) if app else _file(config_file, secrets=not without_secrets)
    except ConfigError as error:
        return _refuse(error, as_json)
    if as_json:
        document = {"ok": True, "origin": _origin(loaded), "problems": [], "warnings": list(loaded.warnings)}
        click.echo(json.dumps(document, indent=2, ensure_ascii=False))
        return 0
    if not app:  # loading an app tells them
        _warn(loaded)
    found = [*([app] if app else []), *([str(loaded.origin)] if loaded.origin else [])]
    click.echo(f"OK  {' and '.join(found) or 'no settings file here, defaults hold'}  {_summary(counts)}")
    return 0


def _file(config_file: Path | None, *, secrets: bool) -> tuple[Loaded, Counts]:
    loaded = load(config_file, secrets=secrets)
    config = loaded.config
    return loaded, (len(config.source), len(config.destination), len(config.route))


def _whole(app: str, config_file: Path | None) -> tuple[Loaded, Counts]:
    from oncehook.cli.setup import from_app

    setup = from_app(app, config_file)
    inbox = setup.inbox
    return setup.loaded, (len(inbox.sources), len(inbox.destinations), len(inbox.routes))


@command.command("show")
@_config_option
@_json_option
def show(config_file: Path | None, as_json: bool) -> int:
    """Show the settings that hold, and where each comes from. Secrets are shown by name only."""
    try:
        loaded = load(config_file, secrets=False, whole=False)
    except ConfigError as error:
        return _refuse(error, as_json=False)
    if as_json:
        settings = {one.name: {"value": one.value, "from": one.origin} for one in loaded.settings()}
        document = {"origin": _origin(loaded), "settings": settings, "warnings": list(loaded.warnings)}
        click.echo(json.dumps(document, indent=2, ensure_ascii=False))
        return 0
    _warn(loaded)
    click.echo(f"# {_origin(loaded) or 'no settings file here, defaults hold'}")
    rows = [(one.name, _as_text(one.value), one.origin) for one in loaded.settings()]
    name_width, value_width = (max(len(row[column]) for row in rows) for column in (0, 1))
    for name, value, origin in rows:
        click.echo(f"{name:<{name_width}}  {value:<{min(value_width, 48)}}  {click.style(origin, dim=True)}")
    return 0


@command.command("schema")
@_config_option
def schema(config_file: Path | None) -> None:
    """Print the JSON Schema of oncehook.toml, for editors. The same for every file."""
    from oncehook.settings.describe import schema as describe

    click.echo(json.dumps(describe(), indent=2, ensure_ascii=False))


@command.command("reference")
def reference() -> None:
    """Print every setting with its meaning and default, as a page in Markdown."""
    from oncehook.settings.describe import reference as page

    click.echo(page(), nl=False)


def _refuse(error: ConfigError, as_json: bool) -> int:
    problems = str(error).splitlines()
    if as_json:
        click.echo(json.dumps({"ok": False, "problems": problems}, indent=2, ensure_ascii=False))
    else:
        for problem in problems:
            click.echo(problem, err=True)
        if error.hint:
            click.echo(f"  {error.hint}", err=True)
    return 1


def _warn(loaded: Loaded) -> None:
    for warning in loaded.warnings:
        click.echo(f"warning: {warning}", err=True)


def _origin(loaded: Loaded) -> str | None:
    return str(loaded.origin) if loaded.origin else None


def _summary(counts: Counts) -> str:
    words = zip(("source", "destination", "route"), counts, strict=True)
    return ", ".join(f"{number} {word}{'' if number == 1 else 's'}" for word, number in words)


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
