"""Every setting there is: its name, types, meaning and default, one line each.

A noun that Python writes, too (source, destination, route, retry, breaker), is a TypedDict of what may be written: it
types the keywords of `Inbox.source` and the like. The others are Structs of what was read. `SettingsReader` reads both:
the form beside a setting says how its value is written; a Literal or bool needs none. What a source leaves open comes
from its preset, then from `sources.PLAIN`.
"""

# No postponed annotations: `fields_of` reads those of a TypedDict at run time.

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal, TypeAlias, TypedDict

import msgspec

from oncehook.destinations.base import Terms
from oncehook.destinations.receivers import ReceiverName
from oncehook.destinations.registry import find_table
from oncehook.errors import ConfigError
from oncehook.model import Breaker, RoleName
from oncehook.retry import NAMED, Policy, policy
from oncehook.secret import OldSecret, Secret
from oncehook.settings import values
from oncehook.settings.read import MORE_TABLES, Default, Settings, Spot, fields_of
from oncehook.settings.values import Form, Network

if TYPE_CHECKING:
    from oncehook.rules import Spec
    from oncehook.sources import Preset, Splitter
    from oncehook.verify import Verify

DAY: Final = 86_400.0

Duration: TypeAlias = str | float
Texts: TypeAlias = str | Collection[str]
Networks: TypeAlias = Sequence[str | Network]
SecretValue: TypeAlias = str | bytes | OldSecret | Mapping[str, str]
"""A secret as a program gives it: itself, or `{"env": "NAME"}`."""

MissingKey: TypeAlias = Literal[
    "accept", "reject", "body_hash",
    "body_hash:10s", "body_hash:1m", "body_hash:5m", "body_hash:10m", "body_hash:1h", "body_hash:1d",
]  # fmt: skip
"""The usual values, so that a type checker finds a misspelt one; at run time any window is allowed."""
Waits: TypeAlias = list[str] | list[float] | list[Duration] | tuple[Duration, ...]
"""Not any sequence, because a text is one, too."""


class _Table(msgspec.Struct, frozen=True, kw_only=True):
    """A table of settings that only the file has."""


# -- the way in --------------------------------------------------------------------------------


class MediaSettings(TypedDict, total=False):
    """Files that messages refer to (WhatsApp), which are fetched and kept where `bodies` are."""

    token: Annotated[
        SecretValue,
        values.SECRET,
        "The token or key of the provider's API; that of a WhatsApp destination of the same API, unless said.",
    ]
    url: Annotated[str, values.URL, "Where the provider's API is (Evolution API, WAHA); Meta's own, unless said."]
    max_size: Annotated[str | int, values.SIZE, "The largest file that is kept.", Default(100 << 20)]
    types: Annotated[
        Texts,
        values.TEXTS,
        "Patterns of the media types that are kept.",
        Default(("image/*", "audio/*", "video/*", "application/*", "text/*")),
    ]
    allow_private: Annotated[
        bool | Networks, values.PRIVATE, "Whether, or in which networks, the API may be private.", Default(False)
    ]


def _read_media(value: object, place: Spot) -> Settings:
    if not isinstance(value, Mapping) and value != "keep":
        raise ConfigError('must be "keep", or a table such as { token = { env = "META_TOKEN" } }')
    read: Settings = place.table(MediaSettings, value if isinstance(value, Mapping) else {})
    return read


_MEDIA: Final = Form(
    _read_media,
    {"anyOf": [{"enum": ["keep"]}, {"$ref": "#/$defs/MediaSettings"}]},
    lambda media: show_table(MediaSettings, media),
)


class SourceSettings(TypedDict, total=False):
    """A named place hooks come from."""

    preset: Annotated["str | Preset", values.PRESET, "A ready-made source for one provider."]
    verify: Annotated[
        "Verify",
        values.VERIFY,
        "How an arrival proves that it is genuine; of a list, any will do. Nothing is verified only where that is said "
        'by name: `"none"` takes direct requests of this machine only, '
        '`{ scheme = "none", confirm = "anyone may send" }` those of everybody.',
    ]
    secret: Annotated[
        SecretValue | Sequence[SecretValue],
        values.ROTATED_SECRETS,
        "What the sender signs with; a list while rotating, in which old ones may have an until.",
        Default(()),
    ]
    verify_token: Annotated[SecretValue, values.SECRET, "What the provider repeats in its handshake (Meta)."]
    public_url: Annotated[str, values.URL, "The whole URL registered with the provider, query included."]
    tolerance: Annotated[Duration, values.TOLERANCE, 'How old a signature may be, or "off".']
    path: Annotated[str, values.PATH, "An unguessable last part of the address, instead of the name."]
    account: Annotated[
        "Spec",
        values.ACCOUNT,
        'Whose an event is: "address" (/in/{source}/{account}), a place that holds an id or alias, or one id.',
    ]
    key: Annotated["Spec", values.KEY, "What makes two arrivals the same event: places, the first that is there."]
    on_missing_key: Annotated[
        MissingKey,
        values.MISSING_KEY,
        'What to do with an arrival that has no key: `"accept"` it, as a new event each time; `"reject"` it; '
        '`"body_hash"`: take the hash of its body for the key, or `"body_hash:10s"`: for that long only.',
    ]
    on_conflict: Annotated[
        Literal["accept", "reject"], "How to answer a known key with another body.", Default("accept")
    ]
    subject: Annotated["Spec", values.RULE, "The object an event is about; one delivery of a subject at a time."]
    type: Annotated["Spec", values.RULE, "Where the type of an event stands."]
    event_time: Annotated["Spec", values.RULE, "Where the time of an event stands."]
    ignore: Annotated[Texts, values.TEXTS, "Types to acknowledge and count, but not to keep."]
    rank: Annotated["Spec", values.RANK, "Where the rank of an event stands, for latest_wins."]
    rank_scope: Annotated["Spec", values.RULE, "Within what ranks are compared; the subject, unless said."]
    preview: Annotated["Spec", values.RULE, "Where a person's text stands, to be read before a replay."]
    split: Annotated["str | Splitter", values.SPLIT, "The parts of a batch, each to be its own event."]
    redact: Annotated[Texts, values.REDACT, "Fields blanked before storing; [] turns it off."]
    volatile: Annotated[Texts, values.VOLATILE, "Fields that may differ between copies."]
    max_body: Annotated[str | int, values.SIZE, "The largest body that is taken."]
    budget: Annotated[Duration, values.DURATION, "How long a sender may wait for its answer."]
    keep_keys: Annotated[Duration, values.DURATION, "How long a key is remembered."]
    keep_events: Annotated[Duration, values.DURATION, "How long finished events are kept (default: retention's)."]
    revive_dead: Annotated[bool, "Whether a copy of a dead event brings it back."]
    ip_allow: Annotated[Networks, values.NETWORKS, "Networks that may send at all.", Default(())]
    media: Annotated[
        Literal["keep"] | MediaSettings,
        _MEDIA,
        '"keep": fetch the files that messages refer to before they expire there, and keep them.',
    ]


class SourceArguments(SourceSettings, total=False):
    """Settings of a source with the short forms that only Python has."""

    secret_env: str
    verify_token_env: str


# -- the way out -------------------------------------------------------------------------------

_POLICY: Final = Policy(attempts=8, base=10.0, cap=21_600.0)
_TERMS: Final = Terms()


class RetrySettings(TypedDict, total=False):
    """Waits that grow."""

    attempts: Annotated[int, values.whole(1, 1000), "How often to try in all.", Default(_POLICY.attempts)]
    base: Annotated[Duration, values.DURATION, "The first wait.", Default(_POLICY.base)]
    factor: Annotated[
        float, values.FACTOR, "How much longer each wait is than the one before.", Default(_POLICY.factor)
    ]
    cap: Annotated[Duration, values.DURATION, "The longest wait.", Default(_POLICY.cap)]
    jitter: Annotated[
        Duration,
        values.JITTER,
        "What chance adds: up to the whole wait, nothing, or a duration.",
        Default(_POLICY.jitter),
    ]


class BreakerSettings(TypedDict, total=False):
    """When to hold a destination back."""

    failures: Annotated[
        int, values.whole(1, 100_000), "Failures in a row, over different deliveries.", Default(Breaker().failures)
    ]
    open: Annotated[Duration, values.DURATION, "How long to hold back before the next try.", Default(Breaker().open)]


def build_policy(table: Settings) -> Policy:
    """Build the policy that a table of this kind describes. Raises ConfigError."""
    if table.cap < table.base:
        raise ConfigError("cap must not be shorter than base")
    return Policy(**{name: getattr(table, name) for name in fields_of(RetrySettings)})


def _read_retry(value: object, place: Spot) -> Policy:
    if isinstance(value, Policy) and place.is_program:
        return value
    if isinstance(value, Mapping):
        return build_policy(place.table(RetrySettings, value))
    if isinstance(value, list | tuple):
        return policy([values.duration(wait) for wait in value])
    return NAMED[values.one_of(value, tuple(NAMED), ', a list of waits, or { attempts = 8, base = "10s", cap = "6h" }')]


def _show_retry(retry: Policy) -> object:
    for name, known in NAMED.items():
        if retry == known:
            return name
    if not retry.base:
        return [values.DURATION.show(wait) for wait in retry.waits]
    return show_table(RetrySettings, retry)


_RETRY: Final = Form(
    _read_retry,
    {
        "anyOf": [
            {"enum": list(NAMED)},
            {"type": "array", "items": values.DURATION.schema},
            {"$ref": "#/$defs/RetrySettings"},
        ]
    },
    _show_retry,
)


class _UrlSettings(TypedDict, total=False):
    url: Annotated[
        str | Mapping[str, str],
        values.ADDRESS,
        "The address to send to; a reference where it is a secret (Slack's), or a place in the event that names it.",
    ]
    allow_hosts: Annotated[
        Texts, values.ALLOW_HOSTS, "With an address from the event: the hosts that it may name.", Default(())
    ]
    path: Annotated[
        SecretValue, values.SECRET, "How the address goes on, where only that is a secret: appended to url."
    ]
    preset: Annotated[ReceiverName, "A known receiver: n8n, which is waited for while it starts."]
    unsure: Annotated[
        Literal["retry", "dead"],
        "With whatsapp: what becomes of a message when nobody can tell whether it was sent.",
        Default("retry"),
    ]
    sign: Annotated[
        SecretValue | Sequence[SecretValue], values.SECRETS, "What to sign with (Standard Webhooks).", Default(())
    ]
    headers: Annotated[Mapping[str, str | Mapping[str, str]], values.HEADERS, "Headers to add.", Default({})]
    forward_headers: Annotated[Texts, values.HEADER_NAMES, "Headers of the sender to pass on.", Default(())]


class TermSettings(TypedDict, total=False):
    """How a destination of any kind wants to be treated."""

    timeout: Annotated[Duration, values.DURATION, "How long an attempt may take.", Default(_TERMS.timeout)]
    retry: Annotated[
        Literal["quick", "durable"] | Waits | RetrySettings | Policy,
        _RETRY,
        "When to try again.",
        Default(_TERMS.retry),
    ]
    transient: Annotated[
        Collection[int], values.STATUSES, "Statuses to try again that are permanent elsewhere.", Default(())
    ]
    permanent: Annotated[Collection[int], values.STATUSES, "Statuses that make a dead letter at once.", Default(())]
    rate: Annotated[str, values.RATE, "How many attempts to begin, over all workers."]
    concurrency: Annotated[
        int,
        values.whole(1, 10_000),
        f"How many attempts at once, over all workers (unless set: {_TERMS.concurrency} in each worker process).",
    ]
    fair: Annotated[
        "Spec",
        values.RULE,
        "Where the value stands over which work goes in rounds, as in $.account: none holds up the others.",
    ]
    breaker: Annotated[BreakerSettings | Breaker, BreakerSettings, Default({})]
    account: Annotated[str | int, values.ACCOUNT_ID, "The account that it belongs to: it gets no other one's events."]
    subscribe: Annotated[
        str | Sequence[str | Mapping[str, object]],
        values.SUBSCRIBE,
        "Types of emitted events that it gets without a route: of its account, or of all where it has none.",
        Default(()),
    ]
    disable_after: Annotated[
        Duration, values.DURATION, "How long it may fail without a success before it is paused (default: forever)."
    ]
    lease: Annotated[Duration, values.DURATION, "How long a worker's silence is borne.", Default(_TERMS.lease)]


class DestinationSettings(_UrlSettings, TermSettings, total=False):
    """Where events are sent: to a web address, over WhatsApp, or to a kind of destination that a package brings."""

    kind: Annotated[str, values.TEXT, "A kind of destination that needs no settings of its own."]

    allow_private: Annotated[
        bool | Networks, values.PRIVATE, "Whether, or in which networks, it may be a private address.", Default(False)
    ]
    ca: Annotated[str | Path, values.CERTIFICATES, "A file of certificates that are trusted instead of the system's."]


MORE_TABLES[DestinationSettings] = find_table


class DestinationArguments(DestinationSettings, total=False):
    """Settings of a destination with the short forms that only Python has, and the tables of our own kinds."""

    whatsapp: Mapping[str, object]
    celery: Mapping[str, object]
    url_env: str
    path_env: str
    sign_env: str


class RouteSettings(TypedDict, total=False):
    """Which events of a source are sent to a destination, and how."""

    when: Annotated[Mapping[str, str | Sequence[str]], values.WHEN, "What must hold, all of it.", Default({})]
    coalesce: Annotated[
        bool | Literal["any"], values.COALESCE, "One attempt for all that wait on a subject (default: the preset's)."
    ]
    latest_wins: Annotated[bool, "Leave out what was overtaken by a higher rank.", Default(False)]
    on_dead: Annotated[Literal["continue", "hold"], "What a dead letter does to its successors.", Default("continue")]
    priority: Annotated[
        Literal["high", "normal", "low"],
        "What its destination gets first; lower ones get a part, too.",
        Default("normal"),
    ]


class _RouteEnds(TypedDict):
    from_: Annotated[str, values.SOURCE_NAMES, "The source, or a list of several."]
    to: Annotated[str, values.TEXT, "The destination."]


class RouteTable(_RouteEnds, RouteSettings):
    """Sends events of a source to a destination, if a filter agrees."""


class HandlerSettings(TermSettings, RouteSettings, total=False):
    """Settings of a handler: those of its destination and those of its route."""


# -- the whole ---------------------------------------------------------------------------------


class TokenConfig(_Table, frozen=True, kw_only=True):
    """A bearer token for the API."""

    name: Annotated[str, values.TEXT, "Who holds it, for the audit log."]
    role: Annotated[RoleName, "What it may do."]
    token: Annotated[Secret, values.SECRET, "Where it is kept."]
    expires: Annotated[datetime | None, values.MOMENT, "The day or moment (UTC) from which on it is none any more."] = (
        None
    )
    sources: Annotated[
        tuple[str, ...] | None, values.NAMES, "The sources that it sees and acts on (default: all of them)."
    ] = None
    accounts: Annotated[
        tuple[str, ...] | None, values.NAMES, "The accounts that it sees and acts on (default: all of them)."
    ] = None
    payloads: Annotated[bool, "Whether it sees bodies, header values, previews and answers."] = True


class OidcConfig(_Table, frozen=True, kw_only=True):
    """An OpenID provider that people sign in with at the dashboard. Needs `oncehook[oidc]`."""

    issuer: Annotated[str, values.SITE, "The provider, exactly as it calls itself in its tokens (`iss`)."]
    client_id: Annotated[str, values.TEXT, "What the provider calls this inbox."]
    client_secret: Annotated[Secret, values.SECRET, "What this inbox proves itself to the provider with."]
    public_url: Annotated[
        str, values.SITE, "Where browsers find the dashboard; register `…/login/oidc/callback` below it."
    ]
    roles: Annotated[
        dict[str, tuple[str, ...]],
        values.ROLES,
        'Which values of the claim make which role, as in `{ admin = ["ops"], viewer = ["staff"] }`; '
        "the highest counts, and without one nobody comes in.",
    ]
    roles_claim: Annotated[
        str, values.TEXT, "The claim of the ID token that decides; `a.b` also finds `b` inside `a`."
    ] = "groups"
    scopes: Annotated[tuple[str, ...], values.SCOPES, "What the provider is asked for."] = (
        "openid",
        "email",
        "profile",
    )
    email_domains: Annotated[
        tuple[str, ...], values.DOMAINS, "Let in only people whose verified email address is in one of these domains."
    ] = ()
    name: Annotated[str | None, values.TEXT, "What the login page calls the provider; its host, unless said."] = None
    allow_private: Annotated[
        bool | tuple[Network, ...], values.PRIVATE, "Whether, or in which networks, the provider may be private."
    ] = False


class PortalConfig(_Table, frozen=True, kw_only=True):
    """The page for customers, at `/portal`: the dashboard narrowed to one account."""

    url: Annotated[
        str | None, values.SITE, "Where customers find this server; links begin with it. Its own address, unless said."
    ] = None
    frame_ancestors: Annotated[
        tuple[str, ...], values.ORIGINS, "Sites whose pages may show the portal in a frame, by name."
    ] = ()


class ServerConfig(_Table, frozen=True, kw_only=True):
    """Where and to whom oncehook answers."""

    host: Annotated[str, values.HOST, "The address to listen on."] = "127.0.0.1"
    port: Annotated[int, values.whole(0, 65535), "The port to listen on."] = 4020
    admin_token: Annotated[Secret | None, values.SECRET, "Bearer for the API, password for the dashboard."] = None
    tokens: list[TokenConfig] = []
    oidc: OidcConfig | None = None
    portal: PortalConfig | None = None
    trusted_proxies: Annotated[
        tuple[Network, ...], values.PROXIES, "Whose X-Forwarded headers are believed; they end TLS."
    ] = ()
    admin_bind: Annotated[str | None, values.BIND, "Another address and port for API, dashboard and metrics."] = None
    public_without_tls: Annotated[bool, "Listen publicly in clear text, by name."] = False
    log_level: Annotated[Literal["debug", "info", "warning", "error"], "From which level on to log."] = "info"
    receivers: Annotated[
        int, values.whole(1, 64), "Processes that take arrivals in; 1: the server itself does, alone."
    ] = 1


class RetentionConfig(_Table, frozen=True, kw_only=True):
    """How long things are kept where a source says nothing."""

    keep_keys: Annotated[float | None, values.DURATION, "How long a key is remembered."] = None
    keep_events: Annotated[float, values.DURATION, "How long finished events are kept."] = 30 * DAY


def _retention(value: object, place: Spot) -> RetentionConfig:
    # short form for events only: a short retention must not make keys lapse too early
    table = value if isinstance(value, dict) else {"keep_events": value}
    retention: RetentionConfig = place.table(RetentionConfig, table)
    return retention


_RETENTION: Final = Form(
    _retention,
    {"anyOf": [values.DURATION.schema, {"$ref": "#/$defs/RetentionConfig"}]},
    lambda retention: show_table(RetentionConfig, retention),
)


class EncryptConfig(_Table, frozen=True, kw_only=True):
    """Encryption of bodies, headers and answers in the store."""

    key: Annotated[
        tuple[Secret, ...],
        values.SECRETS,
        "32 random bytes as base64 or hex; a list while rotating: the first encrypts, all decrypt.",
    ]
    decrypt_only: Annotated[bool, "Keep what is new as it comes; what is encrypted stays readable."] = False


class ObjectsConfig(_Table, frozen=True, kw_only=True):
    """A bucket or a folder. A bucket needs `oncehook[objects]`."""

    url: Annotated[str, values.OBJECTS, "`s3://bucket/prefix`, `gs://…`, `az://…`, or a folder."]
    endpoint: Annotated[str | None, values.URL, "The address of an S3 that is not AWS (R2, MinIO)."] = None
    region: Annotated[str | None, values.TEXT, "The region of the bucket."] = None
    access_key: Annotated[
        Secret | None, values.SECRET, "The key's name; the environment's, unless said (AWS_ACCESS_KEY_ID …)."
    ] = None
    secret_key: Annotated[Secret | None, values.SECRET, "The key."] = None
    allow_private: Annotated[
        bool | tuple[Network, ...], values.PRIVATE, "Whether, or in which networks, the endpoint may be private."
    ] = False


class BodiesConfig(ObjectsConfig, frozen=True, kw_only=True):
    """A bucket or a folder for large bodies. A bucket needs `oncehook[objects]`."""

    above: Annotated[int, values.SIZE, "The size above which a body is large."] = 256 << 10


def _objects(kind: type) -> Form:
    """Return the form of a table whose url may be said alone."""
    return Form(
        lambda value, place: place.table(kind, value if isinstance(value, Mapping) else {"url": value}),
        {"anyOf": [values.OBJECTS.schema, {"$ref": f"#/$defs/{kind.__name__}"}]},
        lambda objects: show_table(kind, objects),
    )


class WatermarkConfig(_Table, frozen=True, kw_only=True):
    """Levels that raise an alert."""

    dead: Annotated[int | None, values.whole(1, 10**12), "Dead letters."] = None
    oldest_due: Annotated[float | None, values.DURATION, "How long the oldest delivery has been due."] = None
    daily_volume: Annotated[
        dict[str, int],
        values.VOLUMES,
        "Events a day, by source, or messages where the preset tells them apart (WhatsApp presets: 50; 0: no limit).",
    ] = {}
    disk: Annotated[float | None, values.FRACTION, "Free part of the disk."] = None


class Config(_Table, frozen=True, kw_only=True):
    """All settings of an inbox."""

    store: Annotated[str, values.STORE, "Where everything is kept."] = "sqlite:./oncehook.db"
    migrate: Annotated[bool, "Whether the store brings its schema up to date at start."] = True
    retention: Annotated[RetentionConfig, _RETENTION, "How long things are kept where a source says nothing."] = (
        RetentionConfig()
    )
    encrypt: EncryptConfig | None = None
    bodies: Annotated[
        BodiesConfig | None,
        _objects(BodiesConfig),
        "Where large bodies and media are kept (SQLite: a folder beside the file, unless said; PostgreSQL: in the "
        "database).",
    ] = None
    archive: Annotated[
        ObjectsConfig | None, _objects(ObjectsConfig), "Where events are written before they are pruned."
    ] = None
    watermark: WatermarkConfig = WatermarkConfig()
    server: ServerConfig = ServerConfig()
    source: Annotated[dict[str, Settings], SourceSettings] = {}
    destination: Annotated[dict[str, Settings], DestinationSettings] = {}
    route: Annotated[list[Settings], RouteTable] = []

    @property
    def shown_store(self) -> str:
        """Return the store's address without its password (S26)."""
        return values.hide_password(self.store)

    def __repr__(self) -> str:
        return (
            f"Config(store={self.shown_store!r}, source={list(self.source)}, "
            f"destination={list(self.destination)}, route={len(self.route)})"
        )


def show_table(kind: type, table: object) -> dict[str, object]:
    """Return a small table as it may be shown, without settings that are not set."""
    read = {key: (field.form, getattr(table, field.attribute)) for key, field in fields_of(kind).items()}
    return {key: form.show(value) for key, (form, value) in read.items() if form and value is not None}
