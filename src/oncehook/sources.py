"""A source: a named place hooks come from, with everything the front door must know about it.

`Preset` is what one provider's hooks need, as data; `build` lays the user's settings over a preset (or over the
plain defaults) and compiles them once, at start, into a `Source` that `receive` can use without a second look.
"""

from __future__ import annotations

import base64
import fnmatch
import logging
import math
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from ipaddress import IPv4Network, IPv6Network, ip_address
from typing import Any, Final

import msgspec

from oncehook import clock, human
from oncehook.errors import ConfigError
from oncehook.logs import ration
from oncehook.model import LONGEST_BODY, Arrival, StoredEvent, line, unpack_head
from oncehook.rules import (
    DEFAULT_KEY,
    DEFAULT_TYPE,
    BodyHash,
    PythonRule,
    Redaction,
    Rule,
    RuleContext,
    Rules,
    Spec,
    compile_rule,
)
from oncehook.secret import SHORTEST_SECRET, Masking, OldSecret
from oncehook.verify import Basic, Either, Scheme, StandardWebhooks, Token, Verifier
from oncehook.verify.schemes import Nothing, is_public
from oncehook.verify.standard import SHARED

log = logging.getLogger("oncehook.source")

Network = IPv4Network | IPv6Network
Splitter = Callable[[Any, Arrival], Iterable[Any]]
"""From a parsed body to its parts, each the provider's own envelope holding just one item, or that as `Odd`."""


@dataclass(frozen=True, slots=True)
class Odd:
    """A part that does not have the shape it should: kept as it is and marked `unparsed`; its key is not believed."""

    part: Any


class Reply(msgspec.Struct, frozen=True):
    """What the sender is told."""

    status: int
    body: bytes = b""
    headers: tuple[tuple[bytes, bytes], ...] = ((b"content-type", b"application/json"),)

    @property
    def framed_headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers with the body's length, which a 204 must not state (RFC 9110, 8.6)."""
        length = [] if self.status == 204 else [(b"content-length", b"%d" % len(self.body))]
        return [*self.headers, *length]


Handshake = Callable[[Arrival, "Source"], Reply | None]
"""Answers a provider's question about the address itself; None: this arrival is an ordinary one."""
Proof = Callable[[Arrival], bytes]
"""From a verified arrival to what its sender has signed: two arrivals with the same were signed once."""
Answer = Callable[[Arrival], Reply]
"""From an arrival that was taken in to what its provider wants to hear. Must not raise, whatever the body is."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A realistic body for `oncehook send` and for tests, under the type it is sent as.

    In `body` every `{id}` is replaced by a fresh id and `{now}`, `{now_ms}`, `{now_iso}` by the time, so that
    each send is a new event; headers likewise.
    """

    body: str
    headers: Mapping[str, str] = field(default_factory=dict)
    query: str = ""
    content_type: str = "application/json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A ready-made source for one provider. One look should teach the provider.

    Every field has the meaning of the setting of the same name; `facts` gives, for each claim made here, the
    page or code it was read in.
    """

    name: str
    title: str
    scheme: Scheme
    key: Spec = None
    type: Spec = None
    subject: Spec = None
    event_time: Spec = None
    rank: Spec = None
    rank_scope: Spec = None
    preview: Spec = None
    """Where a person's text stands."""
    on_missing_key: str = "accept"
    split: Splitter | None = None
    handshake: Handshake | None = None
    answer: Reply | Answer | None = None
    """What to say instead of our own JSON, where the provider reads the answer."""
    accepted: int = 200
    """Status for an arrival that was taken in, for the first time or again."""
    unavailable: int = 503
    """Status when we cannot store: one that makes this sender try again."""
    horizon: str = "3d"
    """How long the sender keeps retrying; keys are remembered at least twice as long."""
    keep_keys: str = "30d"
    max_body: str = "1MiB"
    budget: str = "800ms"
    tolerance: str | None = None
    """How old a signature may be, where the scheme's own default does not fit."""
    volatile: tuple[str, ...] = ()
    redact: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    body_authenticated: bool = True
    """Whether the check covers the body; if not, the body is a hint and the object should be fetched."""
    key_authenticated: bool = True
    """Whether the check covers where the key stands; if not, a captured request can come back under another key."""
    watch_proof: bool | None = None
    """Whether what was signed once and comes under another key is marked; None: where the body is signed and the key is
    not."""
    own: Spec = None
    """Where in what is signed an id or a time of its own stands. What was signed once is then one event, whatever its
    key: a copy of the first, or its conflict. Without it such an event is only marked, for the sender may mean it."""
    coalesce: bool | str = False
    daily_volume: int | None = None
    """Events a day above which a watermark is crossed, unless the settings say another number."""
    volume: tuple[str, ...] = ()
    """Patterns of the types that count for it: messages and commands, not receipts and presence. Empty: all types."""
    needs: tuple[str, ...] = ("secret",)
    """Settings this preset cannot do without: `secret`, `verify_token`, `public_url`, `key`."""
    facts: Mapping[str, str] = field(default_factory=dict)
    samples: Mapping[str, Sample] = field(default_factory=dict)


@dataclass(slots=True)
class Source:
    """A source as the front door uses it: everything compiled, nothing left to look up."""

    name: str
    preset: Preset | None
    scheme: Scheme
    verifier: Verifier
    rules: Rules
    body_hash: BodyHash
    redaction: Redaction | None
    ignored: re.Pattern[str] | None
    on_missing_key: str
    """accept | reject | body_hash"""
    missing_keep: float
    """Seconds for which a key made of the body's hash is remembered."""
    keep: float
    reject_conflicts: bool
    split: Splitter | None
    handshake: Handshake | None
    answer: Reply | Answer | None
    accepted: int
    unavailable: int
    max_body: int
    budget: float
    masked: frozenset[bytes]
    """Headers whose values never reach the store."""
    secrets: Sequence[bytes]
    """All of them, also those that are over."""
    old_secrets: Sequence[OldSecret]
    """Those that end."""
    masking: Masking
    """Takes the source's own secrets out of heads."""
    body_masking: Masking
    """Takes them out of bodies and of texts read from these; with `redact = []` it leaves everything as it came."""
    signing: bytes
    """What a sample is signed with: the secret itself, or the private half of it where there are two."""
    verify_token: bytes | None
    public_url: str | None
    """The whole URL registered with the provider, where its signature covers it."""
    ip_allow: Sequence[Network]
    loopback_only: bool
    """Open to direct requests from this machine only: development secrets, unconfirmed `none` (DESIGN.md 8.11)."""
    path: str
    """The last part of its address: its name, or the unguessable path it was given instead (S8)."""
    places: Mapping[str, Spec]
    """The rules as they were written (`key`, `type`, `subject`), to show them and to make samples that fit."""
    preview: Rule | PythonRule | None = None
    """Where a person's text stands."""
    volume: re.Pattern[str] | None = None
    """The types that count for the daily volume; None: all of them."""
    keep_events: float | None = None
    """Seconds for which finished events are kept; None: as long as the inbox keeps them."""
    revive_dead: bool = False
    """Whether a copy of an event that ended as a dead letter brings it back (R22)."""
    body_authenticated: bool = False
    """Whether the check covers the body."""
    key_authenticated: bool = False
    """Whether the check covers where the key stands."""
    proof: Proof | None = None
    """What makes two arrivals the same signed thing, where a captured request could come back under another key."""
    own: Rule | PythonRule | None = None
    """Where in what is signed an id or a time of its own stands."""
    id: int = 0
    """What stands for its name in the store; given at start."""

    @property
    def valid_secrets(self) -> list[bytes]:
        """Return the secrets that verify now."""
        over = {_bytes(old.value) for old in self.old_secrets if old.ends_at <= clock.now_utc()}
        return [secret for secret in self.secrets if secret not in over]

    def secret_warnings(self) -> list[tuple[str, str]]:
        """Return what is odd about its secrets, each with what to do about it. None of it repeats a secret."""
        found = []
        if not is_public(self.scheme) and any(len(secret.strip()) < SHORTEST_SECRET for secret in self.secrets):
            detail = f"a secret has fewer than {SHORTEST_SECRET} bytes, so it is not blanked in what is stored"
            hint = "Give it a longer secret: 32 random bytes, for example `openssl rand -hex 32`."
            found.append((f"{self.name}: {detail}", hint))
        for old in self.old_secrets:
            if old.ends_at <= clock.now_utc():
                detail = f"{self.name}: {old.name or 'an old secret'} is over since {old.ends_at:%Y-%m-%d %H:%M} UTC"
                found.append((detail, "It verifies nothing any more: take it out of the settings."))
        return found

    def allows(self, peer: str) -> bool:
        """Whether arrivals from this address are let in at all."""
        if not self.ip_allow:
            return True
        try:
            address = ip_address(peer)
        except ValueError:
            return False
        return any(address in network for network in self.ip_allow)

    def preview_of(self, event: StoredEvent) -> str | None:
        """Return what a person wrote in an event, as one short line; None where there is nothing to be read."""
        if self.preview is None or len(event.body) > LONGEST_BODY:
            return None
        method, target, pairs = unpack_head(event.request_head)
        path, _, query = target.partition("?")
        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in pairs]
        arrival = Arrival(self.name, headers, event.body, query.encode("latin-1"), method, path)
        try:
            found = self.preview.read(RuleContext(arrival, event.body))
        except Exception:  # a fault in a rule of one's own must not take the page with it
            fields = {"source": self.name}
            ration.log(log, logging.ERROR, "preview.failed", fields, kind=self.name, exc_info=True)
            return None
        return line(" ".join(found or ())) or None


ALWAYS_MASKED: Final = frozenset({b"authorization", b"proxy-authorization", b"cookie"})
PLAIN: Final = Preset(name="", title="", scheme=Nothing(), type=DEFAULT_TYPE)
"""What holds for a source without a preset, where its settings say nothing. It must say itself how it is verified."""
DEFAULT_MAX_BODY: Final = human.size(PLAIN.max_body)


def build(  # one flat list of settings, as in the configuration
    name: str,
    *,
    preset: Preset | None = None,
    scheme: Scheme | None = None,
    secrets: Sequence[bytes | OldSecret] = (),
    signing: bytes | None = None,
    verify_token: bytes | None = None,
    public_url: str | None = None,
    tolerance: float | None = None,
    path: str | None = None,
    key: Spec = None,
    on_missing_key: str | None = None,
    on_conflict: str = "accept",
    subject: Spec = None,
    type: Spec = None,
    event_time: Spec = None,
    rank: Spec = None,
    rank_scope: Spec = None,
    preview: Spec = None,
    ignore: Sequence[str] | None = None,
    split: Splitter | None = None,
    redact: Sequence[str] | None = None,
    volatile: Sequence[str] | None = None,
    max_body: int | None = None,
    budget: float | None = None,
    keep_keys: float | None = None,
    keep_events: float | None = None,
    revive_dead: bool | None = None,
    ip_allow: Sequence[Network] = (),
    loopback_only: bool = False,
) -> Source:
    """Compile a source. Raises ConfigError when it could not tell a genuine arrival from a forged one (S4)."""
    base, chosen = preset or PLAIN, scheme or (preset.scheme if preset else None)
    if chosen is None:
        raise ConfigError(
            f'Source "{name}" does not say how its arrivals are verified.',
            hint='Give it a preset or a verifier; verify = "none" must be said by name.',
        )
    given = {"secret": secrets, "verify_token": verify_token, "public_url": public_url, "key": key}
    _check_needs(name, preset, scheme, given)
    policy, _, bucket = (on_missing_key or base.on_missing_key).partition(":")
    keep = human.seconds(base.keep_keys) if keep_keys is None else keep_keys
    if tolerance is None and base.tolerance:
        tolerance = math.inf if base.tolerance == "off" else human.seconds(base.tolerance)
    lasting = [secret for secret in secrets if not isinstance(secret, OldSecret)]
    ending = sorted((one for one in secrets if isinstance(one, OldSecret)), key=lambda old: old.ends_at)
    if ending and not lasting:
        raise ConfigError(
            f'Every secret of source "{name}" ends, so that nothing could be verified then.',
            hint="Give it the new secret, without `until`, beside the old one.",
        )
    known = [*lasting, *(_bytes(old.value) for old in ending)]
    redacted = (*base.redact, *_credentials(chosen)) if redact is None else redact
    splitter = split or base.split
    said = {"type": type, "subject": subject, "event_time": event_time, "rank": rank, "rank_scope": rank_scope}
    places = {
        "key": _key(key, preset, chosen),
        **{name: spec or getattr(base, name) for name, spec in said.items()},
    }
    masking = Masking(_spellings(chosen, [*known, *([verify_token] if verify_token and not loopback_only else [])]))
    as_preset = preset if scheme is None else None
    body_signed = as_preset.body_authenticated if as_preset else "body" in chosen.covers
    key_signed = as_preset.key_authenticated if as_preset and key is None else _is_signed(places["key"], chosen)
    watched = as_preset.watch_proof if as_preset else None
    return Source(
        name=name,
        preset=preset,
        scheme=chosen,
        verifier=_rotating(lambda valid: chosen.verifier(valid, url=public_url, tolerance=tolerance), lasting, ending),
        rules=Rules(**places),
        body_hash=BodyHash(base.volatile if volatile is None else volatile, by_meaning=splitter is not None),
        redaction=Redaction(redacted) if redacted else None,
        ignored=_globs(base.ignore if ignore is None else ignore),
        on_missing_key=policy if policy != "none" else "accept",
        missing_keep=human.seconds(bucket) if bucket else keep,
        keep=keep,
        reject_conflicts=on_conflict == "reject",
        split=splitter,
        handshake=base.handshake,
        answer=base.answer,
        accepted=base.accepted,
        unavailable=base.unavailable,
        max_body=max_body or human.size(base.max_body),
        budget=budget or human.seconds(base.budget),
        masked=ALWAYS_MASKED | chosen.masked,
        secrets=known,
        old_secrets=ending,
        masking=masking,
        body_masking=masking if redact is None or redact else Masking(()),
        signing=signing or (known[0] if known else b""),
        verify_token=verify_token,
        public_url=public_url,
        ip_allow=tuple(ip_allow),
        loopback_only=loopback_only,
        keep_events=keep_events,
        revive_dead=bool(revive_dead),
        path=path or name,
        places=places,
        preview=compile_rule("preview", base.preview if preview is None else preview),
        # Patterns are of the preset's own types: where these are others, everything counts.
        volume=_globs(base.volume if type is None else ()),
        body_authenticated=body_signed,
        key_authenticated=key_signed,
        proof=_proof(chosen) if (body_signed and not key_signed if watched is None else watched) else None,
        own=compile_rule("own", as_preset.own) if as_preset else None,
    )


def _bytes(secret: bytes | str) -> bytes:
    return secret.encode() if isinstance(secret, str) else secret


def _rotating(
    verifier: Callable[[Sequence[bytes]], Verifier], lasting: Sequence[bytes], ending: Sequence[OldSecret]
) -> Verifier:
    """Build a verifier that believes each secret until its end. All of them are read now, to be refused at start."""
    if not ending:
        return verifier(lasting)
    ends: list[datetime] = [old.ends_at for old in ending]
    stages = [verifier([*lasting, *(_bytes(old.value) for old in ending[n:])]) for n in range(len(ending) + 1)]

    def verify(arrival: Arrival) -> None:
        stages[bisect_right(ends, clock.now_utc())](arrival)

    return verify


def _spellings(scheme: Scheme, secrets: Sequence[bytes]) -> list[bytes]:
    """Return what must not be kept of these secrets: nothing where they are public keys."""
    if is_public(scheme):
        return []
    parts = [secret.strip().removeprefix(SHARED) for secret in secrets]
    return [*secrets, *parts, *(map(base64.b64encode, secrets) if isinstance(scheme, Basic) else ())]


def _is_signed(spec: Spec, scheme: Scheme) -> bool:
    """Tell whether a scheme covers every place of a rule. A form is read by its content type, which is a header."""
    if isinstance(spec, list | tuple):
        return all(_is_signed(place, scheme) for place in spec)
    if not isinstance(spec, str):
        return "body" in scheme.covers  # a function, of which nothing is known; or no key at all
    kind, _, name = spec.removeprefix("?").partition(":")
    if kind == "header":
        return "headers" in scheme.covers or name.lower().encode() in scheme.signed_headers
    if kind == "query":
        return "url" in scheme.covers
    return kind == "literal" or ("body" in scheme.covers and (kind != "form" or "headers" in scheme.covers))


def _proof(scheme: Scheme) -> Proof:
    """Return what a scheme signs, where it says so itself; else the body."""
    return getattr(scheme, "proof", None) or (lambda arrival: arrival.body)


def _credentials(scheme: Scheme) -> list[str]:
    """Where in the body the secret itself stands: it must not reach the store (S25)."""
    if isinstance(scheme, Either):
        return [place for one in scheme.schemes for place in _credentials(one)]
    if not isinstance(scheme, Token) or not scheme.place.startswith("body:"):
        return []
    return ["$" + "".join(f"['{name}']" for name in scheme.place.removeprefix("body:").split("."))]


def split_at(path: str) -> Splitter:
    """A splitter for the array at a path (`$.events`, or `$` itself): each part is the envelope with one item in it."""
    plain = re.fullmatch(r"\$((?:\.[A-Za-z_][\w-]*)*)(?:\[\*\])?", path)
    if plain is None:
        raise ConfigError(f"split takes the path of an array, such as $.events or $ itself, not {path!r}.")
    names = plain[1].split(".")[1:]

    def wrap(data: Any, names: Sequence[str], item: Any) -> Any:
        return {**data, names[0]: wrap(data[names[0]], names[1:], item)} if names else [item]

    def split(data: Any, arrival: Arrival) -> Iterable[Any]:
        found = data
        for name in names:
            found = found.get(name) if isinstance(found, dict) else None
        if not isinstance(found, list):
            return [data]
        # One by one, so that who takes them can stop: each repeats the envelope, and a batch may grow without bound.
        return (wrap(data, names, item) for item in found)

    return split


def _check_needs(name: str, preset: Preset | None, scheme: Scheme | None, given: Mapping[str, object]) -> None:
    for need in preset.needs if preset else ():
        # Who brings a verifier of their own is not asked for what the preset's would have needed.
        if not given[need] and (scheme is None or need == "key"):
            raise ConfigError(
                f'Source "{name}" needs `{need}`: the preset "{preset and preset.name}" cannot do without it.'
            )


def _key(said: Spec, preset: Preset | None, scheme: Scheme) -> Spec:
    """Where to look for the key: the user's word, else the preset's, else the default."""
    if said is None:
        said = preset.key if preset else _default_key(scheme)
    return None if said == "none" else said


def _default_key(scheme: Scheme) -> Spec:
    # A signature over the body says nothing about headers: whoever relays the request could set
    # Idempotency-Key and burn the key of a real event. There a header is a key only when listed by name.
    if isinstance(scheme, Nothing) or "headers" in scheme.covers or "body" not in scheme.covers:
        return list(DEFAULT_KEY)
    places = [place for place in DEFAULT_KEY if not str(place).startswith("header:")]
    # This one is signed, and the same on every try: a captured request is a duplicate, not a second event (S5).
    return [*places, f"header:{scheme.prefix}-id"] if isinstance(scheme, StandardWebhooks) else places


def _globs(patterns: Sequence[str]) -> re.Pattern[str] | None:
    if not patterns:
        return None
    return re.compile("|".join(fnmatch.translate(pattern) for pattern in patterns))
