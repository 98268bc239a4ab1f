"""A source: a named place hooks come from, with everything that `ingest` must know about it.

`Preset` is what one provider's hooks need, as data; `Source` lays the user's settings over a preset (or over PLAIN) and
compiles them once, at start.
"""

from __future__ import annotations

import base64
import fnmatch
import logging
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from ipaddress import IPv4Network, IPv6Network, ip_address
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, Unpack, cast

import msgspec

from oncehook import clock, human
from oncehook.errors import ConfigError, SignatureInvalid
from oncehook.logs import ration
from oncehook.model import ADDRESS, LONGEST_BODY, Arrival, StoredEvent, flatten_text, is_account_id, unpack_head
from oncehook.payload import BodyHash, Redaction
from oncehook.rules import DEFAULT_KEY, DEFAULT_TYPE, RuleContext, Spec, compile_rule, shared_rules
from oncehook.secret import SHORTEST_SECRET, Masking, OldSecret, Secret
from oncehook.settings.check import find_gaps, find_media_gap, is_for_loopback
from oncehook.settings.read import Settings, read_program, settings_class
from oncehook.settings.tables import SourceArguments, SourceSettings
from oncehook.verify import Basic, Custom, Either, Scheme, StandardWebhooks, Token, Verifier, Verify, from_config
from oncehook.verify.schemes import Nothing, is_public
from oncehook.verify.standard import SHARED

if TYPE_CHECKING:
    from oncehook.media import MediaApi

log = logging.getLogger("oncehook.source")

Network = IPv4Network | IPv6Network
Splitter = Callable[[Any, Arrival], Iterable[Any]]
"""A function from a parsed body to its parts, each the provider's own envelope with one item, or that as `Odd`."""


@dataclass(frozen=True, slots=True)
class Odd:
    """A part without the expected shape: stored as it is and marked `unparsed`; its key is not used."""

    part: Any


class Reply(msgspec.Struct, frozen=True):
    """The HTTP reply to a sender."""

    status: int
    body: bytes = b""
    headers: tuple[tuple[bytes, bytes], ...] = ((b"content-type", b"application/json"),)

    @property
    def framed_headers(self) -> list[tuple[bytes, bytes]]:
        """Headers with the body's length, which a 204 must not state (RFC 9110, 8.6)."""
        length = [] if self.status == 204 else [(b"content-length", b"%d" % len(self.body))]
        return [*self.headers, *length]


Handshake = Callable[[Arrival, "Source"], Reply | None]
"""Answers a provider's request about the address itself; None for an ordinary arrival."""
Proof = Callable[[Arrival], bytes]
"""A function from a verified arrival to what its sender signed: equal results were signed once."""
Answer = Callable[[Arrival], Reply]
"""A function from an accepted arrival to the provider's expected answer. Must not raise, whatever the body."""


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


class Preset:
    """A ready-made source for one provider: some settings of `[source.NAME]`, and functions that only a preset can
    have.

    `facts` names, for each claim made here, the page or code that it comes from.
    """

    def __init__(
        self,
        *,
        name: str,
        title: str,
        scheme: Scheme,
        handshake: Handshake | None = None,
        answer: Reply | Answer | None = None,
        accepted: int = 200,
        unavailable: int = 503,
        horizon: str = "3d",
        body_authenticated: bool = True,
        key_authenticated: bool = True,
        watch_proof: bool | None = None,
        own: Spec = None,
        coalesce: bool | Literal["any"] = False,
        daily_volume: int | None = None,
        volume: Sequence[str] = (),
        needs: Sequence[Literal["secret", "verify_token", "public_url", "key"]] = ("secret",),
        facts: Mapping[str, str] = MappingProxyType({}),
        samples: Mapping[str, Sample] = MappingProxyType({}),
        media_api: MediaApi | None = None,
        **settings: Unpack[SourceSettings],
    ) -> None:
        """Raises ConfigError where a setting is wrong or unknown."""
        self.name, self.title, self.scheme = name, title, scheme
        self.settings = read_program(SourceSettings, ("source", name), settings)
        self.handshake = handshake
        self.answer = answer
        """Builds the reply, instead of our own JSON, where the provider reads it."""
        self.accepted = accepted
        """Status for an accepted arrival, new or duplicate."""
        self.unavailable = unavailable
        """Status when we cannot store, which makes this sender retry."""
        self.horizon = horizon
        """How long the sender keeps retrying; keys are remembered at least twice as long."""
        self.body_authenticated = body_authenticated
        """Whether verification covers the body; if not, the body is a hint and the object should be fetched."""
        self.key_authenticated = key_authenticated
        """Whether verification covers the key's place; if not, a captured request can come back under another key."""
        self.watch_proof = watch_proof
        """Whether to mark a signature that comes again under another key; None: where the body is signed and the key is
        not."""
        self.own = own
        """Place of an id or time in what is signed. One signature is then one event, whatever its key: later ones are
        duplicates or conflicts. Without it such an event is only marked, because the sender may mean it."""
        self.coalesce = coalesce
        self.daily_volume = daily_volume
        """Events a day above which a watermark is crossed, unless the settings say another number."""
        self.volume = volume
        """Patterns of the types that count for it: messages and commands, not receipts and presence. Empty: all."""
        self.needs = needs
        """Settings that this preset requires."""
        self.facts, self.samples = facts, samples
        self.media_api = media_api
        """How the files that its messages refer to are fetched."""

    def replace(self, **changes: Any) -> Preset:
        """Return a copy of this preset with these changes."""
        mine = {name: value for name, value in vars(self).items() if name != "settings"}
        return Preset(**{**mine, **vars(self.settings), **changes})


class Keys(msgspec.Struct, frozen=True, gc=False):
    """Secrets of a source, or of one account at it, compiled to verify and to mask with.

    There may be one for each of 100,000 accounts: the garbage collector need not look at them.
    """

    secrets: tuple[bytes, ...]
    """All secrets, including those that have ended."""
    old_secrets: tuple[OldSecret, ...]
    signing: bytes
    """Signs samples: the secret itself, or the private key where there are two."""
    masking: Masking
    verifier: Verifier


class Source:
    """A source as `ingest` uses it, with everything compiled."""

    def __init__(
        self, name: str, given: Settings, *, signing: bytes | None = None, loopback_only: bool = False
    ) -> None:
        """Raises ConfigError when forged arrivals could not be told from genuine ones (S4).

        `signing` signs samples where that needs another key than the secret.
        """
        from oncehook import presets

        gaps = [sentence for _, sentence in find_gaps(name, given)]
        if gaps := [*gaps, *filter(None, [find_media_gap(name, given)])]:
            raise ConfigError("\n".join(gaps))
        self.name = name
        self.account: str | None = None
        """The account of all its events, where that is fixed."""
        self.template: Source | None = None
        """The source of which this is one account's (`of_account`)."""
        self.id = 0
        """Its id in the store; assigned at start."""
        self.generation: str | None = None
        """Of a stored source: when it was made. One that is deleted and made again has another."""
        self.guard: Callable[[], None] | None = None
        """Called before an arrival is taken and before it is acknowledged, where the source can end while the inbox
        runs. Raises Rejected, or StoreUnavailable."""
        self.preset = None if given.preset is None else presets.load(given.preset)
        self.base = self.preset or PLAIN
        self.settings: Settings = settings_class(SourceSettings)(
            **{**vars(PLAIN.settings), **vars(self.base.settings), **vars(given)}
        )
        """Settings of `[source.NAME]`, then those of the preset, then the defaults."""
        self._says_keep_keys = "keep_keys" in {**vars(given), **(vars(self.preset.settings) if self.preset else {})}
        self.path: str = self.settings.path or name
        """The last part of its address: its name, or the unguessable path it was given instead (S8)."""
        self.scheme = scheme_of(given)
        self.loopback_only = loopback_only or is_for_loopback(given)
        """Open to direct requests from this machine only: development secrets, unconfirmed `none`."""
        self.has_accounts_by_address = self.settings.account == ADDRESS
        """Whether each account has an address of its own, `/in/{source}/{account}`, and perhaps a secret."""
        token = self.settings.verify_token
        self.verify_token: bytes | None = token.reveal() if token else None
        self._use(self._compile_keys(self.settings.secret, self.settings.public_url, signing))
        self.masked = ALWAYS_MASKED | self.scheme.masked
        """Headers whose values never reach the store."""
        self.body_masking = self.masking if given.redact is None or given.redact else Masking()
        """Masks secrets in bodies and in texts read from them; with `redact = []` it masks nothing."""
        redact = self.settings.redact or ()
        if given.redact is None:
            redact = (*redact, *_credentials(self.scheme))
        self.redaction = Redaction(redact) if redact else None
        self._compile_rules(given)
        self._compile_trust(given)

    def of_account(self, account: str, keys: Keys | None) -> Source:
        """Return this source as it is at an account's address: its events are that account's, and its keys, where there
        are any, replace the source's own."""
        made = object.__new__(type(self))  # ten times as fast as a copy: every arrival at such an address makes one
        made.__dict__ = self.__dict__.copy()
        made.account, made.template, made.has_accounts_by_address = account, self, False
        if keys is not None:
            if self.body_masking is self.masking:
                made.body_masking = keys.masking
            made._use(keys)
        return made

    def compile_account(self, account: str, secrets: Sequence[Secret] | None) -> Keys | None:
        """Compile the keys at an account's address, where they are not the source's own."""
        url = self.settings.public_url
        if secrets is None and url is None:
            return None
        given = self.settings.secret if secrets is None else secrets
        return self._compile_keys(given, None if url is None else _with_account(url, account))

    @property
    def signed_url(self) -> str | None:
        """The URL that a provider signs: the one registered with it, followed by the account at whose address this
        is."""
        url: str | None = self.settings.public_url
        return url if url is None or self.template is None else _with_account(url, self.account or "")

    def _compile_keys(self, given: Sequence[Secret], url: str | None, signing: bytes | None = None) -> Keys:
        lasting = [secret.reveal() for secret in given if secret.until is None]
        ending = [OldSecret(secret.reveal(), secret.until, secret.name) for secret in given if secret.until]
        ending.sort(key=lambda old: old.ends_at)
        secrets = (*lasting, *[_bytes(old.value) for old in ending])
        kept_out = [self.verify_token] if self.verify_token and not self.loopback_only else []
        verifier = partial(self.scheme.verifier, url=url, tolerance=self.settings.tolerance)
        # Without a secret, only accounts that have one of their own can be verified.
        is_bare = self.settings.account == ADDRESS and not given and not isinstance(self.scheme, Nothing | Custom)
        return Keys(
            secrets,
            tuple(ending),
            signing or (secrets[0] if secrets else b""),
            Masking.of(_spellings(self.scheme, [*secrets, *kept_out])),
            _refuse if is_bare else _rotating(verifier, lasting, ending),
        )

    def _use(self, keys: Keys) -> None:
        self.secrets, self.old_secrets, self.signing = keys.secrets, keys.old_secrets, keys.signing
        self.verifier = keys.verifier
        self.masking = keys.masking
        """Masks the source's own secrets in heads."""

    def _compile_rules(self, given: Settings) -> None:
        settings, key = self.settings, given.key
        if key is None:
            key = self.preset.settings.key if self.preset else _default_key(self.scheme)
        self.places: dict[str, Spec] = {
            "key": None if key == "none" else key,
            **{name: getattr(settings, name) for name in ("type", "subject", "event_time", "rank", "rank_scope")},
        }
        """The rules as written, for display and for samples."""
        if self.preset is None and given.type is None:
            self.places["type"] = DEFAULT_TYPE
        whose = settings.account
        if isinstance(whose, str) and is_account_id(whose):
            self.account = whose
        elif whose != ADDRESS:
            self.places["account"] = whose
        self.rules = shared_rules(self.places)
        self.preview = compile_rule("preview", settings.preview)
        self.split: Splitter | None = split_at(settings.split) if isinstance(settings.split, str) else settings.split
        self.body_hash = BodyHash(settings.volatile or (), by_meaning=self.split is not None)
        self.ignored = _globs(settings.ignore or ())
        # The preset's patterns match its own types: where the settings define other types, everything counts.
        self.volume = _globs(self.base.volume if given.type is None else ())
        """The types that count for the daily volume; None: all of them."""
        self.on_missing_key, _, window = settings.on_missing_key.partition(":")
        """accept | reject | body_hash"""
        self.missing_keep: float = human.seconds(window) if window else settings.keep_keys
        """Seconds for which a key made of the body's hash is remembered."""

    def keep_keys_for(self, seconds: float | None) -> None:
        """Remember keys for so long, where neither the settings nor the preset of this source say it."""
        if seconds is not None and not self._says_keep_keys:
            self.settings.keep_keys = seconds
            if ":" not in self.settings.on_missing_key:
                self.missing_keep = seconds

    def _compile_trust(self, given: Settings) -> None:
        preset = self.preset if given.verify is None else None
        key = self.places["key"]
        self.body_authenticated = preset.body_authenticated if preset else "body" in self.scheme.covers
        is_theirs = preset is not None and given.key is None
        self.key_authenticated = self.base.key_authenticated if is_theirs else _is_signed(key, self.scheme)
        watched = preset.watch_proof if preset else None
        if watched is None:
            watched = self.body_authenticated and not self.key_authenticated
        # The places that a scheme signs, where it declares them; otherwise the body.
        signed = getattr(self.scheme, "proof", None) or (lambda arrival: arrival.body)
        self.proof: Proof | None = signed if watched else None
        """Returns what was signed, where a captured request could come back under another key."""
        self.own = compile_rule("own", preset.own) if preset else None

    @property
    def valid_secrets(self) -> list[bytes]:
        """Secrets that are valid now."""
        over = {_bytes(old.value) for old in self.old_secrets if old.ends_at <= clock.now_utc()}
        return [secret for secret in self.secrets if secret not in over]

    def secret_warnings(self) -> list[tuple[str, str]]:
        """Return warnings about its secrets, each with a remedy, without repeating a secret."""
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
        if not self.settings.ip_allow:
            return True
        try:
            address = ip_address(peer)
        except ValueError:
            return False
        return any(address in network for network in self.settings.ip_allow)

    def preview_of(self, event: StoredEvent) -> str | None:
        """Return the text that a person wrote in an event, shortened; None where there is none."""
        if self.preview is None or len(event.body) > LONGEST_BODY:
            return None
        method, target, pairs = unpack_head(event.request_head)
        path, _, query = target.partition("?")
        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in pairs]
        arrival = Arrival(self.name, headers, event.body, query.encode("latin-1"), method, path)
        try:
            found = self.preview.read(RuleContext(arrival, event.body))
        except Exception:  # an error in the user's own rule must not break the page
            fields = {"source": self.name}
            ration.log(log, logging.ERROR, "preview.failed", fields, kind=self.name, exc_info=True)
            return None
        return flatten_text(" ".join(found or ())) or None


ALWAYS_MASKED: Final = frozenset({b"authorization", b"proxy-authorization", b"cookie"})
PLAIN: Final = Preset(
    name="",
    title="",
    scheme=Nothing(),
    needs=(),
    on_missing_key="accept",
    keep_keys="30d",
    max_body="1MiB",
    budget="800ms",
)
"""Defaults where neither the settings of a source nor its preset say anything."""


def build(
    name: str, *, signing: bytes | None = None, loopback_only: bool = False, **settings: Unpack[SourceArguments]
) -> Source:
    """Build the source that a program defines. Raises ConfigError."""
    read = read_program(SourceSettings, ("source", name), settings)
    return Source(name, read, signing=signing, loopback_only=loopback_only)


def scheme_of(given: Settings) -> Scheme:
    """Return the verification scheme of these settings: their own, or that of their preset."""
    from oncehook import presets

    if given.verify is not None:
        return _build_scheme(given.verify)
    return PLAIN.scheme if given.preset is None else presets.load(given.preset).scheme


def _build_scheme(spec: Verify) -> Scheme:
    if isinstance(spec, str | Mapping | Sequence):
        return from_config(spec)
    return cast("Scheme", spec) if hasattr(spec, "verifier") else Custom(spec)


def _bytes(secret: bytes | str) -> bytes:
    return secret.encode() if isinstance(secret, str) else secret


def _refuse(arrival: Arrival) -> None:
    raise SignatureInvalid("no secret for this account")


def _with_account(url: str, account: str) -> str:
    """Return the URL registered with a provider for one account: its id follows the path."""
    path, mark, query = url.partition("?")
    return f"{path.rstrip('/')}/{account}{mark}{query}"


def _rotating(
    verifier: Callable[[Sequence[bytes]], Verifier], lasting: Sequence[bytes], ending: Sequence[OldSecret]
) -> Verifier:
    """Build a verifier that accepts each secret until it ends. All are read now, so that a missing one is refused at
    start."""
    if not ending:
        return verifier(lasting)
    ends: list[datetime] = [old.ends_at for old in ending]
    stages = [verifier([*lasting, *(_bytes(old.value) for old in ending[n:])]) for n in range(len(ending) + 1)]

    def verify(arrival: Arrival) -> None:
        stages[bisect_right(ends, clock.now_utc())](arrival)

    return verify


def _spellings(scheme: Scheme, secrets: Sequence[bytes]) -> list[bytes]:
    """Return the spellings of these secrets to mask in bodies; none for public keys."""
    if is_public(scheme):
        return []
    parts = [secret.strip().removeprefix(SHARED) for secret in secrets]
    return [*secrets, *parts, *(map(base64.b64encode, secrets) if isinstance(scheme, Basic) else ())]


def _is_signed(spec: Spec, scheme: Scheme) -> bool:
    """Tell whether a scheme covers every place of a rule. For a form it cannot: the content type is an unsigned
    header."""
    if isinstance(spec, list | tuple):
        return all(_is_signed(place, scheme) for place in spec)
    if not isinstance(spec, str):
        return "body" in scheme.covers  # a function may read anything; or there is no key
    kind, _, name = spec.removeprefix("?").partition(":")
    if kind == "header":
        return "headers" in scheme.covers or name.lower().encode() in scheme.signed_headers
    if kind == "query":
        return "url" in scheme.covers
    return kind == "literal" or ("body" in scheme.covers and (kind != "form" or "headers" in scheme.covers))


def _credentials(scheme: Scheme) -> list[str]:
    """Return the paths of the secret itself in the body, which must not be stored (S25)."""
    if isinstance(scheme, Either):
        return [place for one in scheme.schemes for place in _credentials(one)]
    if not isinstance(scheme, Token) or not scheme.place.startswith("body:"):
        return []
    return ["$" + "".join(f"['{name}']" for name in scheme.place.removeprefix("body:").split("."))]


def split_at(path: str) -> Splitter:
    """Build a splitter for the array at a path (`$.events`, or `$`): each part is the envelope with one item."""
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
        # A generator, so that the caller can stop: each part repeats the envelope, so a batch could grow without bound.
        return (wrap(data, names, item) for item in found)

    return split


def _default_key(scheme: Scheme) -> Spec:
    # A signature over the body does not cover headers: whoever relays the request could set Idempotency-Key and use up
    # the key of a real event. So a header is a key only where it is configured by name.
    if isinstance(scheme, Nothing) or "headers" in scheme.covers or "body" not in scheme.covers:
        return list(DEFAULT_KEY)
    places = [place for place in DEFAULT_KEY if not str(place).startswith("header:")]
    # This one is signed, and the same in every attempt: a captured request is a duplicate, not a second event (S5).
    return [*places, f"header:{scheme.prefix}-id"] if isinstance(scheme, StandardWebhooks) else places


def _globs(patterns: Sequence[str]) -> re.Pattern[str] | None:
    if not patterns:
        return None
    return re.compile("|".join(fnmatch.translate(pattern) for pattern in patterns))
