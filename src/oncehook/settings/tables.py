"""Every setting there is: its name, type, default and meaning, one line each.

The Structs are what the program works with (durations in seconds, sizes in bytes, secrets as references); the form
beside each field says how it is written. `schema` tells the same to editors. Settings of a source that nobody has
said are None: there the preset's word counts, then the general default.
"""

from __future__ import annotations

import typing
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec

from oncehook.destinations.receivers import NAMES, ReceiverName
from oncehook.errors import ConfigError
from oncehook.model import ROLES, RoleName
from oncehook.outbound.urls import read_url, with_path
from oncehook.secret import Secret
from oncehook.settings import values as forms
from oncehook.settings.values import Form, Network, Place
from oncehook.settings.read import Field, fields_of, table_of

DAY: Final = 86_400.0


class _Table(msgspec.Struct, frozen=True, kw_only=True):
    """A table of settings."""


# -- the way in --------------------------------------------------------------------------------


class SourceConfig(_Table, frozen=True, kw_only=True):
    """A named place hooks come from."""

    preset: Annotated[str | None, forms.PRESET, "A ready-made source for one provider."] = None
    verify: Annotated[
        str | dict[str, Any] | list[Any] | None,
        forms.VERIFY,
        'How an arrival proves that it is genuine; of a list, any will do. "none" must be said by name.',
    ] = None
    secret: Annotated[
        tuple[Secret, ...],
        forms.ROTATED_SECRETS,
        "What the sender signs with; a list while rotating, in which old ones may have an until.",
    ] = ()
    verify_token: Annotated[Secret | None, forms.SECRET, "What the provider repeats in its handshake (Meta)."] = None
    public_url: Annotated[str | None, forms.URL, "The whole URL registered with the provider, query included."] = None
    tolerance: Annotated[float | None, forms.TOLERANCE, 'How old a signature may be, or "off".'] = None
    path: Annotated[str | None, forms.PATH, "An unguessable last part of the address, instead of the name."] = None
    key: Annotated[Any, forms.KEY, "What makes two arrivals the same event: places, the first that is there."] = None
    on_missing_key: Annotated[str | None, forms.MISSING_KEY, "What to do with an arrival that has no key."] = None
    on_conflict: Annotated[
        Literal["accept", "reject"], forms.choice("accept", "reject"), "How to answer a known key with another body."
    ] = "accept"
    subject: Annotated[Any, forms.RULE, "The object an event is about; one delivery of a subject at a time."] = None
    type: Annotated[Any, forms.RULE, "Where the type of an event stands."] = None
    event_time: Annotated[Any, forms.RULE, "Where the time of an event stands."] = None
    ignore: Annotated[tuple[str, ...] | None, forms.TEXTS, "Types to acknowledge and count, but not to keep."] = None
    rank: Annotated[Any, forms.RANK, "Where the rank of an event stands, for latest_wins."] = None
    rank_scope: Annotated[Any, forms.RULE, "Within what ranks are compared; the subject, unless said."] = None
    preview: Annotated[Any, forms.RULE, "Where a person's text stands, to be read before a replay."] = None
    split: Annotated[str | None, forms.SPLIT, "The parts of a batch, each to be its own event."] = None
    redact: Annotated[tuple[str, ...] | None, forms.REDACT, "Fields blanked before storing; [] turns it off."] = None
    volatile: Annotated[tuple[str, ...] | None, forms.VOLATILE, "Fields that may differ between copies."] = None
    max_body: Annotated[int | None, forms.SIZE, "The largest body that is taken."] = None
    budget: Annotated[float | None, forms.DURATION, "How long a sender may wait for its answer."] = None
    keep_keys: Annotated[float | None, forms.DURATION, "How long a key is remembered."] = None
    keep_events: Annotated[float | None, forms.DURATION, "How long finished events are kept."] = None
    revive_dead: Annotated[bool | None, forms.FLAG, "Whether a copy of a dead event brings it back."] = None
    ip_allow: Annotated[tuple[Network, ...], forms.NETWORKS, "Networks that may send at all."] = ()

    @property
    def is_unverified(self) -> bool:
        """Whether it was said by name that nothing is checked."""
        return self.verify == "none" or (isinstance(self.verify, dict) and self.verify.get("scheme") == "none")

    @property
    def is_loopback_only(self) -> bool:
        """Unverified without the consent that anyone may send: for direct requests of this machine (DESIGN.md 8.11)."""
        return self.is_unverified and not (isinstance(self.verify, dict) and self.verify.get("confirm"))


# -- the way out -------------------------------------------------------------------------------


def _factor(value: object, place: Place) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value <= 100:
        raise ConfigError("must be a number from 1 to 100")
    return float(value)


def _jitter(value: object, place: Place) -> float | str:
    return str(value) if value in ("full", "none") else forms.duration(value)


def _show_jitter(value: float | str) -> object:
    return value if isinstance(value, str) else forms.DURATION.show(value)


_FACTOR: Final = Form(_factor, {"type": "number", "minimum": 1, "maximum": 100})
_JITTER: Final = Form(_jitter, {"type": ["string", "number"], "examples": ["full", "none", "0.5s"]}, _show_jitter)


class RetryConfig(_Table, frozen=True, kw_only=True):
    """Waits that grow."""

    attempts: Annotated[int, forms.whole(1, 1000), "How often to try in all."] = 8
    base: Annotated[float, forms.DURATION, "The first wait."] = 10.0
    factor: Annotated[float, _FACTOR, "How much longer each wait is than the one before."] = 2.0
    cap: Annotated[float, forms.DURATION, "The longest wait."] = 21_600.0
    jitter: Annotated[
        float | Literal["full", "none"], _JITTER, "What chance adds: up to the whole wait, nothing, or a duration."
    ] = "full"


class BreakerConfig(_Table, frozen=True, kw_only=True):
    """When to hold a destination back."""

    failures: Annotated[int, forms.whole(1, 100_000), "Failures in a row, over different deliveries."] = 10
    open: Annotated[float, forms.DURATION, "How long to hold back before the next try."] = 30.0


def _retry(value: object, place: Place) -> str | tuple[float, ...] | RetryConfig:
    if isinstance(value, dict):
        policy: RetryConfig = place.table(RetryConfig, value)
        if policy.cap < policy.base:
            raise ConfigError("cap must not be shorter than base")
        return policy
    if isinstance(value, list | tuple):
        return tuple(forms.duration(wait) for wait in value)
    if value in ("quick", "durable"):
        return str(value)
    raise ConfigError('must be "quick", "durable", a list of waits, or { attempts = 8, base = "10s", cap = "6h" }')


def _show_retry(value: str | tuple[float, ...] | RetryConfig) -> object:
    if isinstance(value, RetryConfig):
        return show_table(value)
    return value if isinstance(value, str) else [forms.DURATION.show(wait) for wait in value]


_RETRY: Final = Form(
    _retry,
    {
        "anyOf": [
            {"enum": ["quick", "durable"]},
            {"type": "array", "items": forms.DURATION.schema},
            {"$ref": "#/$defs/RetryConfig"},
        ]
    },
    _show_retry,
)


class FilesConfig(_Table, frozen=True, kw_only=True):
    """S3-compatible storage (R2, MinIO, AWS) from which WhatsApp fetches the files that are sent."""

    bucket: Annotated[str, forms.TEXT, "The bucket."]
    endpoint: Annotated[str | None, forms.URL, "Its address, where it is not AWS."] = None
    region: Annotated[str, forms.TEXT, "Its region."] = "auto"
    access_key: Annotated[Secret, forms.SECRET, "The key's name."]
    secret_key: Annotated[Secret, forms.SECRET, "The key."]
    prefix: Annotated[str, forms.TEXT, "What the names of its objects begin with."] = "oncehook/"
    expires: Annotated[float, forms.DURATION, "How long a link to a file works."] = DAY
    public_endpoint: Annotated[
        str | None, forms.URL, "Where WhatsApp reaches it, when that is not where we do (MinIO in a compose file)."
    ] = None
    public_url: Annotated[
        str | None, forms.URL, "The address of a bucket that is open to all: links begin with it, and never expire."
    ] = None


class WhatsAppConfig(_Table, frozen=True, kw_only=True):
    """A WhatsApp API: events routed here are messages, and are sent."""

    api: Annotated[Literal["meta", "evolution-api", "evolution-go"], forms.WHATSAPP_API, "Which API it speaks."]
    token: Annotated[Secret | None, forms.SECRET, "The access token (Meta), or the instance's (Evolution Go)."] = None
    api_key: Annotated[
        Secret | None, forms.SECRET, "The API key (Evolution API), or the administrator's (Evolution Go)."
    ] = None
    phone_number_id: Annotated[str | None, forms.PHONE, "The number that sends (Meta)."] = None
    instance: Annotated[str | None, forms.TEXT, "The instance that sends (Evolution)."] = None
    base_url: Annotated[str | None, forms.URL, "Where the API is; Meta's own, unless said."] = None
    version: Annotated[str | None, forms.TEXT, "The version of the API (Meta)."] = None
    proxy: Annotated[
        Secret | str | None,
        forms.PROXY,
        'A proxy to go through (http://… or socks5://…), or "env": as ONCEHOOK_PROXY says.',
    ] = None
    country: Annotated[str | None, forms.COUNTRY, 'The calling code of numbers written without one, as in "55".'] = None
    files: FilesConfig | None = None


class DestinationConfig(_Table, frozen=True, kw_only=True):
    """Where events are sent: to a web address, or over WhatsApp."""

    url: Annotated[
        str | Secret | None, forms.ADDRESS, "The address to send to; a reference where it is a secret (Slack's)."
    ] = None
    path: Annotated[
        Secret | None, forms.SECRET, "How the address goes on, where only that is a secret: appended to url."
    ] = None
    preset: Annotated[
        ReceiverName | None, forms.choice(*NAMES), "A known receiver: n8n, which is waited for while it starts."
    ] = None
    whatsapp: WhatsAppConfig | None = None
    unsure: Annotated[
        Literal["retry", "dead"],
        forms.choice("retry", "dead"),
        "With whatsapp: what becomes of a message when nobody can tell whether it was sent.",
    ] = "retry"
    sign: Annotated[tuple[Secret, ...], forms.SECRETS, "What to sign with (Standard Webhooks)."] = ()
    headers: Annotated[dict[str, str | Secret], forms.HEADERS, "Headers to add."] = {}
    forward_headers: Annotated[tuple[str, ...], forms.HEADER_NAMES, "Headers of the sender to pass on."] = ()
    timeout: Annotated[float, forms.DURATION, "How long an attempt may take."] = 15.0
    retry: Annotated[str | tuple[float, ...] | RetryConfig, _RETRY, "When to try again."] = "durable"
    transient: Annotated[tuple[int, ...], forms.STATUSES, "Statuses to try again that are permanent elsewhere."] = ()
    permanent: Annotated[tuple[int, ...], forms.STATUSES, "Statuses that make a dead letter at once."] = ()
    rate: Annotated[float | None, forms.RATE, "How many attempts to begin, per worker process."] = None
    concurrency: Annotated[int, forms.whole(1, 10_000), "How many attempts at once, per worker process."] = 16
    breaker: BreakerConfig = BreakerConfig()
    lease: Annotated[float, forms.DURATION, "How long a worker's silence is borne."] = 10.0
    allow_private: Annotated[
        bool | tuple[Network, ...], forms.PRIVATE, "Whether, or in which networks, it may be a private address."
    ] = False
    ca: Annotated[
        Path | None, forms.CERTIFICATES, "A file of certificates that are trusted instead of the system's."
    ] = None

    @property
    def is_secret(self) -> bool:
        """Whether its address, or a part of it, is kept by reference."""
        return self.path is not None or isinstance(self.url, Secret)

    def whole_url(self) -> str | None:
        """Return the address as it is called, references resolved. Raises ConfigError, which does not repeat it."""
        if self.url is None:
            return None
        url = read_url(_revealed(self.url))
        return url if self.path is None else read_url(with_path(url, _revealed(self.path)))


def _revealed(value: str | Secret) -> str:
    if isinstance(value, str):
        return value
    try:
        return value.reveal().decode()
    except UnicodeDecodeError:
        raise ConfigError(f"{value.name} is not UTF-8 text") from None


class RouteConfig(_Table, frozen=True, kw_only=True):
    """Sends events of a source to a destination, if a filter agrees."""

    from_: Annotated[str, forms.TEXT, "The source."] = msgspec.field(name="from")
    to: Annotated[str, forms.TEXT, "The destination."]
    when: Annotated[dict[str, str | list[str]], forms.WHEN, "What must hold, all of it."] = {}
    coalesce: Annotated[
        bool | Literal["any"] | None,
        forms.COALESCE,
        "One attempt for all that wait on a subject (default: the preset's).",
    ] = None
    latest_wins: Annotated[bool, forms.FLAG, "Leave out what was overtaken by a higher rank."] = False
    on_dead: Annotated[
        Literal["continue", "hold"], forms.choice("continue", "hold"), "What a dead letter does to its successors."
    ] = "continue"


# -- the whole ---------------------------------------------------------------------------------


class TokenConfig(_Table, frozen=True, kw_only=True):
    """A bearer token for the API."""

    name: Annotated[str, forms.TEXT, "Who holds it, for the audit log."]
    role: Annotated[RoleName, forms.choice(*ROLES), "What it may do."]
    token: Annotated[Secret, forms.SECRET, "Where it is kept."]
    expires: Annotated[datetime | None, forms.MOMENT, "The day or moment (UTC) from which on it is none any more."] = (
        None
    )
    sources: Annotated[
        tuple[str, ...] | None, forms.NAMES, "The sources that it sees and acts on (default: all of them)."
    ] = None
    payloads: Annotated[bool, forms.FLAG, "Whether it sees bodies, header values, previews and answers."] = True


class OidcConfig(_Table, frozen=True, kw_only=True):
    """An OpenID provider that people sign in with at the dashboard. Needs `oncehook[oidc]`."""

    issuer: Annotated[str, forms.SITE, "The provider, exactly as it calls itself in its tokens (`iss`)."]
    client_id: Annotated[str, forms.TEXT, "What the provider calls this inbox."]
    client_secret: Annotated[Secret, forms.SECRET, "What this inbox proves itself to the provider with."]
    public_url: Annotated[
        str, forms.SITE, "Where browsers find the dashboard; register `…/login/oidc/callback` below it."
    ]
    roles: Annotated[
        dict[str, tuple[str, ...]],
        forms.ROLES,
        'Which values of the claim make which role, as in `{ admin = ["ops"], viewer = ["staff"] }`; '
        "the highest counts, and without one nobody comes in.",
    ]
    roles_claim: Annotated[
        str, forms.TEXT, "The claim of the ID token that decides; `a.b` also finds `b` inside `a`."
    ] = "groups"
    scopes: Annotated[tuple[str, ...], forms.SCOPES, "What the provider is asked for."] = ("openid", "email", "profile")
    email_domains: Annotated[
        tuple[str, ...], forms.DOMAINS, "Let in only people whose verified email address is in one of these domains."
    ] = ()
    name: Annotated[str | None, forms.TEXT, "What the login page calls the provider; its host, unless said."] = None
    allow_private: Annotated[
        bool | tuple[Network, ...], forms.PRIVATE, "Whether, or in which networks, the provider may be private."
    ] = False


class ServerConfig(_Table, frozen=True, kw_only=True):
    """Where and to whom oncehook answers."""

    host: Annotated[str, forms.HOST, "The address to listen on."] = "127.0.0.1"
    port: Annotated[int, forms.whole(0, 65535), "The port to listen on."] = 4020
    admin_token: Annotated[Secret | None, forms.SECRET, "Bearer for the API, password for the dashboard."] = None
    tokens: list[TokenConfig] = []
    oidc: OidcConfig | None = None
    trusted_proxies: Annotated[
        tuple[Network, ...], forms.PROXIES, "Whose X-Forwarded headers are believed; they end TLS."
    ] = ()
    admin_bind: Annotated[str | None, forms.BIND, "Another address and port for API, dashboard and metrics."] = None
    public_without_tls: Annotated[bool, forms.FLAG, "Listen publicly in clear text, by name."] = False
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        forms.choice("debug", "info", "warning", "error"),
        "From which level on to log.",
    ] = "info"


class RetentionConfig(_Table, frozen=True, kw_only=True):
    """How long things are kept where a source says nothing."""

    keep_keys: Annotated[float | None, forms.DURATION, "How long a key is remembered."] = None
    keep_events: Annotated[float, forms.DURATION, "How long finished events are kept."] = 30 * DAY


def _retention(value: object, place: Place) -> RetentionConfig:
    # short form: how long events stay. Keys are not meant by it, lest a short retention forget them too early.
    table = value if isinstance(value, dict) else {"keep_events": value}
    retention: RetentionConfig = place.table(RetentionConfig, table)
    return retention


_RETENTION: Final = Form(
    _retention,
    {"anyOf": [forms.DURATION.schema, {"$ref": "#/$defs/RetentionConfig"}]},
    lambda retention: show_table(retention),
)


class EncryptConfig(_Table, frozen=True, kw_only=True):
    """Encryption of bodies, headers and answers in the store."""

    key: Annotated[
        tuple[Secret, ...],
        forms.SECRETS,
        "32 random bytes as base64 or hex; a list while rotating: the first encrypts, all decrypt.",
    ]
    decrypt_only: Annotated[bool, forms.FLAG, "Keep what is new as it comes; what is encrypted stays readable."] = False


class WatermarkConfig(_Table, frozen=True, kw_only=True):
    """Levels that raise an alert."""

    dead: Annotated[int | None, forms.whole(1, 10**12), "Dead letters."] = None
    oldest_due: Annotated[float | None, forms.DURATION, "How long the oldest delivery has been due."] = None
    daily_volume: Annotated[
        dict[str, int],
        forms.VOLUMES,
        "Events a day, by source, or messages where the preset tells them apart (WhatsApp presets: 50; 0: no limit).",
    ] = {}
    disk: Annotated[float | None, forms.FRACTION, "Free part of the disk."] = None


class Config(_Table, frozen=True, kw_only=True):
    """All settings of an inbox."""

    store: Annotated[str, forms.STORE, "Where everything is kept."] = "sqlite:./oncehook.db"
    migrate: Annotated[bool, forms.FLAG, "Whether the store brings its schema up to date at start."] = True
    retention: Annotated[RetentionConfig, _RETENTION, "How long things are kept where a source says nothing."] = (
        RetentionConfig()
    )
    encrypt: EncryptConfig | None = None
    watermark: WatermarkConfig = WatermarkConfig()
    server: ServerConfig = ServerConfig()
    source: dict[str, SourceConfig] = {}
    destination: dict[str, DestinationConfig] = {}
    route: list[RouteConfig] = []

    @property
    def shown_store(self) -> str:
        """The store's address as it may be shown: without its password (S26)."""
        return forms.hide_password(self.store)

    def __repr__(self) -> str:
        return (
            f"Config(store={self.shown_store!r}, source={list(self.source)}, "
            f"destination={list(self.destination)}, route={len(self.route)})"
        )


def show_table(table: msgspec.Struct) -> dict[str, object]:
    """A small table as it may be shown; what nobody has said is left out."""
    values = {key: (field, getattr(table, field.attribute)) for key, field in fields_of(type(table)).items()}
    return {key: field.form.show(value) for key, (field, value) in values.items() if field.form and value is not None}


# -- for editors -------------------------------------------------------------------------------


def schema() -> dict[str, Any]:
    """JSON Schema of the configuration file."""
    defs = {kind.__name__: _table_schema(kind) for kind in _tables(Config)}
    top = defs.pop(Config.__name__)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **top,
        "title": "oncehook.toml",
        "$defs": defs | {kind.__name__: _table_schema(kind) for kind in (RetryConfig, RetentionConfig)},
    }


def _tables(kind: type[msgspec.Struct]) -> list[type[msgspec.Struct]]:
    below = [table for field in fields_of(kind).values() if not field.form and (table := table_of(field.hint))]
    return [kind, *(table for inner in below for table in _tables(inner))]


def _table_schema(kind: type[msgspec.Struct]) -> dict[str, Any]:
    fields = fields_of(kind)
    return {
        "title": kind.__name__,
        "description": (kind.__doc__ or "").strip(),
        "type": "object",
        "properties": {key: _field_schema(field) for key, field in fields.items()},
        "required": [key for key, field in fields.items() if field.required],
        "additionalProperties": False,
    }


def _field_schema(field: Field) -> dict[str, Any]:
    if field.form is None:
        return _nested_schema(field)
    described = dict(field.form.schema)
    if field.about:
        described["description"] = field.about
    if isinstance(field.default, str | int | float):
        described["default"] = field.default
    return described


def _nested_schema(field: Field) -> dict[str, Any]:
    kind = table_of(field.hint)
    reference = {"$ref": f"#/$defs/{kind.__name__ if kind else ''}"}
    shape = typing.get_origin(field.hint)
    if shape is dict:
        names = {"pattern": f"^{forms.NAME.pattern}$"}
        return {"type": "object", "propertyNames": names, "additionalProperties": reference}
    return {"type": "array", "items": reference} if shape is list else reference
