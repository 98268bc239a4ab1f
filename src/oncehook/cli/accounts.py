"""Commands about accounts: list, show, make, change, give new secrets, delete."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

from oncehook.cli.api import Api, Misused, asks_api, at
from oncehook.cli.options import json_option, wide_option, yes_option
from oncehook.cli.output import answer, fields, moment, say, table, text

_aliases_option = click.option("--alias", "aliases", multiple=True, metavar="NAME", help="What a provider calls it.")
_secrets_option = click.option(
    "--secret",
    "secrets",
    multiple=True,
    metavar="SOURCE=SECRET",
    help="What its senders sign with; SOURCE=generate makes one, shown once.",
)
_move_option = click.option("--move", is_flag=True, help="Take aliases away from other accounts.")


@click.group("accounts", invoke_without_command=True)
@wide_option
@json_option
@asks_api
def accounts(api: Api, as_json: bool) -> int:
    """List accounts; or make, change, show and delete them."""
    return _list(api, as_json) if click.get_current_context().invoked_subcommand is None else 0


def _list(api: Api, as_json: bool) -> int:
    found = list(api.pages("accounts"))
    if not (found or as_json):
        say(["no accounts: oncehook accounts create ID makes one"], err=True)
        return 0
    rows = [
        [text(one["id"]), text(one["name"], 40), text(", ".join(one["aliases"]), 60), ", ".join(one["secret_sources"])]
        for one in found
    ]
    return answer({"items": found}, table(("id", "name", "aliases", "secrets for"), rows), as_json=as_json)


@accounts.command("list")
@json_option
@asks_api
def list_accounts(api: Api, as_json: bool) -> int:
    """List accounts."""
    return _list(api, as_json)


@accounts.command("show")
@click.argument("id")
@json_option
@asks_api
def show(api: Api, id: str, as_json: bool) -> int:
    """Show one account; of its secrets only for which sources it has one."""
    found = api.get(at("accounts", id))
    return answer(found, _lines(found), as_json=as_json)


@accounts.command("create")
@click.argument("id")
@click.option("--name", default="", help="What people call it.")
@_aliases_option
@_secrets_option
@_move_option
@json_option
@asks_api
def create(
    api: Api, id: str, name: str, aliases: Sequence[str], secrets: Sequence[str], move: bool, as_json: bool
) -> int:
    """Make the account ID."""
    body = {"id": id, "name": name, "aliases": list(aliases), "secrets": _read_secrets(secrets), "move": move}
    made = api.act("POST", "accounts", body)
    return answer(made, [f"made {text(made['id'])}", *_list_secrets(made)], as_json=as_json)


@accounts.command("change")
@click.argument("id")
@click.option("--name", help="What people call it.")
@_aliases_option
@click.option("--no-aliases", is_flag=True, help="It has none any more.")
@_secrets_option
@click.option("--enable/--disable", "enabled", default=None, help="Keep it, but as if it were not there; or undo that.")
@_move_option
@json_option
@asks_api
def change(
    api: Api,
    id: str,
    name: str | None,
    aliases: Sequence[str],
    no_aliases: bool,
    secrets: Sequence[str],
    enabled: bool | None,
    move: bool,
    as_json: bool,
) -> int:
    """Change the account ID. The aliases given are all that it has then; SOURCE= takes a secret away."""
    listed = list(aliases) if aliases or no_aliases else None
    given = {"name": name, "aliases": listed, "secrets": _read_secrets(secrets) or None, "enabled": enabled}
    body = {word: value for word, value in given.items() if value is not None}
    if not body:
        raise Misused("Say what to change.", hint="--name, --alias, --secret, --enable or --disable.")
    changed = api.act("PATCH", at("accounts", id), {**body, "move": move})
    return answer(changed, [f"changed {text(changed['id'])}", *_list_secrets(changed)], as_json=as_json)


@accounts.command("rotate")
@click.argument("id")
@click.argument("source")
@click.option("--overlap", default="1h", show_default=True, help="How long the old secret is still valid.")
@json_option
@asks_api
def rotate(api: Api, id: str, source: str, overlap: str, as_json: bool) -> int:
    """Give the account ID a new secret for SOURCE, which is shown once; the old one is valid for a while."""
    made = api.act("POST", at("accounts", id, "rotate"), {"source": source, "overlap": overlap})
    return answer(made, [f"rotated {text(made['id'])}", *_list_secrets(made)], as_json=as_json)


@accounts.command("delete")
@click.argument("ids", nargs=-1, required=True, metavar="ID...")
@yes_option
@json_option
@asks_api
def delete(api: Api, ids: Sequence[str], yes: bool, as_json: bool) -> int:
    """Delete accounts, their names and secrets. Their events stay: see oncehook erase --account ID."""
    api.confirm(f"Delete {text(', '.join(ids))}?", yes=yes)
    deleted = [api.act("DELETE", at("accounts", one), None) for one in ids]
    return answer({"items": deleted}, [f"deleted {text(one['name'])}" for one in deleted], as_json=as_json)


def _read_secrets(pairs: Sequence[str]) -> dict[str, str | None]:
    secrets: dict[str, str | None] = {}
    for pair in pairs:
        source, sign, secret = pair.partition("=")
        if not sign or not source:
            raise Misused("A secret is given as SOURCE=SECRET.", hint="For example: --secret shopify=generate")
        secrets[source] = secret or None
    return secrets


def _list_secrets(made: Mapping[str, Any]) -> list[str]:
    return [f"  {text(source)}: {secret}  (shown once)" for source, secret in made["secrets"].items()]


def _lines(found: Mapping[str, Any]) -> list[str]:
    facts = {
        "name": text(found["name"]),
        "aliases": text(", ".join(found["aliases"]), 1000),
        "secrets for": ", ".join(found["secret_sources"]),
        "state": "" if found["enabled"] else "disabled",
        "made": moment(found["created_at"]),
        "changed": moment(found["changed_at"]),
    }
    return [text(found["id"]), *fields(facts, "  ")]
