"""`oncehook health`: one exit code for probes."""

from __future__ import annotations

from pathlib import Path

import click

from oncehook.cli.setup import address_of, config_option


@click.command("health")
@config_option
@click.option("--server", "address", help="Address of the server (default: that of these settings).", show_envvar=True)
def command(config_file: Path | None, address: str | None) -> int:
    """Exit 0 when the server is ready, 1 when it is not, 3 when nobody answers."""
    from oncehook.model import Arrival
    from oncehook.samples import post
    from oncehook.settings import load

    address = (address or address_of(load(config_file, secrets=False, whole=False).config.server)).rstrip("/")
    try:
        answer = post(f"{address}/readyz", Arrival("", [], b"", method="GET"), timeout=5)
    except OSError as error:
        click.echo(f"oncehook: nobody answers at {address} ({error})", err=True)
        return 3
    click.echo(answer.json().get("status", "not an oncehook server"))
    return 0 if answer.status == 200 else 1
