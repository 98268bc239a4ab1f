"""`oncehook serve`: receive hooks until told to stop."""

from __future__ import annotations

import sys
from ipaddress import ip_address
from pathlib import Path

import click

from oncehook.cli.setup import Setup, config_option, from_app, from_settings
from oncehook.config import check_bind
from oncehook.errors import ConfigError
from oncehook.observe import set_up_logging


@click.command("serve")
@click.argument("app", required=False)
@config_option
@click.option("--host", help="Address to listen on (default: 127.0.0.1).", show_envvar=True)
@click.option(
    "--port", type=click.IntRange(0, 65535), help="Port to listen on (default: 4020; 0: any).", show_envvar=True
)
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), help="What to log.")
def command(
    app: str | None, config_file: Path | None, host: str | None, port: int | None, log_level: str | None
) -> None:
    """Receive hooks and keep them: everything from oncehook.toml, or from APP (module:inbox)."""
    setup = from_app(app, config_file) if app else from_settings(config_file)
    server = setup.config.server
    bind = host or server.host
    check_bind(setup.config, bind)
    if setup.development and not _is_loopback(bind):
        raise ConfigError("Without settings, serve listens on this machine only.", hint="Write an oncehook.toml first.")
    setup.inbox.observer.verbose = set_up_logging(log_level or server.log_level)
    try:
        run(setup, bind, server.port if port is None else port)
    except OSError as error:
        raise ConfigError(f"Cannot listen on {bind}: {error.strerror or error}") from error


def run(setup: Setup, host: str, port: int) -> None:
    """Serve until a signal comes."""
    import uvloop

    uvloop.run(_serve(setup, host, port))


async def _serve(setup: Setup, host: str, port: int) -> None:
    from oncehook.web import health, server
    from oncehook.web.ingest import Ingest

    inbox = setup.inbox
    trusted = setup.config.server.trusted_proxies or ()
    async with inbox.running():
        ingest = Ingest(inbox.receiver, "/in/", server.peer_finder(trusted))
        face = server.Face(ingest, health.routes(inbox.troubles, inbox.metrics))

        def ready(address: str) -> None:
            inbox.announce(address)
            _greet(setup, address)

        def stopping() -> None:
            inbox.draining = True

        await server.serve(face, host=host, port=port, trusted=trusted, on_ready=ready, on_stop=stopping)


def _greet(setup: Setup, address: str) -> None:
    lines = [("store", setup.config.shown_store), ("receive", f"{address}/in/{{source}}")]
    if setup.development:
        lines.append(("note", "no oncehook.toml here: every preset under its own name, from this machine only"))
        lines.append(("try", "oncehook send dev hello --repeat 2"))
    else:
        lines.append(("sources", ", ".join(setup.inbox.sources) or "none yet"))
        lines.append(("settings", setup.origin))
    if sys.stderr.isatty():
        for name, text in lines:
            click.echo(f"  {name:<10} {text}", err=True)
    else:
        click.echo(f"oncehook ready on {address}", err=True)


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
