"""`oncehook send` posts a signed, realistic sample; `oncehook forward` relays live arrivals to a local server."""

from __future__ import annotations

import asyncio
import contextlib
import fnmatch
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import click

from oncehook import clock
from oncehook.cli.api import Api, Failed, asks_api, at, check_known, no_answer, running_address
from oncehook.cli.complete import complete_sample, complete_sendable, complete_source
from oncehook.cli.options import app_option, build_setup, config_option, json_lines_option, wide_option
from oncehook.cli.output import id_of, join_columns, json_line, room, say, text
from oncehook.cli.tail import CONNECTION, Feed, Moment, first_id, moment_line, open_feed
from oncehook.errors import ConfigError, OncehookError, Undecryptable
from oncehook.human import show_elapsed, suggest
from oncehook.model import Noun

if TYPE_CHECKING:  # presets import much: --help must not wait for that
    from oncehook.inbox import Inbox
    from oncehook.model import Arrival
    from oncehook.sources import Source


@click.command("send")
@click.argument("source", required=False, shell_complete=complete_sendable)
@click.argument("type", required=False, shell_complete=complete_sample)
@config_option
@app_option
@click.option(
    "--to", "url", metavar="URL",
    help="Where to send it: a server's address, or that of its source (default: the running server).",
)  # fmt: skip
@click.option(
    "--file", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Body to send instead of a sample."
)
@click.option(
    "--set", "changes", multiple=True, metavar="PATH=VALUE",
    help="Change a value of the body before it is signed: data.object.amount=5; may be repeated.",
)  # fmt: skip
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
    changes: tuple[str, ...],
    batch: bool,
    repeat: int,
    bad_signature: bool,
    listing: bool,
    as_json: bool,
) -> int:
    """Send a hook of TYPE to SOURCE, signed as its sender would.

    It goes to the server that is running here, on whichever port. With --to, SOURCE may also be a preset that is not
    configured here: it is then signed with the development secret.
    """
    setup = build_setup(app, config_file)
    known = dict(setup.inbox.sources)
    if source is not None and source not in known and (stored := asyncio.run(_find_stored(setup.inbox, source))):
        known[source] = stored
    if listing:
        return _list_samples(known if source is None else {source: _choose(known, source)}, others=source is None)
    if source is None:
        raise click.UsageError("Which source? `oncehook send --list` shows them.")
    if batch and type not in (None, "batch"):
        raise click.UsageError("--batch is a type of its own: leave TYPE out.")
    if url is None and source not in known and source in _preset_names():
        raise ConfigError(
            f'"{source}" is a preset, but no source of these settings.', hint="Say where to send it with --to URL."
        )
    chosen = _choose(known, source)
    target = _address(url or running_address(setup.config), chosen)
    arrival = _build_arrival(chosen, "batch" if batch else type, file, changes, target, bad_signature)
    hint = _NOBODY if url is None else "Is it running, and is this its address?"
    statuses = [_post(target, arrival, as_json, hint) for _ in range(repeat)]
    expected = range(400, 500) if bad_signature else range(200, 300)
    return 0 if all(status in expected for status in statuses) else 1


def _address(url: str, source: Source) -> str:
    """Return where to send: below a server's own address, the source's place."""
    base = url.rstrip("/")
    return f"{base}/in/{source.path}" if not urlsplit(base).path and not urlsplit(base).query else url


def _preset_names() -> list[str]:
    from oncehook import presets

    return list(presets.names())


async def _find_stored(inbox: Inbox, name: str) -> Source | None:
    """Return a source that was made while a server ran. Raises ConfigError where its secret cannot be read here."""
    from oncehook.settings.stored import source_from

    store = inbox.store
    try:
        if (await store.schema_state()).pending:
            return None
        await store.open(migrate=False, write=False)
        found = await store.find_definitions(Noun.source, [name])
    except OncehookError:  # it may be on another machine: --to says where to send
        return None
    finally:
        await store.close()
    try:
        return source_from(inbox.vault, found[0]) if found else None
    except (ConfigError, Undecryptable) as error:
        hint = "Send a sample from the dashboard, or run this where ONCEHOOK_SECRET_KEY is set."
        raise ConfigError(f'The secret of "{name}" cannot be read here: {error}', hint=hint) from None


def _choose(sources: Mapping[str, Source], name: str) -> Source:
    from oncehook.settings import development

    if name in sources:
        return sources[name]
    if name not in _preset_names():
        raise ConfigError(f'There is no source "{name}".', hint=suggest(name, [*sources, *_preset_names()]))
    return development.source(name)


def _build_arrival(
    source: Source, kind: str | None, file: Path | None, changes: Sequence[str], url: str, forge: bool
) -> Arrival:
    from oncehook import samples

    known = source.preset.samples if source.preset else {}
    kind = kind or next(iter(known), "hello")
    arrival = samples.draft(source, kind, body=file.read_bytes() if file else None)
    for change in changes:
        arrival = samples.change(arrival, change)
    signed = samples.sign(source, arrival, url=samples.signed_url(source, url), forge=forge)
    host = urlsplit(url).netloc.rpartition("@")[2].encode()
    present = {name for name, _ in signed.headers}
    added = [(b"host", host), (b"user-agent", b"oncehook-send")]
    return replace(signed, headers=[*signed.headers, *(pair for pair in added if pair[0] not in present)])


_NOBODY: Final = (
    "Start it with: oncehook serve. Where an app of yours receives, name its address: --to http://127.0.0.1:8000, or"
    " with the path where hooks are mounted. What it defines is known with --app module:inbox."
)


def _post(url: str, arrival: Arrival, as_json: bool, hint: str) -> int:
    from oncehook import samples

    try:
        answer = samples.post(url, arrival)
    except OSError as error:
        raise no_answer(url, error, hint) from error
    fields = answer.json()
    took = f"→ {answer.status} in {show_elapsed(answer.seconds)}   {_outcome(fields, answer.body)}"
    say([json_line({"http_status": answer.status, **fields}) if as_json else took])
    if answer.status in (404, 405) and "code" not in fields:  # not the answer of an inbox
        say(["  Hooks arrive at /in/SOURCE below the server's address, or where your app has mounted them."], err=True)
    return answer.status


def _outcome(fields: dict[str, Any], body: bytes) -> str:
    """Format the answer as a line: the event, how many of a batch were new, or the reason for a rejection."""
    if fields.get("event_ids"):
        words = ("accepted", "duplicates", "conflicts")
        return f"{first_id(fields)}   " + ", ".join(f"{fields[word]} {word}" for word in words if fields.get(word))
    what = fields.get("status") or fields.get("code") or body.decode("utf-8", "replace")[:60]
    return f"{fields['event_id']}   {what}" if "event_id" in fields else str(what)


def _list_samples(sources: Mapping[str, Source], *, others: bool) -> int:
    from oncehook import presets

    for name, source in sources.items():
        say([_sample_line(name, source.preset.samples if source.preset else ["any type"])])
    more = [name for name in _preset_names() if name not in sources] if others else []
    if more:
        say(["Not configured here, with --to URL:"], err=True)
    say(_sample_line(name, presets.load(name).samples) for name in more)
    return 0


def _sample_line(name: str, kinds: Iterable[str]) -> str:
    """Format a source and what can be sent to it; on a terminal, broken between names only."""
    line, width = f"{name:<20} {', '.join(kinds)}", room()
    if width is None:
        return line
    return textwrap.fill(line, width, subsequent_indent=" " * 21, break_long_words=False, break_on_hyphens=False)


SKEW: Final = timedelta(seconds=30)
"""The furthest that the clocks of this machine and of the inbox may be apart."""


@click.command("forward")
@click.argument("source", shell_complete=complete_source)
@click.option(
    "--to", "url", required=True, metavar="URL", help="Where to send them, as in http://localhost:8000/hooks."
)
@click.option("--type", "types", multiple=True, metavar="TYPE", help="Only of this type (message.*); may be repeated.")
@click.option("--timeout", type=click.FloatRange(0, min_open=True), default=30.0, show_default=True, help="Seconds.")
@wide_option
@json_lines_option
@asks_api
def forward(api: Api, source: str, url: str, types: tuple[str, ...], timeout: float, as_json: bool) -> int:
    """Relay what SOURCE accepts from now on to a local server, until Ctrl-C.

    Sent as a destination would send it: the body as received, webhook-id, and a signature by the secret it prints.
    What fails is not tried again, and the inbox does not notice.
    """
    feed = open_feed(api)
    check_known(source, [one["name"] for one in api.pages("sources")], "source")
    relay = Relay(api, source, url, types, timeout)
    with contextlib.suppress(KeyboardInterrupt):
        say([f"forwarding {source} to {url}; Ctrl-C ends", f"  secret  {relay.secret}"], err=True)
        _follow(feed, relay, as_json)
    return 0


def _follow(feed: Feed, relay: Relay, as_json: bool) -> None:
    while True:
        for kind, fields in feed.take(3600):
            if kind in CONNECTION:
                say([moment_line(kind, fields, clock.now_utc())], err=True)
            for sent in relay.send((kind, fields)):
                say([json_line(sent) if as_json else _sent_line(sent)])


def _sent_line(sent: Mapping[str, Any]) -> str:
    status = sent["http_status"]
    color = "green" if status is not None and 200 <= status < 300 else "red"
    answer = click.style(f"→ {status} in {show_elapsed(sent['duration_s'])}" if status else "→ no answer", fg=color)
    now = clock.now_utc().astimezone().strftime("%H:%M:%S")
    return join_columns(now, id_of(sent["event_id"]), text(sent["type"]), answer, text(sent["error"], 80))


class Relay:
    """A relay that sends each new event once, signed with a secret that stays the same for each source."""

    def __init__(self, api: Api, source: str, url: str, types: Iterable[str], timeout: float) -> None:
        from oncehook.http_client.urls import read_url
        from oncehook.settings import development
        from oncehook.verify.standard import signer

        self.secret = development.kept_secret(f"forward {source}")
        self._sign = signer(self.secret.encode())
        self._api, self._source, self._url, self._timeout = api, source, read_url(url), timeout
        self._types = list(types)
        self._since = clock.now_utc() - SKEW
        self._sent: set[str] = set()

    def send(self, moment: Moment) -> Iterator[dict[str, Any]]:
        """Send the new events of one arrival; yield the answer to each."""
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
            if not self._is_wanted(event):
                return
            body = self._api.raw(at("events", event_id, "body"))
        except Failed as error:
            yield {"event_id": event_id, "type": "", "http_status": None, "duration_s": 0.0, "error": error.message}
            return
        yield {"event_id": event_id, "type": event["type"], **self._post(self._build_arrival(event, body))}

    def _is_wanted(self, event: Mapping[str, Any]) -> bool:
        """Tell whether an event is of a wanted type, and new: a batch may contain duplicates."""
        is_new = datetime.fromisoformat(event["received_at"]) >= self._since
        return is_new and (not self._types or any(fnmatch.fnmatchcase(event["type"], one) for one in self._types))

    def _post(self, arrival: Arrival) -> dict[str, Any]:
        from oncehook.samples import post

        try:
            answer = post(self._url, arrival, timeout=self._timeout)
        except OSError as error:
            return {"http_status": None, "duration_s": 0.0, "error": str(error)}
        return {"http_status": answer.status, "duration_s": round(answer.seconds, 6), "error": ""}

    def _build_arrival(self, event: Mapping[str, Any], body: bytes) -> Arrival:
        from oncehook.destinations.http import header_text
        from oncehook.model import Arrival

        moment = str(int(clock.now()))
        headers = {
            **{name: value for name, value in event["headers"] if name == "content-type"},
            "user-agent": "oncehook",
            "webhook-id": event["id"],
            "webhook-timestamp": moment,
            "webhook-signature": self._sign(event["id"].encode(), moment.encode(), body).decode(),
            "idempotency-key": event["id"],
            "oncehook-attempt": "1",
            "oncehook-run": "1",
            "oncehook-trigger": "initial",
            "oncehook-source": header_text(event["source"]),
        }
        if event["subject"] is not None:
            headers["oncehook-subject"] = header_text(event["subject"])
        return Arrival(
            "", [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers.items()], body
        )
