"""`oncehook token`: a fresh bearer token, and the lines of oncehook.toml that let it in.

The token is printed once and kept nowhere: the settings name the environment variable that holds it, and a running
server knows only its hash.
"""

from __future__ import annotations

import re
from datetime import timedelta

import click
import msgspec

from oncehook import clock
from oncehook.model import ROLES
from oncehook.secret import new_token
from oncehook.settings.values import duration


@click.command("token")
@click.argument("name")
@click.option("--role", type=click.Choice(ROLES), default="viewer", help="What it may do.")
@click.option("--expires", metavar="DURATION", help='After how long it ends, as in "90d".')
@click.option("--sources", metavar="NAMES", help="The only sources it sees and acts on, as in stripe,github.")
@click.option("--no-payloads", is_flag=True, help="It sees events, but neither bodies nor header values.")
@click.option("--json", "as_json", is_flag=True, help="As one JSON document.")
def command(name: str, role: str, expires: str | None, sources: str | None, no_payloads: bool, as_json: bool) -> None:
    """Make a bearer token for NAME: somebody or something that may use the API.

    Put the token into the environment of the server, and the lines into oncehook.toml.
    """
    token = new_token()
    variable = "ONCEHOOK_TOKEN_" + (re.sub(r"[^A-Z0-9]+", "_", name.upper()).strip("_") or "X")
    limits = _limits(expires, sources, no_payloads)
    if as_json:
        fields = {"name": name, "role": role, "token": token, "variable": variable, **limits}
        click.echo(msgspec.json.encode(fields))
        return
    click.echo(token)
    shown = msgspec.json.encode(name).decode()
    click.echo(f"Shown this once. In the server's environment: {variable}\nIn oncehook.toml:\n", err=True)
    lines = [f"name = {shown}", f'role = "{role}"', f'token = {{ env = "{variable}" }}']
    lines += [f"{key} = {msgspec.json.encode(value).decode()}" for key, value in limits.items()]
    click.echo("\n".join(["[[server.tokens]]", *lines]), err=True)


def _limits(expires: str | None, sources: str | None, no_payloads: bool) -> dict[str, object]:
    """The settings of a token that has limits."""
    limits: dict[str, object] = {}
    if expires is not None:
        ends = clock.now_utc() + timedelta(seconds=duration(expires))
        limits["expires"] = f"{ends:%Y-%m-%dT%H:%M:%SZ}"
    if sources is not None:
        limits["sources"] = [name.strip() for name in sources.split(",") if name.strip()]
        if not limits["sources"]:
            raise click.UsageError("Which sources? Name them as in --sources stripe,github.")
    return limits | ({"payloads": False} if no_payloads else {})
