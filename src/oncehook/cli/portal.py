"""The command about the portal, the page of customers: make a link."""

from __future__ import annotations

import click

from oncehook.cli.api import Api, asks_api, at
from oncehook.cli.options import json_option
from oncehook.cli.output import answer


@click.group("portal")
def portal() -> None:
    """Let a customer in: the dashboard, narrowed to one account."""


@portal.command("link")
@click.option("--account", required=True, metavar="ID", help="The account that it shows.")
@click.option("--name", default="", help="Who gets it, for the audit log.")
@click.option("--expires", default="10m", show_default=True, help="How long it is valid, a day at most.")
@json_option
@asks_api
def link(api: Api, account: str, name: str, expires: str, as_json: bool) -> int:
    """Make a link to the portal of an account. It works once.

    Who opens it sees the account's destinations and their deliveries for two hours, and nothing else.
    """
    made = api.act("POST", at("accounts", account, "portal"), {"name": name, "expires": expires})
    return answer(made, [made["url"]], as_json=as_json)
