"""`oncehook forward`: live arrivals of a source, relayed to a server on this machine, for development.

Events are read from a running inbox and sent as a destination would send them (Standard Webhooks), signed with a secret
that is made once for the source and stays the same. Nothing is kept: what fails here is not tried again, and the inbox
does not notice.
"""

from __future__ import annotations

import contextlib
import fnmatch
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import click

from oncehook import clock
from oncehook.cli.api import Api, Failed, Misused, Unreachable, at, speaks
from oncehook.cli.moments import Feed, Moment, feed
from oncehook.cli.showing import line, say, text
from oncehook.cli.tail import told

if TYPE_CHECKING:
    from oncehook.model import Arrival

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
def command(api: Api, source: str, url: str, types: tuple[str, ...], timeout: float, as_json: bool) -> int:
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
                say([line(sent) if as_json else _said(sent)])


def _said(sent: Mapping[str, Any]) -> str:
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
        from oncehook.http_client.urls import read_url
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
