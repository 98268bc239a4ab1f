"""`oncehook serve`: receive hooks until told to stop."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from oncehook.cli.setup import Setup, config_option, from_app, from_settings
from oncehook.config.forms import is_loopback
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
    # As flags of the settings, so that the checks see the address that is really listened on (S28).
    flags = {"server.host": host, "server.port": port, "server.log_level": log_level}
    setup = from_app(app, config_file, flags) if app else from_settings(config_file, flags)
    server = setup.config.server
    if setup.development and not is_loopback(server.host):
        raise ConfigError("Without settings, serve listens on this machine only.", hint="Write an oncehook.toml first.")
    if setup.inbox.routes:
        click.echo(
            "warning: what your routes ask for is recorded and waits; no worker of this version does it", err=True
        )
    setup.inbox.observer.verbose = set_up_logging(server.log_level)
    run(setup)


def run(setup: Setup) -> None:
    """Serve until a signal comes."""
    import uvloop

    uvloop.run(_serve(setup))


async def _serve(setup: Setup) -> None:
    from oncehook.web.server import serve_inbox

    server = setup.config.server
    async with setup.inbox.running():
        await serve_inbox(
            setup.inbox,
            host=server.host,
            port=server.port,
            trusted=server.trusted_proxies,
            on_ready=lambda address: _greet(setup, address),
        )


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
