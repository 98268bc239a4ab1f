"""From settings to parts: store, sources and destinations, as the configuration or a program describes them.

`inbox` calls these. Durations and sizes may be words here, and are numbers from here on. The one place that names an
engine.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from ipaddress import ip_network
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypedDict, cast

from oncehook import human, presets, verify
from oncehook.categories import Classify, Rules
from oncehook.destinations.base import Destination, Terms
from oncehook.destinations.http import HttpDestination
from oncehook.errors import ConfigError
from oncehook.model import Breaker, Engine, Headers
from oncehook.retry import Policy, policy
from oncehook.routes import Route
from oncehook.secret import OldSecret, Secret, read_secret
from oncehook.settings import DestinationConfig, EncryptConfig, Loaded, SourceConfig, WatermarkConfig
from oncehook.settings.tables import FilesConfig, RetryConfig, RouteConfig, WhatsAppConfig
from oncehook.settings.twice import Twice
from oncehook.sources import Source, Splitter, build, split_at
from oncehook.store.base import NameIds, Store
from oncehook.store.cipher import Cipher, read_key
from oncehook.upkeep import Limits
from oncehook.verify import Nothing, Scheme, Verify
from oncehook.whatsapp.destination import SenderDestination

if TYPE_CHECKING:
    from oncehook.whatsapp.sender import Sender
    from oncehook.whatsapp.storage import S3Files


def source_from(name: str, settings: SourceConfig) -> Source:
    """The source that checked settings describe."""
    translated = {"preset", "verify", "secret", "verify_token", "split"}
    plain = {field: getattr(settings, field) for field in settings.__struct_fields__ if field not in translated}
    return build(
        name,
        preset=presets.load(settings.preset) if settings.preset else None,
        scheme=scheme_of(settings.verify),
        secrets=[
            secret.reveal() if secret.until is None else OldSecret(secret.reveal(), secret.until, secret.name)
            for secret in settings.secret
        ],
        verify_token=settings.verify_token.reveal() if settings.verify_token else None,
        split=split_at(settings.split) if settings.split else None,
        loopback_only=settings.is_loopback_only,
        **plain,
    )


def source_of(
    name: str,
    preset: str | None,
    verify: Verify | None,
    *,
    split: str | Splitter | None,
    **settings: Any,
) -> Source:
    """The source that a program describes: durations and sizes may be words."""
    scheme = scheme_of(verify)
    confirmed = isinstance(verify, Mapping) and "confirm" in verify
    # Unverified and unconfirmed: for direct requests of this machine (DESIGN.md 8.11).
    settings.setdefault("loopback_only", isinstance(scheme, Nothing) and not confirmed)
    return build(
        name,
        preset=presets.load(preset) if preset else None,
        scheme=scheme,
        split=split_at(split) if isinstance(split, str) else split,
        **in_units(settings),
    )


def scheme_of(spec: Verify | None) -> Scheme | None:
    """The verifier that a setting or a program names."""
    if spec is None or isinstance(spec, str | Mapping | Sequence):
        return None if spec is None else verify.from_config(spec)
    return cast("Scheme", spec) if hasattr(spec, "verifier") else verify.Custom(spec)


def in_units(settings: dict[str, Any]) -> dict[str, Any]:
    """Words to numbers, where a setting is a duration or a size."""
    for field in ("budget", "keep_keys", "keep_events", "tolerance"):
        if isinstance(settings.get(field), str):
            off = field == "tolerance" and settings[field] == "off"
            settings[field] = float("inf") if off else human.seconds(settings[field])
    if isinstance(settings.get("max_body"), str):
        settings["max_body"] = human.size(settings["max_body"])
    if "ip_allow" in settings:
        settings["ip_allow"] = [ip_network(text) for text in settings["ip_allow"]]
    return settings


def from_env(variable: str, source: str) -> bytes:
    """A secret out of the environment; raises ConfigError when it is not there."""
    return Secret.from_env(variable, f"source.{source}.secret", os.environ).reveal()


SecretValue = str | bytes | OldSecret


def rotated_secrets(secret: SecretValue | Sequence[SecretValue] | None) -> list[bytes | OldSecret]:
    """One secret or several, as bytes; old ones may have an end."""
    if secret is None:
        return []
    many: Iterable[SecretValue] = [secret] if isinstance(secret, SecretValue) else secret
    return [one.encode() if isinstance(one, str) else one for one in many]


def as_secrets(secret: str | bytes | Sequence[str | bytes] | None) -> list[bytes]:
    """One secret or several, as bytes."""
    return [one for one in rotated_secrets(secret) if isinstance(one, bytes)]


# -- destinations ------------------------------------------------------------------------------


def destination_from(name: str, settings: DestinationConfig) -> Destination:
    """The destination that checked settings describe."""
    if settings.whatsapp is not None:
        sender = sender_from(
            settings.whatsapp, timeout=settings.timeout, allow_private=settings.allow_private, ca=settings.ca
        )
        return SenderDestination(name, sender, _terms(settings), unsure=settings.unsure)
    url = settings.whole_url()
    if url is None:
        raise ConfigError(f'Destination "{name}" has no url.', hint="A handler is written in Python: see Inbox.on.")
    return HttpDestination(
        name,
        url,
        is_secret=settings.is_secret,
        terms=_terms(settings),
        sign=[secret.reveal() for secret in settings.sign],
        headers={header: _text(value) for header, value in settings.headers.items()},
        forward_headers=settings.forward_headers,
        allow_private=settings.allow_private,
        ca=settings.ca,
        preset=settings.preset,
    )


def _terms(settings: DestinationConfig) -> Terms:
    return Terms(
        retry=_retry(settings.retry),
        timeout=settings.timeout,
        lease=settings.lease,
        concurrency=settings.concurrency,
        rate=settings.rate,
        breaker=Breaker(settings.breaker.failures, settings.breaker.open),
        rules=Rules(frozenset(settings.transient), frozenset(settings.permanent)),
    )


def sender_from(settings: WhatsAppConfig, *, files: S3Files | None = None, **options: Any) -> Sender:
    """The WhatsApp API that checked settings describe; `files` serves where they name no storage."""
    from oncehook import whatsapp

    said = {field: getattr(settings, field) for field in settings.__struct_fields__ if field != "files"}
    if settings.api == "evolution-go":
        said["admin_key"] = said.pop("api_key")
    return whatsapp.sender(**said, files=files if settings.files is None else _files(settings.files), **options)


def _files(settings: FilesConfig) -> S3Files:
    from oncehook.whatsapp.storage import S3Files

    return S3Files(**{field: getattr(settings, field) for field in settings.__struct_fields__})


def route_from(settings: RouteConfig) -> Route:
    """The route that checked settings describe."""
    return Route(
        settings.from_, settings.to, settings.when or {}, settings.coalesce, settings.latest_wins, settings.on_dead
    )


def own_routes(destinations: Iterable[Destination], sources: Collection[str], known: Sequence[Route]) -> list[Route]:
    """A sender is also given what a program emits under its name, unless a source of arrivals has that name."""
    senders = [one.name for one in destinations if one.kind == SenderDestination.kind and one.name not in sources]
    there = {route.source for route in known if route.source == route.destination}
    return [Route(name, name) for name in senders if name not in there]


def _retry(spec: str | tuple[float, ...] | RetryConfig) -> Policy:
    if isinstance(spec, RetryConfig):
        return Policy(spec.attempts, spec.base, spec.factor, spec.cap, spec.jitter)
    return policy(spec)


def _text(value: str | Secret) -> str:
    return value if isinstance(value, str) else value.reveal().decode()


class TermSettings(TypedDict, total=False):
    """How a destination wants to be treated, in the words of `[destination.NAME]`."""

    retry: str | Sequence[str | float] | Mapping[str, object] | Policy
    timeout: str | float
    lease: str | float
    concurrency: int
    rate: str | None
    breaker: Mapping[str, Any] | Breaker | None
    transient: Collection[int]
    permanent: Collection[int]


def terms_of(
    *,
    retry: str | Sequence[str | float] | Mapping[str, object] | Policy = "durable",
    timeout: str | float = 15.0,
    lease: str | float = 10.0,
    concurrency: int = 16,
    rate: str | None = None,
    breaker: Mapping[str, Any] | Breaker | None = None,
    transient: Collection[int] = (),
    permanent: Collection[int] = (),
    classify: Classify | None = None,
    shared: Sequence[Classify] = (),
) -> Terms:
    """How a destination wants to be treated, as a program says it: durations and rates may be words."""
    if not isinstance(breaker, Breaker):
        said = dict(breaker or {})
        breaker = Breaker(int(said.pop("failures", 10)), human.seconds(said.pop("open", 30.0)))
        if said:
            raise ConfigError(f"A breaker has failures and open, not {sorted(said)}.")
    if concurrency < 1:
        raise ConfigError("concurrency must be 1 or more.")
    return Terms(
        policy(retry), human.seconds(timeout), human.seconds(lease), concurrency,
        None if rate is None else human.rate(rate), breaker,
        Rules(frozenset(transient), frozenset(permanent), classify, shared),
    )  # fmt: skip


def networks(allow_private: bool | Sequence[str]) -> Any:
    """True, False, or networks as they are written."""
    return allow_private if isinstance(allow_private, bool) else [ip_network(text) for text in allow_private]


# -- store and arrivals --------------------------------------------------------------------------


ENGINES: Final = {"sqlite": Engine.sqlite, "postgresql": Engine.postgres, "postgres": Engine.postgres}
"""Engines by the scheme of a store's address."""


def engine_of(url: str) -> Engine:
    """Return the engine that an address names. Raises ConfigError for one that is not known."""
    scheme = url.partition(":")[0]
    if scheme not in ENGINES:
        raise ConfigError(
            f"{scheme!r} is not a store this program knows.",
            hint="Write sqlite:./oncehook.db or postgresql://host/database.",
        )
    return ENGINES[scheme]


def open_store(url: str, cipher: Cipher | None = None) -> Store:
    """Build the store at an address. Nothing is opened yet."""
    if engine_of(url) is Engine.sqlite:
        from oncehook.store.sqlite import SqliteStore

        return SqliteStore(_file(url), cipher=cipher)
    from oncehook.store.postgres import PostgresStore

    return PostgresStore(url, cipher=cipher)


Encrypt: TypeAlias = str | bytes | Sequence[str | bytes] | Mapping[str, Any] | EncryptConfig
"""A key or several, or what the settings' table of this name says."""


def cipher_of(encrypt: Encrypt | None) -> Cipher:
    """Make the cipher that a program or checked settings describe. Raises ConfigError, without repeating a key."""
    if encrypt is None:
        return Cipher()
    if isinstance(encrypt, Mapping):
        encrypt = _encrypt_config(encrypt)
    if isinstance(encrypt, EncryptConfig):
        keys = [secret.reveal() for secret in encrypt.key]
        return Cipher([read_key(key) for key in keys], decrypt_only=encrypt.decrypt_only)
    if not encrypt:
        raise ConfigError("encrypt names no key.", hint="Leave it out to encrypt nothing.")
    return Cipher([read_key(key) for key in as_secrets(encrypt)])


def _encrypt_config(given: Mapping[str, Any]) -> EncryptConfig:
    if "key" not in given or not set(given) <= {"key", "decrypt_only"}:
        raise ConfigError("encrypt takes `key` and `decrypt_only`.", hint='Write {"key": {"env": "NAME"}}.')
    many = given["key"] if isinstance(given["key"], list | tuple) else [given["key"]]
    secrets = [read_secret(one, "encrypt.key", env=os.environ, base=Path()) for one in many]
    return EncryptConfig(key=tuple(secrets), decrypt_only=bool(given.get("decrypt_only", False)))


def is_same_store(url: str, other: str) -> bool:
    """Whether two addresses lead to one store: that of a file can be written in several ways."""
    files = [Path(_file(one)).resolve() for one in (url, other) if one.startswith("sqlite:")]
    return url == other or (len(files) == 2 and files[0] == files[1])


def _file(url: str) -> str:
    return url.partition(":")[2].removeprefix("//") or "./oncehook.db"


def limits_of(mark: WatermarkConfig) -> Limits:
    """The limits that checked settings describe."""
    return Limits(mark.dead, mark.oldest_due, mark.daily_volume, mark.disk)


def both_limits(mine: Limits, loaded: Loaded, twice: Twice) -> Limits:
    """The limits that a program and a file have set between them."""
    theirs = limits_of(loaded.config.watermark)
    volumes = {
        name: twice.one_of(
            f"watermark.daily_volume.{name}", mine.daily_volume.get(name), None, theirs.daily_volume.get(name)
        )
        for name in {**mine.daily_volume, **theirs.daily_volume}
    }
    single = {
        name: twice.one_of(f"watermark.{name}", getattr(mine, name), None, getattr(theirs, name))
        for name in ("dead", "oldest_due", "disk")
    }
    return Limits(**single, daily_volume={name: limit for name, limit in volumes.items() if limit is not None})


def assign_ids(
    numbers: NameIds, sources: Mapping[str, Source], destinations: Mapping[str, Destination], routes: Sequence[Route]
) -> dict[str, list[Route]]:
    """Give everything its number in the store; returns the routes by their source."""
    for source in sources.values():
        source.id = numbers.sources[source.name]
    for destination in destinations.values():
        destination.id = numbers.destinations[destination.name]
    by_source: dict[str, list[Route]] = {}
    for route in routes:
        route.destination_id = numbers.destinations[route.destination]
        known = sources.get(route.source)
        route.fix_options(known.preset.coalesce if known and known.preset else False)
        by_source.setdefault(route.source, []).append(route)
    return by_source


def free_disk(store: Store) -> float | None:
    """The free part of the disk under a SQLite store; None where it is somebody else's disk."""
    path: Path | None = getattr(store, "path", None)
    if path is None:
        return None
    usage = shutil.disk_usage(path.parent)
    return usage.free / usage.total


def as_headers(headers: Headers | Mapping[str, str]) -> Headers:
    """Headers as an arrival has them: names in lower case, both sides bytes."""
    if not isinstance(headers, Mapping):
        return [(name.lower(), value) for name, value in headers]
    return [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
