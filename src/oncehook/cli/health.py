"""`oncehook health`: one exit code for probes."""

from __future__ import annotations

from pathlib import Path

import click

from oncehook.cli.setup import config_option
from oncehook.config import load
from oncehook.model import Arrival
from oncehook.sending import post


@click.command("health")
@config_option
@click.option("--server", "address", help="Address of the server (default: that of these settings).", show_envvar=True)
def command(config_file: Path | None, address: str | None) -> int:
    """Exit 0 when the server is ready, 1 when it is not, 3 when nobody answers."""
    server = load(config_file, secrets=False).config.server
    address = address or f"http://{server.host}:{server.port}"
    try:
        answer = post(f"{address}/readyz", Arrival("", [(b"host", b"localhost")], b"", method="GET"), timeout=5)
    except OSError as error:
        click.echo(f"oncehook: nobody answers at {address} ({error})", err=True)
        return 3
    click.echo(answer.json().get("status", "not an oncehook server"))
    return 0 if answer.status == 200 else 1
