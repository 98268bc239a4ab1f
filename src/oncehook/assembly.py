"""From settings to parts: store, sources and destinations, as the configuration or a program describes them.

`inbox` calls these. Durations and sizes may be words here, and are numbers from here on. The one place that names an
engine.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from ipaddress import ip_network
from pathlib import Path
from typing import Any, cast

from oncehook import presets, units, verify
from oncehook.backoff import Policy, policy
from oncehook.config import DestinationConfig, SourceConfig
from oncehook.config.tables import RetryConfig
from oncehook.deliveries import Breaker
from oncehook.destinations.base import Terms
from oncehook.destinations.http import HttpDestination
from oncehook.errors import ConfigError
from oncehook.model import Headers
from oncehook.secret import Secret
from oncehook.sources import Source, build, split_at
from oncehook.store.base import Store
from oncehook.verify import Genuine, Scheme


def source_from(name: str, settings: SourceConfig) -> Source:
    """The source that checked settings describe."""
    translated = {"preset", "verify", "secret", "verify_token", "split"}
    plain = {field: getattr(settings, field) for field in settings.__struct_fields__ if field not in translated}
    return build(
        name,
        preset=presets.load(settings.preset) if settings.preset else None,
        scheme=scheme_of(settings.verify),
        secrets=[secret.reveal() for secret in settings.secret],
        verify_token=settings.verify_token.reveal() if settings.verify_token else None,
        split=split_at(settings.split) if settings.split else None,
        loopback_only=settings.is_loopback_only,
        **plain,
    )


def scheme_of(spec: str | Mapping[str, object] | Scheme | Genuine | None) -> Scheme | None:
    """The verifier that a setting or a program names."""
    if spec is None or isinstance(spec, str | Mapping):
        return None if spec is None else verify.from_config(spec)
    return cast("Scheme", spec) if hasattr(spec, "verifier") else verify.Custom(spec)


def in_units(settings: dict[str, Any]) -> dict[str, Any]:
    """Words to numbers, where a setting is a duration or a size."""
    for field in ("budget", "keep_keys", "keep_events", "tolerance"):
        if isinstance(settings.get(field), str):
            off = field == "tolerance" and settings[field] == "off"
            settings[field] = float("inf") if off else units.seconds(settings[field])
    if isinstance(settings.get("max_body"), str):
        settings["max_body"] = units.size(settings["max_body"])
    if "ip_allow" in settings:
        settings["ip_allow"] = [ip_network(text) for text in settings["ip_allow"]]
    return settings


def from_env(variable: str, source: str) -> bytes:
    """A secret out of the environment; raises ConfigError when it is not there."""
    return Secret.from_env(variable, f"source.{source}.secret", os.environ).reveal()


def as_secrets(secret: str | bytes | Sequence[str | bytes] | None) -> list[bytes]:
    """One secret or several, as bytes."""
    if secret is None:
        return []
    many: Iterable[str | bytes] = [secret] if isinstance(secret, str | bytes) else secret
    return [one.encode() if isinstance(one, str) else one for one in many]


# -- destinations ------------------------------------------------------------------------------


def destination_from(name: str, settings: DestinationConfig) -> HttpDestination:
    """The destination that checked settings describe."""
    if settings.url is None:
        raise ConfigError(f'Destination "{name}" has no url.', hint="A handler is written in Python: see Inbox.on.")
    terms = Terms(
        retry=_retry(settings.retry),
        timeout=settings.timeout,
        lease=settings.lease,
        concurrency=settings.concurrency,
        rate=settings.rate,
        breaker=Breaker(settings.breaker.failures, settings.breaker.open),
    )
    return HttpDestination(
        name,
        settings.url,
        terms=terms,
        sign=[secret.reveal() for secret in settings.sign],
        headers={header: _text(value) for header, value in settings.headers.items()},
        forward_headers=settings.forward_headers,
        allow_private=settings.allow_private,
    )


def _retry(spec: str | tuple[float, ...] | RetryConfig) -> Policy:
    if isinstance(spec, RetryConfig):
        return Policy(spec.attempts, spec.base, spec.factor, spec.cap, spec.jitter)
    return policy(spec)


def _text(value: str | Secret) -> str:
    return value if isinstance(value, str) else value.reveal().decode()


def terms_of(
    *,
    retry: str | Sequence[str | float] | Mapping[str, object] | Policy = "durable",
    timeout: str | float = 15.0,
    lease: str | float = 10.0,
    concurrency: int = 16,
    rate: str | None = None,
    breaker: Mapping[str, Any] | Breaker | None = None,
) -> Terms:
    """How a destination wants to be treated, as a program says it: durations and rates may be words."""
    if not isinstance(breaker, Breaker):
        said = dict(breaker or {})
        breaker = Breaker(int(said.pop("failures", 10)), units.seconds(said.pop("open", 30.0)))
        if said:
            raise ConfigError(f"A breaker has failures and open, not {sorted(said)}.")
    if concurrency < 1:
        raise ConfigError("concurrency must be 1 or more.")
    return Terms(
        policy(retry), units.seconds(timeout), units.seconds(lease), concurrency,
        None if rate is None else units.rate(rate), breaker,
    )  # fmt: skip


def networks(allow_private: bool | Sequence[str]) -> Any:
    """True, False, or networks as they are written."""
    return allow_private if isinstance(allow_private, bool) else [ip_network(text) for text in allow_private]


# -- store and arrivals --------------------------------------------------------------------------


def open_store(url: str) -> Store:
    """The engine a URL names. Nothing is opened yet."""
    scheme, _, rest = url.partition(":")
    if scheme == "sqlite":
        from oncehook.store.sqlite import SqliteStore

        return SqliteStore(rest.removeprefix("//") or "./oncehook.db")
    if scheme in ("postgresql", "postgres"):
        from oncehook.store.postgres import PostgresStore

        return PostgresStore(url)
    raise ConfigError(
        f"{scheme!r} is not a store this program knows.",
        hint="Write sqlite:./oncehook.db or postgresql://host/database.",
    )


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
