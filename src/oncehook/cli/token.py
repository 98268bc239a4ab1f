"""`oncehook token`: a fresh bearer token, and the lines of oncehook.toml that let it in.

The token is printed once and kept nowhere: the settings name the environment variable that holds it, and a running
server knows only its hash.
"""

from __future__ import annotations

import re

import click
import msgspec

from oncehook.secret import new_token


@click.command("token")
@click.argument("name")
@click.option("--role", type=click.Choice(["viewer", "operator", "admin"]), default="viewer", help="What it may do.")
@click.option("--json", "as_json", is_flag=True, help="As one JSON document.")
def command(name: str, role: str, as_json: bool) -> None:
    """Make a bearer token for NAME: somebody or something that may use the API.

    Put the token into the environment of the server, and the lines into oncehook.toml.
    """
    token = new_token()
    variable = "ONCEHOOK_TOKEN_" + (re.sub(r"[^A-Z0-9]+", "_", name.upper()).strip("_") or "X")
    if as_json:
        fields = {"name": name, "role": role, "token": token, "variable": variable}
        click.echo(msgspec.json.encode(fields))
        return
    click.echo(token)
    shown = msgspec.json.encode(name).decode()
    click.echo(f"Shown this once. In the server's environment: {variable}\nIn oncehook.toml:\n", err=True)
    click.echo(f'[[server.tokens]]\nname = {shown}\nrole = "{role}"\ntoken = {{ env = "{variable}" }}', err=True)
