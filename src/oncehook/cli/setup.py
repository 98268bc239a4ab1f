"""What several commands begin with: which settings hold, and the inbox they describe."""

from __future__ import annotations

import gc
import importlib
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from oncehook.errors import ConfigError

if TYPE_CHECKING:  # settings and inbox bring everything with them: a command's --help must not wait for that
    from oncehook.inbox import Inbox
    from oncehook.settings import Config, Loaded, ServerConfig

OTHER_STORE: Final = "A program's own store is found with --app module:inbox, another one by ONCEHOOK_STORE."
"""Said where nothing names a store, and nothing is in the usual one."""

config_option = click.option(
    "--config",
    "config_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Settings file, instead of ./oncehook.toml.",
)


@dataclass(slots=True)
class Setup:
    """An inbox, the settings it came from, and whether there were any."""

    inbox: Inbox
    loaded: Loaded
    config: Config
    """As it holds: the store is the inbox's."""
    origin: str
    development: bool = False


def from_settings(config_file: Path | None, flags: Mapping[str, object] | None = None) -> Setup:
    """The inbox that the settings describe; without any, the development inbox. `flags` lie over the settings."""
    from oncehook.inbox import Inbox
    from oncehook.settings import load

    loaded = load(config_file, flags=flags)
    for warning in loaded.warnings:
        click.echo(f"warning: {warning}", err=True)
    inbox = Inbox.from_config(loaded.config)
    if loaded.origin is not None or inbox.sources:
        return Setup(inbox, loaded, loaded.config, str(loaded.origin or "environment"))
    from oncehook.settings import development

    for source in development.sources():
        inbox.add(source)
    return Setup(inbox, loaded, loaded.config, "development", development=True)


def from_app(target: str, config_file: Path | None, flags: Mapping[str, object] | None = None) -> Setup:
    """The inbox that a program made (`module:attribute`), and beside it what the settings define: the two are one.

    One that was made with `Inbox.from_toml` has had its file already.
    """
    import msgspec

    inbox = _made_by(target)
    loaded = _settings_beside(inbox, target, config_file, flags)
    for warning in [*loaded.warnings, *_unused_store(inbox, target, loaded)]:
        click.echo(f"warning: {warning}", err=True)
    if inbox.settings is None and inbox.takes_settings:
        inbox.add_settings(loaded, target)
    inbox.check_names()
    origin = f"{target} and {loaded.origin}" if loaded.origin and inbox.settings else target
    return Setup(inbox, loaded, msgspec.structs.replace(loaded.config, store=inbox.store_url), origin)


def _made_by(target: str) -> Inbox:
    from oncehook.inbox import Inbox

    module_name, _, attribute = target.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(importlib.import_module(module_name), attribute or "inbox")
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"{target} cannot be loaded: {error}", hint="Write module:attribute, as in app:inbox."
        ) from error
    if not isinstance(found, Inbox):
        raise ConfigError(f"{target} is a {type(found).__name__}, not an Inbox.")
    return found


def _settings_beside(inbox: Inbox, target: str, config_file: Path | None, flags: Mapping[str, object] | None) -> Loaded:
    """The one file that counts: the app's own, where it was made from one."""
    from oncehook.settings import load

    own = inbox.settings.origin if inbox.settings else None
    if own and config_file and config_file.resolve() != own.resolve():
        raise ConfigError(f"{target} was made from {own}, and --config names {config_file}.", hint="One file counts.")
    return load(config_file or own, flags=flags, whole=False)


def _unused_store(inbox: Inbox, target: str, loaded: Loaded) -> list[str]:
    from oncehook.settings.build import is_same_store
    from oncehook.settings.values import hide_password

    place = loaded.where("store")
    if not place.startswith("environment") or is_same_store(inbox.store_url, loaded.config.store):
        return []
    return [f"{place}: not used, since {target} keeps its events in {hide_password(inbox.store_url)}"]


def address_of(server: ServerConfig) -> str:
    """Where commands on this machine find the server of these settings."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(server.host, server.host)  # noqa: S104 - told apart, not bound
    return f"http://[{host}]:{server.port}" if ":" in host else f"http://{host}:{server.port}"


def settle_in() -> None:
    """Everything is loaded, and stays: the garbage collector need not walk through it again and again. Its pauses were
    half of the slowest answers under load."""
    gc.collect()
    gc.freeze()


def leave(inbox: Inbox) -> None:
    """End this process now if a handler's thread is still at work.

    Python would wait for it, while its lease runs out and somebody else begins beside it (DESIGN.md 8.16).
    """
    if inbox.left_behind:
        logging.shutdown()
        os._exit(0)
