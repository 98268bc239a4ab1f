"""An HTTP destination: a lease comes in, one signed POST goes out (Standard Webhooks), and the answer says how it went.

2xx is done; anything else has the category that the destination's rules or the general table give, and a permanent 410
also asks for a pause. The worker calls it; `oncehook.http_client` sends the request and checks its address.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

from oncehook import clock
from oncehook.destinations.base import Result, Terms
from oncehook.destinations.event_address import EventAddress, NoAddress, is_event_address
from oncehook.destinations.receivers import ReceiverName, receiver_of
from oncehook.errors import ConfigError
from oncehook.event import outward_id
from oncehook.http_client import CallTimes, HttpAnswer, Unanswered
from oncehook.http_client.addresses import Network
from oncehook.http_client.urls import read_url, secret_parts, shown_url
from oncehook.model import ANSWER_KEPT, Category, Evidence, Exchange, Lease, hops_of, unpack_head
from oncehook.retry import Policy, retry_after
from oncehook.verify.standard import signer

if TYPE_CHECKING:
    from oncehook.http_client.client import HttpClient

CRASH_TOLERANCE: Final = 3
"""Crashes of the process that do not count against a delivery: sending bytes hardly ever kills a process."""

_NAME: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_VALUE: Final = re.compile(r"[^\x00-\x08\x0a-\x1f\x7f]*")
_OWN: Final = re.compile(
    r"host|content-length|transfer-encoding|connection|keep-alive|te|trailers?|upgrade|expect|http2-settings"
    r"|content-encoding|accept-encoding|idempotency-key|webhook-.*|oncehook-.*|proxy-.*",
    re.IGNORECASE,
)
"""Headers that belong to the connection or that we write ourselves."""
_NEVER_FORWARDED: Final = re.compile(r"authorization|cookie2?|set-cookie2?|proxy-.*", re.IGNORECASE)
_ALWAYS: Final = frozenset({"content-type", "traceparent", "tracestate"})
"""Headers of the sender that need not be listed to be passed on."""
_ALWAYS_LINES: Final = re.compile(rf"\r\n({'|'.join(sorted(_ALWAYS))}): ([^\r]*(?:\r(?!\n)[^\r]*)*)")
"""Finds these headers in a head that `pack_head` made, without parsing the rest."""
_TRACE: Final = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(?:-.*)?")
_MASKED: Final = "[masked]"
_SHORTEST_SECRET: Final = 6
_RECEIVED_MASKED: Final = frozenset({b"set-cookie", b"set-cookie2", b"authorization", b"proxy-authorization"})
_HEADERS_KEPT: Final = 4096
"""Characters of the values of sent headers up to which they are kept whole; longer ones are cut."""
_VALUE_KEPT: Final = 128
_MOST_HEADERS: Final = 32
_RECEIVED_KEPT: Final = 2048
"""Bytes of the answer's headers that are kept."""
_SIGNATURE_KEPT: Final = 11
_VISIBLE: Final = "".join(chr(code) for code in range(0x21, 0x7F) if chr(code) != "%")
_PLAIN: Final = re.compile(r"[!-$&-~]*")
"""Text that needs no escape."""


@dataclass(frozen=True, slots=True, repr=False)
class _Target:
    """An address to call, as it may be shown, and what of it must be masked in answers."""

    url: str
    shown: str
    hidden: Sequence[str] = ()

    @classmethod
    def read(cls, url: str, *, is_secret: bool) -> _Target:
        return cls(url, shown_url(url, is_secret=is_secret), tuple(secret_parts(url)) if is_secret else ())


class HttpDestination:
    """A web address to which events are sent, or a place in events that names it."""

    kind = "http"
    crash_tolerance = CRASH_TOLERANCE

    def __init__(
        self,
        name: str,
        url: str,
        *,
        is_secret: bool = False,
        terms: Terms | None = None,
        sign: Sequence[bytes] = (),
        headers: Mapping[str, str] | None = None,
        forward_headers: Sequence[str] = (),
        allow_private: bool | Sequence[Network] = False,
        allow_hosts: Sequence[str] = (),
        ca: Path | None = None,
        client: HttpClient | None = None,
        preset: ReceiverName | None = None,
    ) -> None:
        """`preset` names a known receiver. Of a `url` that `is_secret`, only the host is shown.

        A `url` such as `{$.callback_url}` is a place in events; `allow_hosts` says which hosts they may name there.
        `client` has rules and connections of its own; `allow_private` and `ca` are ignored then.
        """
        self.name = name
        self.id = 0
        self.terms = terms or Terms()
        self._from_event = EventAddress(url, allow_hosts) if is_event_address(url) else None
        self._target = None if self._from_event else _Target.read(read_url(url), is_secret=is_secret)
        self.address = f"POST {url if self._target is None else self._target.shown}"
        self._signers = tuple(map(signer, sign))
        self._headers = {
            read_header_name(header): read_header_value(header, text) for header, text in (headers or {}).items()
        }
        self._masked_headers = dict.fromkeys(self._headers, _MASKED)
        self._forwarded = frozenset(map(read_forwarded_name, forward_headers))
        self._forwarded -= self._headers.keys()
        self._hidden = _list_hidden([*self._headers.values(), *(self._target.hidden if self._target else ())])
        self._allow_private, self._ca = allow_private, ca
        self._client = client
        self._receiver = None if preset is None else receiver_of(preset)
        self.trace_headers: Callable[[], Mapping[str, str]] | None = None
        """Returns the headers that connect the receiver's trace with this attempt, where attempts are traced (see
        `traces`)."""

    def apart(self) -> HttpDestination:
        """Return a copy under the same rules with connections of its own, which need not be open here."""
        twin = copy(self)
        twin._client = None
        return twin

    async def open(self) -> None:
        if self._client is None:
            from oncehook.http_client.client import HttpClient  # imported when the first destination opens

            self._client = HttpClient(allow_private=self._allow_private, ca=self._ca)
        await self._client.open()

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()

    @property
    def has_one_address(self) -> bool:
        """True unless each event names its own."""
        return self._target is not None

    async def attempt(self, lease: Lease) -> Result:
        assert self._client is not None
        try:
            target = self._target or self._read_target(lease)
            headers = self._headers_for(lease)
            answer = await self._client.post(target.url, headers, lease.event.body, within=self.terms.timeout)
        except NoAddress as error:
            return Result(Category.permanent, Evidence(error=str(error)), counts=False)
        except Unanswered as error:
            evidence = Evidence(error=str(error), exchange=self._exchange(target, headers, error.times))
            return Result(error.category, evidence, retry=self._retry_while_unready(self._why_unready(error)))
        except Exception as error:  # the worker needs a result; the error's text may contain a secret
            return Result(Category.unknown, Evidence(error=f"sending failed: {type(error).__name__}"))
        return self._judge(target, answer, self._exchange(target, headers, answer.times, answer.headers))

    async def reach(self, within: float) -> bool:
        """Check that the host answers, without a request: see `HttpClient.reach`. Raises Unanswered."""
        assert self._client is not None
        return self._target is not None and await self._client.reach(self._target.url, within=within)

    def _read_target(self, lease: Lease) -> _Target:
        """Return the address that an event names. Raises NoAddress.

        It is treated as a secret, because it is a part of the payload, and whoever knows it can often post there.
        """
        assert self._from_event is not None
        return _Target.read(self._from_event.read(lease.event), is_secret=True)

    # -- what is sent --------------------------------------------------------------------------

    def _headers_for(self, lease: Lease) -> dict[str, str]:
        sent_id = outward_id(lease)
        timestamp = str(int(clock.now()))
        headers = {
            "user-agent": "oncehook",
            **self._from_request(lease.event.request_head),
            **self._headers,
            "webhook-id": sent_id,
            "webhook-timestamp": timestamp,
            "Idempotency-Key": sent_id,
            "Oncehook-Attempt": str(lease.delivery.attempt),
            "Oncehook-Run": str(lease.delivery.run),
            "Oncehook-Trigger": lease.trigger.value,
            "Oncehook-Source": header_text(lease.event.source),
            "Oncehook-Hops": str(hops_of(lease.event.request_head) + 1),
        }
        if self.trace_headers is not None:
            headers |= self.trace_headers()
        if self._signers:
            headers["webhook-signature"] = " ".join(
                sign(sent_id.encode(), timestamp.encode(), lease.event.body).decode() for sign in self._signers
            )
        if lease.event.subject is not None:
            headers["Oncehook-Subject"] = header_text(lease.event.subject)
        if lease.delivery.replay_id is not None:
            headers["Oncehook-Replay"] = str(lease.delivery.replay_id)
        return headers

    def _from_request(self, head: bytes) -> dict[str, str]:
        """Return the sender's content type, its trace, and those of its headers that are listed.

        Repeated headers are joined by a comma. A trace that is repeated or malformed is left out.
        """
        pairs = unpack_head(head)[2] if self._forwarded else _ALWAYS_LINES.findall(head.decode("latin-1"))
        wanted = self._choose_forwarded(pairs)
        found: dict[str, str] = {}
        for name, raw in pairs:
            if name in wanted and raw != _MASKED:
                value = _legal(raw)
                if value is not None:
                    found[name] = f"{found[name]}, {value}" if name in found and name != "content-type" else value
        if not _TRACE.fullmatch(found.get("traceparent", "")):
            found.pop("traceparent", None)
            found.pop("tracestate", None)
        return found

    def _choose_forwarded(self, pairs: Sequence[tuple[str, str]]) -> frozenset[str]:
        if not self._forwarded:
            return _ALWAYS
        # headers named by the sender's Connection header were meant for us only
        hop = {word.strip().lower() for name, value in pairs if name == "connection" for word in value.split(",")}
        return (self._forwarded - hop) | _ALWAYS

    # -- what came back ------------------------------------------------------------------------

    def _exchange(
        self,
        target: _Target,
        headers: Mapping[str, str],
        times: CallTimes | None,
        received: Sequence[tuple[bytes, bytes]] = (),
    ) -> bytes:
        """Encode the call as it is kept: bounded, without our credentials and the receiver's cookies (S25)."""
        shown = {**headers, **self._masked_headers} if self._masked_headers else dict(headers)
        if self._signers:
            shown["webhook-signature"] = _shorten_signatures(headers["webhook-signature"])
        if sum(map(len, shown.values())) > _HEADERS_KEPT:
            shown = {name: value[:_VALUE_KEPT] for name, value in list(shown.items())[:_MOST_HEADERS]}
        lines = [
            b"%b: %b" % (name, b"[masked]" if name.lower() in _RECEIVED_MASKED else value) for name, value in received
        ]
        return Exchange(
            "POST",
            target.shown,
            shown,
            () if times is None else (times.dns, times.connect, times.tls, times.first_byte, times.total),
            self._mask(target, b"\r\n".join(lines))[:_RECEIVED_KEPT],
        ).encode()

    def _judge(self, target: _Target, answer: HttpAnswer, exchange: bytes) -> Result:
        rules, status = self.terms.rules, answer.status
        category, error = rules.of_status(status), failure(status)
        unready = None if status in rules.permanent else self._why_unready(answer)
        if unready is not None:
            category, error = Category.transient, unready
        evidence = Evidence(status, error, self._mask(target, answer.body)[:ANSWER_KEPT] or None, exchange)
        if category is None:
            return Result(evidence=evidence)
        return Result(
            category,
            evidence,
            retry_after=retry_after(answer.retry_after, clock.now_utc()),
            retry=self._retry_while_unready(unready),
            pause=self._why_pause(status, category),
        )

    def _why_pause(self, status: int, category: Category) -> str | None:
        # One event's receiver that is gone says nothing about those of the others.
        is_gone = status == 410 and category is Category.permanent and self.has_one_address
        return "answered 410 Gone" if is_gone else None

    def _why_unready(self, came: HttpAnswer | Unanswered) -> str | None:
        return None if self._receiver is None else self._receiver.why_unready(came)

    def _retry_while_unready(self, unready: str | None) -> Policy | None:
        return None if self._receiver is None or unready is None else self._receiver.retry

    def _mask(self, target: _Target, body: bytes) -> bytes:
        """Mask our own credentials in an answer that repeats them: they must not get into the store (S25)."""
        is_cut = len(body) >= ANSWER_KEPT
        hidden = self._hidden if target is self._target else (*_list_hidden(target.hidden), *self._hidden)
        for secret in hidden:
            if secret in body:
                body = body.replace(secret, _MASKED.encode())
        return _without_half(body, hidden) if is_cut else body


def _without_half(body: bytes, hidden: Iterable[bytes]) -> bytes:
    """Mask a secret's beginning at the end of an answer that was cut off at its size limit."""
    for secret in hidden:
        for length in range(len(secret) - 1, _SHORTEST_SECRET - 1, -1):
            if body.endswith(secret[:length]):
                return body[:-length] + _MASKED.encode()
    return body


def _shorten_signatures(value: str) -> str:
    """Keep the beginning of each signature: enough to compare it with one's own, useless to send."""
    return " ".join(f"{one[:_SIGNATURE_KEPT]}…" for one in value.split(" "))


def failure(status: int) -> str | None:
    """Describe a failed status, the same way each time, so that causes can be counted."""
    if 200 <= status < 300:
        return None
    return f"HTTP {status}; redirects are not followed" if 300 <= status < 400 else f"HTTP {status}"


def header_text(text: str) -> str:
    """Encode text for a header: `%` and everything but visible ASCII as percent-encoded UTF-8."""
    return text if _PLAIN.fullmatch(text) else quote(text, safe=_VISIBLE, errors="replace")


def _legal(raw: str) -> str | None:
    """Return a received value to send on, byte for byte; None when no header may contain it (S24)."""
    if raw.isascii():
        return raw if _VALUE.fullmatch(raw) else None
    try:
        text = raw.encode("latin-1").decode()
    except UnicodeError:
        return None
    return text if _VALUE.fullmatch(text) else None


# -- reading settings --------------------------------------------------------------------------


def read_header_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is not the name of a header.")
    if _OWN.fullmatch(name):
        raise ConfigError(f'The header "{name}" is set by oncehook itself and cannot be changed.')
    return name.lower()


def read_header_value(name: str, text: str) -> str:
    # the message leaves out the value, which may be secret
    if not text.isascii() or not text.isprintable():
        raise ConfigError(f'The value of the header "{name}" must be plain printable ASCII.')
    return text


def read_forwarded_name(name: str) -> str:
    if _NEVER_FORWARDED.fullmatch(name):
        raise ConfigError(
            f'The header "{name}" is never passed on: it holds what the sender shares with us alone.',
            hint="Set one of your own under headers.",
        )
    return read_header_name(name)


def _list_hidden(values: Iterable[str]) -> tuple[bytes, ...]:
    """List what must be masked in answers: our headers, the credential after its scheme, parts of a secret URL."""
    pieces = {piece for value in values for piece in (value, value.rpartition(" ")[2])}
    return tuple(sorted((p.encode() for p in pieces if len(p) >= _SHORTEST_SECRET), key=len, reverse=True))
