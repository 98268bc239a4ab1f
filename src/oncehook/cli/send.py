"""`oncehook send`: a signed, realistic sample, to our own server or to any address."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from oncehook.cli.setup import address_of, config_option, from_app, from_settings
from oncehook.errors import ConfigError

if TYPE_CHECKING:  # presets bring much with them: --help must not wait for that
    from oncehook.model import Arrival
    from oncehook.sources import Source


@click.command("send")
@click.argument("source", required=False)
@click.argument("type", required=False)
@config_option
@click.option("--app", metavar="MODULE:INBOX", help="The inbox that a program makes, instead of the settings'.")
@click.option("--to", "url", help="Where to send it (default: the server of these settings).")
@click.option(
    "--file",
    "file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Body to send instead of a sample.",
)
@click.option("--batch", is_flag=True, help="Several events in one request, where the provider batches (TYPE batch).")
@click.option("--repeat", type=click.IntRange(1, 100_000), default=1, help="Send the very same hook this often.")
@click.option("--bad-signature", is_flag=True, help="Sign it wrongly, to see it refused.")
@click.option("--list", "listing", is_flag=True, help="Show what can be sent, or what to SOURCE.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per answer on stdout.")
def command(
    source: str | None,
    type: str | None,
    config_file: Path | None,
    app: str | None,
    url: str | None,
    file: Path | None,
    batch: bool,
    repeat: int,
    bad_signature: bool,
    listing: bool,
    as_json: bool,
) -> int:
    """Send a hook of TYPE to SOURCE, signed as its sender would.

    With --to, SOURCE may also be a preset that is not configured here: it is then signed with the development secret.
    """
    setup = from_app(app, config_file) if app else from_settings(config_file)
    if listing:
        if source is None:
            _list(setup.inbox.sources)
        else:
            _list_one(source, _choose(setup.inbox.sources, source, may_be_preset=True))
        return 0
    if source is None:
        raise click.UsageError("Which source? `oncehook send --list` shows them.")
    if batch and type not in (None, "batch"):
        raise click.UsageError("--batch is a type of its own: leave TYPE out.")
    chosen = _choose(setup.inbox.sources, source, may_be_preset=url is not None)
    target = url or f"{address_of(setup.config.server)}/in/{chosen.path}"
    arrival = _signed(chosen, "batch" if batch else type, file, target, bad_signature)
    answers = [_send_one(target, arrival, as_json) for _ in range(repeat)]
    wanted = range(400, 500) if bad_signature else range(200, 300)
    return 0 if all(status in wanted for status in answers) else 1


def _choose(sources: dict[str, Source], name: str, *, may_be_preset: bool) -> Source:
    from oncehook import presets

    if name in sources:
        return sources[name]
    if name not in presets.names():
        raise ConfigError(f'There is no source "{name}".', hint=f"There are: {', '.join(sources)}.")
    if not may_be_preset:
        raise ConfigError(
            f'"{name}" is a preset, but no source of these settings.', hint="Say where to send it with --to URL."
        )
    from oncehook.settings import development

    return development.source(name)


def _signed(source: Source, kind: str | None, file: Path | None, url: str, forge: bool) -> Arrival:
    from oncehook import samples

    known = source.preset.samples if source.preset else {}
    kind = kind or next(iter(known), "hello")
    arrival = samples.draft(source, kind, body=file.read_bytes() if file else None)
    signed = samples.sign(source, arrival, url=samples.signed_url(source, url), forge=forge)
    own = [(b"host", _host(url)), (b"user-agent", b"oncehook-send")]
    sent = {name for name, _ in signed.headers}
    return replace(signed, headers=[*signed.headers, *(pair for pair in own if pair[0] not in sent)])


def _host(url: str) -> bytes:
    from urllib.parse import urlsplit

    return urlsplit(url).netloc.rpartition("@")[2].encode()


def _send_one(url: str, arrival: Arrival, as_json: bool) -> int:
    from oncehook import samples

    try:
        answer = samples.post(url, arrival)
    except OSError as error:
        click.echo(f"oncehook: nobody answers at {url} ({error})", err=True)
        click.echo("  Start it with: oncehook serve", err=True)
        raise SystemExit(3) from error
    fields = answer.json()
    if as_json:
        click.echo(json.dumps({"http_status": answer.status, **fields}))
        return answer.status
    click.echo(f"→ {answer.status} in {answer.seconds * 1000:.0f} ms   {_said(fields, answer.body)}")
    return answer.status


def _said(fields: dict[str, Any], body: bytes) -> str:
    """What the answer says, in a line: the event, or how many of a batch were new, or the reason it was refused."""
    if ids := fields.get("event_ids"):
        counts = ", ".join(
            f"{fields[word]} {word}" for word in ("accepted", "duplicates", "conflicts") if fields.get(word)
        )
        return f"{ids[0]} and {len(ids) - 1} more   {counts}"
    what = fields.get("status") or fields.get("code") or body.decode("utf-8", "replace")[:60]
    return f"{fields['event_id']}   {what}" if "event_id" in fields else str(what)


def _list_one(name: str, source: Source) -> None:
    click.echo(f"{name:<20} {', '.join(source.preset.samples) if source.preset else 'any type'}")


def _list(sources: dict[str, Source]) -> None:
    from oncehook import presets

    for name, source in sources.items():
        _list_one(name, source)
    others = [name for name in presets.names() if name not in sources]
    if others:
        click.echo("Not configured here, with --to URL:", err=True)
    for name in others:
        click.echo(f"{name:<20} {', '.join(presets.load(name).samples)}")
