"""`oncehook keys`: claim, commit, release and show a key by hand, on the store of `Claims` and `@once`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click

from oncehook.claims import Claim, Claims
from oncehook.claims.client import ENVIRONMENT, KEEP, NAMESPACE, TTL, resolve_store
from oncehook.cli.help import CommandGroup
from oncehook.cli.options import json_option
from oncehook.cli.output import answer, fields, text
from oncehook.human import show_duration


@click.group("keys", cls=CommandGroup)
def keys() -> None:
    """Claim, commit, release and show keys by hand."""


def _takes_key(command: Callable[..., int]) -> Callable[..., int]:
    """Give a command the key, its options, and the store's claims as the first argument."""

    @click.argument("key")
    @click.option("--store", envvar=ENVIRONMENT, metavar="URL", help=f"Where claims are kept ({ENVIRONMENT}).")
    @click.option("--namespace", default=NAMESPACE, show_default=True, help="Whose keys.")
    @json_option
    @functools.wraps(command)
    def run(store: str | None, namespace: str, **rest: Any) -> int:
        with Claims(resolve_store(store), namespace=namespace) as claims:
            return command(claims, **rest)

    return run


@keys.command("claim")
@_takes_key
@click.option("--ttl", default=TTL, show_default=True, help="How long it holds.")
@click.option("--payload", help="What it is for; another payload under the same key is refused.")
def claim(claims: Claims, key: str, as_json: bool, ttl: str, payload: str | None) -> int:
    """Claim KEY: exit 0 and a token when it is new, 1 when it is in progress or done."""
    found = claims.claim(key, ttl, payload)
    _print(key, found, as_json)
    return 0 if found.status == "new" else 1


@keys.command("commit")
@_takes_key
@click.option("--token", required=True, help="What `claim` gave.")
@click.option("--result", help="Text that later claims get.")
@click.option("--keep", default=KEEP, show_default=True, help="How long it is remembered.")
def commit(claims: Claims, key: str, as_json: bool, token: str, result: str | None, keep: str) -> int:
    """Mark KEY as done; exit 1 when the claim is no longer this token's."""
    kept = None if result is None else result.encode()
    claims.commit(key, token, kept, keep)
    return _print(key, Claim("done", result=kept), as_json)


@keys.command("release")
@_takes_key
@click.option("--token", help="What `claim` gave: only that claim is released.")
@click.option("--force", is_flag=True, help="Anybody's claim, and even if it is done: the work may be done twice.")
def release(claims: Claims, key: str, as_json: bool, token: str | None, force: bool) -> int:
    """Let the next one have KEY; exit 1 when there was nothing to release."""
    if (token is None) is not force:
        raise click.UsageError("Give --token, or --force to release somebody else's.")
    if token is not None:
        claims.abort(key, token)
    is_released = token is not None or claims.forget(key)
    _print(key, None, as_json)
    return 0 if is_released else 1


@keys.command("show")
@_takes_key
def show(claims: Claims, key: str, as_json: bool) -> int:
    """Show the status of KEY, without touching it; exit 1 when nobody has it."""
    found = claims.look(key)
    _print(key, found, as_json)
    return 0 if found else 1


def _print(key: str, found: Claim | None, as_json: bool) -> int:
    result = found.result if found else None
    facts = {
        "key": key,
        "status": found.status if found else "free",
        "token": found.token if found else None,
        "result": None if result is None else result.decode(errors="backslashreplace"),
        "retry_after": found.retry_after if found else None,
    }
    lapses = found.retry_after if found else None
    shown = {name: text(facts[name], 200) for name in ("key", "status", "token", "result")}
    shown["lapses in"] = "" if lapses is None else show_duration(round(lapses))
    return answer(facts, fields(shown), as_json=as_json)
