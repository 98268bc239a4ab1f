"""`oncehook send`: a signed, realistic sample, to our own server or to any address."""

from __future__ import annotations

import contextlib
import fnmatch
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from oncehook import clock
from oncehook.cli.api import Api, Failed, Misused, Unreachable, at, speaks
from oncehook.cli.options import address_of, config_option, from_app, from_settings
from oncehook.cli.output import line, say, text
from oncehook.cli.tail import Feed, Moment, feed, told
from oncehook.errors import ConfigError

if TYPE_CHECKING:
    from oncehook.model import Arrival
    from oncehook.sources import Source

SKEW: Final = timedelta(seconds=30)
"""How far the clocks of this machine and of the inbox may be apart."""


@click.command("forward")
@click.argument("source")
@click.option(
    "--to", "url", required=True, metavar="URL", help="Where to send them, as in http://localhost:8000/hooks."
)
@click.option("--type", "types", multiple=True, metavar="TYPE", help="Only of this type (message.*); may be repeated.")
@click.option("--timeout", type=click.FloatRange(0, min_open=True), default=30.0, show_default=True, help="Seconds.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
@speaks
def forward(api: Api, source: str, url: str, types: tuple[str, ...], timeout: float, as_json: bool) -> int:
    """Relay what SOURCE accepts from now on to a local server, until Ctrl-C.

    Sent as a destination would send it: the body as received, webhook-id, and a signature by the secret it prints.
    """
    moments = feed(api)
    _check(api, source)
    relay = Relay(api, source, url, types, timeout)
    with contextlib.suppress(KeyboardInterrupt):
        say([f"forwarding {source} to {url}; Ctrl-C ends", f"  secret  {relay.secret}"], err=True)
        _follow(moments, relay, as_json)
    return 0


def _check(api: Api, source: str) -> None:
    known = [one["name"] for one in api.get("sources")["items"]]
    if source not in known:
        raise Misused(f'There is no source "{text(source)}".', hint=f"There are: {', '.join(map(text, known))}.")


def _follow(moments: Feed, relay: Relay, as_json: bool) -> None:
    while True:
        for kind, fields in moments.take(3600):
            if kind in ("lost", "back", "dropped"):
                say([told(kind, fields, clock.now_utc())], err=True)
            for sent in relay.pass_on((kind, fields)):
                say([line(sent) if as_json else relay_line(sent)])


def relay_line(sent: Mapping[str, Any]) -> str:
    now = clock.now_utc().astimezone().strftime("%H:%M:%S")
    status = sent["http_status"]
    color = "green" if status is not None and 200 <= status < 300 else "red"
    answer = click.style(f"→ {status} in {sent['duration_s'] * 1000:.0f} ms" if status else "→ no answer", fg=color)
    return "  ".join(
        part for part in (now, sent["event_id"], text(sent["type"]), answer, text(sent["error"], 80)) if part
    )


class Relay:
    """Sends each event once."""

    def __init__(self, api: Api, source: str, url: str, types: Iterable[str], timeout: float) -> None:
        from oncehook.outbound.urls import read_url
        from oncehook.settings import development
        from oncehook.verify.standard import signer

        self.secret = development.kept_secret(f"forward {source}")
        self._sign = signer(self.secret.encode())
        self._api, self._source, self._url, self._timeout = api, source, read_url(url), timeout
        self._types = list(types)
        self._since = clock.now_utc() - SKEW
        self._sent: set[str] = set()

    def pass_on(self, moment: Moment) -> Iterator[dict[str, Any]]:
        """Send what this moment brought, if it is ours; how each was answered."""
        kind, fields = moment
        if kind != "arrival" or fields.get("source") != self._source or fields["outcome"] == "rejected":
            return
        single = [fields["event_id"]] if fields["outcome"] == "accepted" and "event_id" in fields else []
        for event_id in fields.get("event_ids", single):
            if event_id not in self._sent:
                self._sent.add(event_id)
                yield from self._relay(event_id)

    def _relay(self, event_id: str) -> Iterator[dict[str, Any]]:
        try:
            event = self._api.get(at("events", event_id))
            if not self._is_meant(event):
                return
            body = self._api.raw(at("events", event_id, "body"))
        except (Failed, Unreachable) as error:
            yield {"event_id": event_id, "type": "", "http_status": None, "duration_s": 0.0, "error": error.message}
            return
        yield {"event_id": event_id, "type": event["type"], **self._answered(self._arrival(event, body))}

    def _is_meant(self, event: Mapping[str, Any]) -> bool:
        """Of a batch, also the events are named that were there before."""
        is_new = datetime.fromisoformat(event["received_at"]) >= self._since
        return is_new and (not self._types or any(fnmatch.fnmatchcase(event["type"], one) for one in self._types))

    def _answered(self, arrival: Arrival) -> dict[str, Any]:
        from oncehook.samples import post

        try:
            answer = post(self._url, arrival, timeout=self._timeout)
        except OSError as error:
            return {"http_status": None, "duration_s": 0.0, "error": str(error)}
        return {"http_status": answer.status, "duration_s": round(answer.seconds, 6), "error": ""}

    def _arrival(self, event: Mapping[str, Any], body: bytes) -> Arrival:
        from oncehook.destinations.http import header_text
        from oncehook.model import Arrival

        moment = str(int(clock.now()))
        signature = self._sign(event["id"].encode(), moment.encode(), body).decode()
        sent = {
            **{name: value for name, value in event["headers"] if name == "content-type"},
            "user-agent": "oncehook",
            "webhook-id": event["id"],
            "webhook-timestamp": moment,
            "webhook-signature": signature,
            "idempotency-key": event["id"],
            "oncehook-attempt": "1",
            "oncehook-run": "1",
            "oncehook-trigger": "initial",
            "oncehook-source": header_text(event["source"]),
        }
        if event["subject"] is not None:
            sent["oncehook-subject"] = header_text(event["subject"])
        return Arrival("", [(name.encode(), value.encode("latin-1", "replace")) for name, value in sent.items()], body)


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
def send(
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
    click.echo(f"→ {answer.status} in {answer.seconds * 1000:.0f} ms   {reply_line(fields, answer.body)}")
    return answer.status


def reply_line(fields: dict[str, Any], body: bytes) -> str:
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
