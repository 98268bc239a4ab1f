"""`oncehook send`: a signed, realistic sample, to our own server or to any address."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import click

from oncehook import sending
from oncehook.cli.setup import address_of, config_option, from_settings
from oncehook.errors import ConfigError
from oncehook.model import Arrival
from oncehook.sources import Source


@click.command("send")
@click.argument("source", required=False)
@click.argument("type", required=False)
@config_option
@click.option("--to", "url", help="Where to send it (default: the server of these settings).")
@click.option(
    "--file",
    "file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Body to send instead of a sample.",
)
@click.option("--repeat", type=click.IntRange(1, 100_000), default=1, help="Send the very same hook this often.")
@click.option("--bad-signature", is_flag=True, help="Sign it wrongly, to see it refused.")
@click.option("--list", "listing", is_flag=True, help="Show what can be sent.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per answer on stdout.")
def command(
    source: str | None,
    type: str | None,
    config_file: Path | None,
    url: str | None,
    file: Path | None,
    repeat: int,
    bad_signature: bool,
    listing: bool,
    as_json: bool,
) -> int:
    """Send a hook of TYPE to SOURCE, signed as its sender would."""
    setup = from_settings(config_file)
    if listing:
        _list(setup.inbox.sources)
        return 0
    if source is None:
        raise click.UsageError("Which source? `oncehook send --list` shows them.")
    if source not in setup.inbox.sources:
        raise ConfigError(f'There is no source "{source}".', hint=f"There are: {', '.join(setup.inbox.sources)}.")
    chosen = setup.inbox.sources[source]
    target = url or f"{address_of(setup.config.server)}/in/{chosen.path}"
    arrival = _signed(chosen, type, file, target, bad_signature)
    answers = [_send_one(target, arrival, as_json) for _ in range(repeat)]
    wanted = range(400, 500) if bad_signature else range(200, 300)
    return 0 if all(status in wanted for status in answers) else 1


def _signed(source: Source, kind: str | None, file: Path | None, url: str, forge: bool) -> Arrival:
    samples = source.preset.samples if source.preset else {}
    kind = kind or next(iter(samples), "hello")
    arrival = sending.draft(source, kind, body=file.read_bytes() if file else None)
    signed = sending.sign(source, arrival, url=source.public_url or url, forge=forge)
    return replace(signed, headers=[*signed.headers, (b"host", _host(url)), (b"user-agent", b"oncehook-send")])


def _host(url: str) -> bytes:
    from urllib.parse import urlsplit

    return urlsplit(url).netloc.rpartition("@")[2].encode()


def _send_one(url: str, arrival: Arrival, as_json: bool) -> int:
    try:
        answer = sending.post(url, arrival)
    except OSError as error:
        click.echo(f"oncehook: nobody answers at {url} ({error})", err=True)
        click.echo("  Start it with: oncehook serve", err=True)
        raise SystemExit(3) from error
    fields = answer.json()
    if as_json:
        click.echo(json.dumps({"http_status": answer.status, **fields}))
        return answer.status
    what = fields.get("status") or fields.get("code") or answer.body.decode("utf-8", "replace")[:60]
    ids = fields.get("event_id") or ", ".join(fields.get("event_ids", ()))
    click.echo(f"→ {answer.status} in {answer.seconds * 1000:.0f} ms   {ids}   {what}")
    return answer.status


def _list(sources: dict[str, Source]) -> None:
    for name, source in sources.items():
        samples = ", ".join(source.preset.samples) if source.preset else "any type"
        click.echo(f"{name:<20} {samples}")
