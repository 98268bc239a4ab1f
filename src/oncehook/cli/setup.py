"""What several commands begin with: which settings hold, and the inbox they describe."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from oncehook.errors import ConfigError

if TYPE_CHECKING:  # settings and inbox bring everything with them: a command's --help must not wait for that
    from oncehook.config import Config, ServerConfig
    from oncehook.inbox import Inbox

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
    config: Config
    origin: str
    development: bool = False


def from_settings(config_file: Path | None, flags: Mapping[str, object] | None = None) -> Setup:
    """The inbox that the settings describe; without any, the development inbox. `flags` lie over the settings."""
    from oncehook.config import load
    from oncehook.inbox import Inbox

    loaded = load(config_file, flags=flags)
    for warning in loaded.warnings:
        click.echo(f"warning: {warning}", err=True)
    inbox = Inbox.from_config(loaded.config)
    if loaded.origin is not None or inbox.sources:
        return Setup(inbox, loaded.config, str(loaded.origin or "environment"))
    from oncehook import development

    for source in development.sources():
        inbox.add(source)
    return Setup(inbox, loaded.config, "development", development=True)


def from_app(target: str, config_file: Path | None, flags: Mapping[str, object] | None = None) -> Setup:
    """The inbox that a program made: `module:attribute`. Where it listens is still said by settings and flags."""
    from oncehook.config import load
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
    return Setup(found, load(config_file, flags=flags).config, target)


def address_of(server: ServerConfig) -> str:
    """Where commands on this machine find the server of these settings."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(server.host, server.host)  # noqa: S104 - told apart, not bound
    return f"http://[{host}]:{server.port}" if ":" in host else f"http://{host}:{server.port}"


def leave(inbox: Inbox) -> None:
    """End this process now if a handler's thread is still at work.

    Python would wait for it, while its lease runs out and somebody else begins beside it (DESIGN.md 8.16).
    """
    if inbox.left_behind:
        logging.shutdown()
        os._exit(0)
