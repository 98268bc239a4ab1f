"""`oncehook keys`: claim, commit, release and show a key by hand, on the store of `Claims` and `@once`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from oncehook.claims import Claim, Claims
from oncehook.claims.client import ENVIRONMENT, KEEP, NAMESPACE, TTL, named_store
from oncehook.cli.api import json_option
from oncehook.cli.showing import document, fields, say, text
from oncehook.human import words

_KEYS = (
    click.argument("key"),
    click.option("--store", envvar=ENVIRONMENT, metavar="URL", help=f"Where claims are kept ({ENVIRONMENT})."),
    click.option("--namespace", default=NAMESPACE, show_default=True, help="Whose keys."),
    json_option,
)


def _about_a_key(command: Callable[..., int]) -> Callable[..., int]:
    for option in reversed(_KEYS):
        command = option(command)
    return command


@click.group("keys")
def command() -> None:
    """Claim, commit, release and show keys by hand."""


@command.command("claim")
@_about_a_key
@click.option("--ttl", default=TTL, show_default=True, help="How long it holds.")
@click.option("--payload", help="What it is for; another payload under the same key is refused.")
def claim(key: str, store: str | None, namespace: str, as_json: bool, ttl: str, payload: str | None) -> int:
    """Be first with KEY: exit 0 and a token when it is new, 1 when it is in progress or done."""
    with Claims(named_store(store), namespace=namespace) as claims:
        found = claims.claim(key, ttl, payload)
    _tell(key, found, as_json)
    return 0 if found.status == "new" else 1


@command.command("commit")
@_about_a_key
@click.option("--token", required=True, help="What `claim` gave.")
@click.option("--result", help="Text that later claims get.")
@click.option("--keep", default=KEEP, show_default=True, help="How long it is remembered.")
def commit(
    key: str, store: str | None, namespace: str, as_json: bool, token: str, result: str | None, keep: str
) -> int:
    """KEY is done; exit 1 when the claim is no longer this token's."""
    kept = None if result is None else result.encode()
    with Claims(named_store(store), namespace=namespace) as claims:
        claims.commit(key, token, kept, keep)
    _tell(key, Claim("done", result=kept), as_json)
    return 0


@command.command("release")
@_about_a_key
@click.option("--token", help="What `claim` gave: only that claim is released.")
@click.option("--force", is_flag=True, help="Whoever has it, and even if it is done: the work may be done twice.")
def release(key: str, store: str | None, namespace: str, as_json: bool, token: str | None, force: bool) -> int:
    """Let the next one have KEY; exit 1 when there was nothing to release."""
    if (token is None) is not force:
        raise click.UsageError("Give --token, or --force to release somebody else's.")
    with Claims(named_store(store), namespace=namespace) as claims:
        released = True
        if token is not None:
            claims.abort(key, token)
        else:
            released = claims.forget(key)
    _tell(key, None, as_json)
    return 0 if released else 1


@command.command("show")
@_about_a_key
def show(key: str, store: str | None, namespace: str, as_json: bool) -> int:
    """Show how KEY stands, without touching it; exit 1 when nobody has it."""
    with Claims(named_store(store), namespace=namespace) as claims:
        found = claims.look(key)
    _tell(key, found, as_json)
    return 0 if found else 1


def _tell(key: str, found: Claim | None, as_json: bool) -> None:
    said = _said(key, found)
    if as_json:
        say([document(said)])
        return
    lapses = said["retry_after"]
    shown = {name: text(said[name], 200) for name in ("key", "status", "token", "result")}
    say(fields({**shown, "lapses in": "" if lapses is None else words(round(lapses))}))


def _said(key: str, found: Claim | None) -> dict[str, Any]:
    result = found.result if found else None
    return {
        "key": key,
        "status": found.status if found else "free",
        "token": found.token if found else None,
        "result": None if result is None else result.decode(errors="backslashreplace"),
        "retry_after": found.retry_after if found else None,
    }
