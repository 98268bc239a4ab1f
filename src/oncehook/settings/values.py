"""Forms of values: how the value of a setting is read, shown, and described to an editor.

Each `Form` takes a value as TOML or Python gave it and returns what the program uses, or raises ConfigError with a
sentence on what to write instead.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import SplitResult, urlsplit

from oncehook import human, model
from oncehook.destinations.base import Subscription
from oncehook.destinations.event_address import check_event_address, is_event_address
from oncehook.errors import ConfigError
from oncehook.http_client.hosts import AllowedHosts
from oncehook.http_client.urls import is_address, read_url, shown_url
from oncehook.human import nearest, suggest_clause
from oncehook.payload import BodyHash, Redaction
from oncehook.secret import REFERENCE_FORMS, Secret

if TYPE_CHECKING:
    from oncehook.settings.read import Spot

Network = IPv4Network | IPv6Network

NAME: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
NAME_FORM: Final = "lower-case letters, digits, dashes and underscores, at most 63 and not starting with a dash"


@dataclass(frozen=True, slots=True)
class Form:
    """One way to write a value."""

    read: Callable[[Any, Spot], Any]
    schema: Mapping[str, Any]
    show: Callable[[Any], object] = lambda value: value
    is_secret: bool = False


# -- plain values ------------------------------------------------------------------------------


def _text(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ConfigError("must be text in quotes, and not empty")
    return value


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ConfigError("must be true or false")
    return value


def _texts(value: object) -> tuple[str, ...]:
    if isinstance(value, Collection) and not isinstance(value, str | bytes | Mapping):
        return tuple(map(_text, value))
    return (_text(value),)


def whole(low: int, high: int) -> Form:
    """Return the form of a whole number within limits."""

    def read(value: object, place: Spot) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ConfigError(f"must be a whole number from {low} to {high}")
        return value

    return Form(read, {"type": "integer", "minimum": low, "maximum": high})


def choice(*words: str) -> Form:
    """Return the form of one of some words."""
    return Form(lambda value, place: one_of(value, words), {"enum": list(words)})


def one_of(value: object, words: Sequence[str], forms: str = "") -> str:
    """Return a word if it is one of these. `forms`: other allowed ways to write the value."""
    if isinstance(value, str) and value in words:
        return value
    near = nearest(value, words) if isinstance(value, str) else ""
    either = (", " if forms else " or ").join(f'"{word}"' for word in words)
    raise ConfigError(f"must be {either}{forms}" + (f'; did you mean "{near}"?' if near else ""))


def _statuses(value: object, place: Spot) -> tuple[int, ...]:
    status = whole(300, 599)
    if not isinstance(value, Collection) or isinstance(value, str | Mapping):
        raise ConfigError("must be a list of statuses; write for example [404, 423]")
    return tuple(status.read(item, place) for item in value)


TEXT: Final = Form(lambda value, place: _text(value), {"type": "string", "minLength": 1})
FLAG: Final = Form(lambda value, place: _flag(value), {"type": "boolean"})
TEXTS: Final = Form(
    lambda value, place: _texts(value),
    {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
    list,
)
STATUSES: Final = Form(_statuses, {"type": "array", "items": {"type": "integer", "minimum": 300, "maximum": 599}}, list)


def _names(value: object, place: Spot) -> tuple[str, ...]:
    names = _texts(value)
    if not names:
        raise ConfigError("must name at least one; leave it out for all of them")
    return names


def _moment(value: object, place: Spot) -> datetime:
    """Read a date, or a time with its offset; TOML has types for both."""
    read = value
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            read = datetime.fromisoformat(value)
    if isinstance(read, date) and not isinstance(read, datetime):
        read = datetime(read.year, read.month, read.day, tzinfo=UTC)
    elif isinstance(value, str) and isinstance(read, datetime) and len(value) <= len("2027-02-15"):
        read = read.replace(tzinfo=UTC)
    if not isinstance(read, datetime) or read.tzinfo is None:
        raise ConfigError("must be a day or a moment in UTC; write for example 2027-02-15 or 2027-02-15T12:00:00Z")
    return read.astimezone(UTC)


SOURCE_NAMES: Final = Form(
    lambda value, place: _text(value),  # several are spread over routes of their own before they are read
    {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]},
)
NAMES: Final = Form(
    _names, {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]}, list
)
MOMENT: Final = Form(_moment, {"type": "string"}, lambda at: f"{at:%Y-%m-%dT%H:%M:%SZ}")


# -- durations, sizes, rates -------------------------------------------------------------------


def duration(value: object) -> float:
    """Read a duration above zero."""
    if not isinstance(value, str | int | float):
        raise ConfigError(f"must be a duration; {human.DURATION_FORMS}")
    if (seconds := human.seconds(value)) <= 0:
        raise ConfigError(f"must be longer than nothing; {human.DURATION_FORMS}")
    return seconds


def _factor(value: object, place: Spot) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value <= 100:
        raise ConfigError("must be a number from 1 to 100")
    return float(value)


def _jitter(value: object, place: Spot) -> float | str:
    if value in ("full", "none"):
        return str(value)
    # older programs write `0` for "none"
    return human.seconds(value) if isinstance(value, str | int | float) else duration(value)


def _size(value: object, place: Spot) -> int:
    if not isinstance(value, str | int) or (count := human.size(value)) < 1:
        raise ConfigError(f"must be a size; {human.SIZE_FORMS}")
    return count


def _fraction(value: object, place: Spot) -> float:
    match = re.fullmatch(r"([0-9]{1,3}(?:\.[0-9]{1,6})?) ?%", value) if isinstance(value, str) else None
    if match is None or not 0 < float(match[1]) < 100:
        raise ConfigError('must be a part of the whole; write for example "10%"')
    return float(match[1]) / 100


def _volumes(value: object, place: Spot) -> dict[str, int]:
    count = whole(0, 10**12)
    if not isinstance(value, dict):
        raise ConfigError("must be a table of sources and numbers; write for example { whatsapp = 50 }")
    return {source: 0 if number == "off" else count.read(number, place) for source, number in value.items()}


def _digits(value: object) -> str:
    """Read digits that form a name, such as a phone number: with or without quotes, because a variable has none."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else _text(value)


def _country(value: object, place: Spot) -> str:
    text = _digits(value)
    if not re.fullmatch(r"\+?[1-9][0-9]{0,2}", text):
        raise ConfigError('must be a calling code; write for example "55"')
    return text.removeprefix("+")


_SPOKEN: Final = {"type": ["string", "number"], "minimum": 0, "examples": ["0.2s", "15s", "5m", "1h30m", "30d"]}

DURATION: Final = Form(lambda value, place: duration(value), _SPOKEN, human.show_duration)
TOLERANCE: Final = Form(
    lambda value, place: math.inf if value == "off" else duration(value),
    _SPOKEN,
    lambda value: "off" if math.isinf(value) else human.show_duration(value),
)
FACTOR: Final = Form(_factor, {"type": "number", "minimum": 1, "maximum": 100})
JITTER: Final = Form(
    _jitter,
    {"type": ["string", "number"], "examples": ["full", "none", "0.5s"]},
    lambda value: value if isinstance(value, str) else human.show_duration(value),
)
SIZE: Final = Form(_size, {"type": ["string", "integer"], "examples": ["1MiB", "64kB"]}, human.show_size)
RATE: Final = Form(
    lambda value, place: human.rate(value),
    {"type": "string", "examples": ["50/s", "100/m", "1000/h"]},
    lambda value: f"{value:g}/s" if value >= 1 else f"{value * 3600:g}/h",
)
FRACTION: Final = Form(_fraction, {"type": "string", "examples": ["10%"]}, lambda value: f"{value * 100:g}%")
VOLUMES: Final = Form(
    _volumes,
    {"type": "object", "additionalProperties": {"anyOf": [{"type": "integer", "minimum": 0}, {"const": "off"}]}},
)
PHONE: Final = Form(lambda value, place: _digits(value), {"type": ["string", "integer"]})
COUNTRY: Final = Form(_country, {"type": ["string", "integer"], "examples": ["55"]})


# -- secrets and headers -----------------------------------------------------------------------

TELLING: Final = re.compile(r"authorization|cookie|token|secret|api-?key|password|credential", re.IGNORECASE)


def _secrets(value: object, place: Spot) -> tuple[Secret, ...]:
    if isinstance(value, list | tuple):
        if not value:
            raise ConfigError(f"must name at least one secret; write {REFERENCE_FORMS}")
        return tuple(place.secret(item) for item in value)
    return (place.secret(value),)


def _rotated_secrets(value: object, place: Spot) -> tuple[Secret, ...]:
    if not isinstance(value, list | tuple) or not value:
        return _secrets(value, place)
    secrets = tuple(place.secret(item, may_end=True) for item in value)
    if all(secret.until is not None for secret in secrets):
        raise ConfigError("must name a secret without until: when the last one ends nothing could be verified")
    return secrets


def _headers(value: object, place: Spot) -> dict[str, str | Secret]:
    if not isinstance(value, Mapping):
        raise ConfigError('must be a table; write for example { X-Team = "billing" }')
    return {name: _header(name, text, place) for name, text in value.items()}


def _header(name: str, value: object, place: Spot) -> str | Secret:
    from oncehook.destinations.http import read_header_name, read_header_value

    read_header_name(name)
    if not isinstance(value, str):
        return place.secret(value)
    # The message does not repeat the value, which may be the secret.
    if TELLING.search(name) and not place.is_program:
        raise ConfigError(f'"{name}" carries a secret, which is written as a reference: {REFERENCE_FORMS}')
    return read_header_value(name, value)


def _header_names(value: object, place: Spot) -> tuple[str, ...]:
    from oncehook.destinations.http import read_forwarded_name

    return tuple(map(read_forwarded_name, _texts(value)))


def show_secret(secret: Secret) -> str:
    until = f", until {secret.until:%Y-%m-%d %H:%M} UTC" if secret.until else ""
    return f"{secret.name} ({'set' if secret.is_set() else 'not set'}{until})"


_REFERENCE: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {kind: {"type": "string", "minLength": 1} for kind in ("env", "file", "credential")},
    "additionalProperties": False,
    "minProperties": 1,
    "maxProperties": 1,
}

SECRET: Final = Form(lambda value, place: place.secret(value), _REFERENCE, show_secret, is_secret=True)
PROXY: Final = Form(
    lambda value, place: value if value == "env" else place.secret(value),
    {"anyOf": [_REFERENCE, {"const": "env"}]},
    lambda proxy: proxy if isinstance(proxy, str) else show_secret(proxy),
    is_secret=True,
)
SECRETS: Final = Form(
    _secrets,
    {"anyOf": [_REFERENCE, {"type": "array", "items": _REFERENCE, "minItems": 1}]},
    lambda secrets: [show_secret(secret) for secret in secrets],
    is_secret=True,
)
_ROTATED: Final = {
    **_REFERENCE,
    "properties": {**_REFERENCE["properties"], "until": {"type": "string", "examples": ["2026-12-01"]}},
    "maxProperties": 2,
}
ROTATED_SECRETS: Final = Form(
    _rotated_secrets,
    {"anyOf": [_REFERENCE, {"type": "array", "items": _ROTATED, "minItems": 1}]},
    SECRETS.show,
    is_secret=True,
)
HEADERS: Final = Form(
    _headers,
    {"type": "object", "additionalProperties": {"anyOf": [{"type": "string"}, _REFERENCE]}},
    lambda headers: {name: show_secret(one) if isinstance(one, Secret) else one for name, one in headers.items()},
)
HEADER_NAMES: Final = Form(_header_names, TEXTS.schema, list)


# -- addresses ---------------------------------------------------------------------------------

_HOSTNAME: Final = re.compile(r"(?=.{1,253}$)[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?")
_PASSWORD: Final = re.compile(r"(://[^:@/?]*):.*@")
_PASSWORD_FIELD: Final = re.compile(r"([?&](?:ssl)?password=)[^&]*", re.IGNORECASE)


def hide_password(url: str) -> str:
    return _PASSWORD_FIELD.sub(r"\1***", _PASSWORD.sub(r"\1:***@", url))


def _store(value: object, place: Spot) -> str:
    text = _text(value)
    if re.fullmatch(r"sqlite:.+|postgres(ql)?://.*", text):
        return text
    raise ConfigError('must be "sqlite:./file.db" or "postgresql://host/database"')


def _network(value: object) -> Network:
    if isinstance(value, Network):
        return value
    try:
        return ip_network(_text(value))
    except ValueError:
        pass
    try:
        meant = ip_network(_text(value), strict=False)
    except ValueError:
        raise ConfigError(f'{value!r} is not a network; write for example "10.0.0.0/8" or "192.0.2.7"') from None
    raise ConfigError(f'{value!r} is an address inside a network; write "{meant}" for the whole of it')


def _networks(value: object, place: Spot) -> tuple[Network, ...]:
    return tuple(map(_network, value if isinstance(value, list | tuple) else [value]))


def _proxies(value: object, place: Spot) -> tuple[Network, ...]:
    networks = _networks(value, place)
    if any(network.prefixlen == 0 for network in networks):
        raise ConfigError("would believe everybody who claims to be a proxy; name the networks of your proxies")
    return networks


def _url(value: object, place: Spot) -> str:
    text = _text(value)
    _check_url(_split_url(text) if text.isascii() else None)
    return text


def _check_url(parts: SplitResult | None) -> None:
    # The message does not repeat the address, which may contain a password.
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError('must be a web address; write for example "https://example.org/hook"')
    if "@" in parts.netloc:
        raise ConfigError("must not hold a user name or password; put them into headers, by reference")
    if parts.fragment:
        raise ConfigError("must not hold a fragment (#…): it would never be sent")


def _address(value: object, place: Spot) -> str | Secret:
    """Read the address of a destination: a URL, possibly international, a reference to one, or a place in events."""
    if not isinstance(value, str):
        return place.secret(value)
    text = _text(value)
    check_event_address(text)
    if is_event_address(text):
        return text
    _check_url(_split_url(text))
    read_url(text)
    return text


def _show_address(address: str | Secret) -> object:
    if isinstance(address, Secret):
        return show_secret(address)
    return address if is_event_address(address) else shown_url(address)


def _allow_hosts(value: object, place: Spot) -> tuple[str, ...]:
    hosts = _names(value, place)
    AllowedHosts(hosts)
    return hosts


def _split_url(text: str) -> SplitResult | None:
    if not text.isprintable() or " " in text:
        return None
    try:
        parts = urlsplit(text)
        return parts if parts.port != 0 else None
    except ValueError:
        return None


def _host(value: object, place: Spot) -> str:
    text = _text(value)
    if is_address(text) or (_HOSTNAME.fullmatch(text) and not text.isdigit()):
        return text
    raise ConfigError('must be an address or a name without brackets or port; write for example "127.0.0.1"')


def _bind(value: object, place: Spot) -> str:
    host, _, port = _text(value).rpartition(":")
    if not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError('must be an address and a port; write for example "127.0.0.1:4021" or "[::1]:4021"')
    bracketed = host.startswith("[") and host.endswith("]")
    _host(host[1:-1] if bracketed else host, place)
    return _text(value)


def split_bind(bind: str) -> tuple[str, int]:
    host, _, port = bind.rpartition(":")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Tell whether only this machine can reach that host. An unknown name counts as public."""
    return ip_address(host).is_loopback if is_address(host) else host.lower() == "localhost"


def _site(value: object, place: Spot) -> str:
    text = _url(value, place)
    parts = urlsplit(text)
    if parts.query:
        raise ConfigError("must not hold a query (?…)")
    if parts.scheme != "https" and not is_loopback(parts.hostname or ""):
        raise ConfigError("must begin with https://; http:// is for this machine only")
    return text


def _path(value: object, place: Spot) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z0-9_-]{1,128}", value):
        raise ConfigError("must be one part of an address: letters, digits, dashes and underscores")
    return value


def _certificates(value: object, place: Spot) -> Path:
    return place.file(str(value) if isinstance(value, Path) else _text(value))


def _show_networks(value: bool | Sequence[Network]) -> object:
    return value if isinstance(value, bool) else [str(network) for network in value]


def _objects(value: object, place: Spot) -> str:
    text = _text(value)
    scheme, separator, rest = text.partition("://")
    if not separator:
        return str(place.file(text))
    if scheme not in ("s3", "gs", "az") or not rest.strip("/") or "@" in rest or "?" in rest:
        raise ConfigError('must be a bucket and a prefix, or a folder; write for example "s3://bucket/oncehook"')
    return text.rstrip("/")


OBJECTS: Final = Form(_objects, {"type": "string", "examples": ["s3://bucket/oncehook", "./oncehook-bodies"]})
STORE: Final = Form(_store, {"type": "string", "examples": ["sqlite:./oncehook.db"]}, hide_password)
NETWORKS: Final = Form(_networks, TEXTS.schema, _show_networks)
PROXIES: Final = Form(_proxies, TEXTS.schema, _show_networks)
PRIVATE: Final = Form(
    lambda value, place: value if isinstance(value, bool) else _networks(value, place),
    {"anyOf": [{"type": "boolean"}, TEXTS.schema]},
    _show_networks,
)
URL: Final = Form(_url, {"type": "string", "format": "uri", "pattern": "^https?://"})
SITE: Final = Form(_site, URL.schema)
ADDRESS: Final = Form(
    _address,
    {"anyOf": [URL.schema, {"type": "string", "pattern": r"^\{.+\}$"}, _REFERENCE]},
    _show_address,
    is_secret=True,
)
ALLOW_HOSTS: Final = Form(_allow_hosts, {**NAMES.schema, "examples": [["hooks.example.org", "*.example.net"]]}, list)
CERTIFICATES: Final = Form(_certificates, {"type": "string", "minLength": 1}, str)
HOST: Final = Form(_host, {"type": "string"})
BIND: Final = Form(_bind, {"type": "string", "examples": ["127.0.0.1:4021"]})
PATH: Final = Form(_path, {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,128}$"}, lambda path: "(hidden)")


# -- people ------------------------------------------------------------------------------------


def _roles(value: object, place: Spot) -> dict[str, tuple[str, ...]]:
    if not isinstance(value, dict) or not value:
        raise ConfigError('must say who gets which role; write for example { admin = ["ops"], viewer = ["staff"] }')
    for role in value:
        if role not in model.ROLES:
            raise ConfigError(f'"{role}" is not a role; {suggest_clause(role, model.ROLES)}')
    return {role: _texts(values) for role, values in value.items()}


def _scopes(value: object, place: Spot) -> tuple[str, ...]:
    scopes = _texts(value)
    if "openid" not in scopes:
        raise ConfigError('must hold "openid"; without it the provider does not say who somebody is')
    if any(not re.fullmatch(r"[!#-\[\]-~]+", scope) for scope in scopes):
        raise ConfigError('must be a list of words; write for example ["openid", "email", "groups"]')
    return scopes


def _domains(value: object, place: Spot) -> tuple[str, ...]:
    domains = tuple(domain.lower() for domain in _texts(value))
    for domain in domains:
        if not _HOSTNAME.fullmatch(domain):
            raise ConfigError(f'{domain!r} is not a domain; write for example "example.org"')
    return domains


ROLES: Final = Form(
    _roles,
    {"type": "object", "properties": dict.fromkeys(model.ROLES, TEXTS.schema), "additionalProperties": False}
    | {"minProperties": 1},
    lambda roles: {role: list(values) for role, values in roles.items()},
)
_ORIGIN: Final = re.compile(r"https?://(?:\*\.)?(?:[A-Za-z0-9-]+\.)*[A-Za-z0-9-]+(?::[0-9]{1,5})?")


def check_origins(value: object) -> tuple[str, ...]:
    """Return sites as browsers name them. Raises ConfigError for what is none."""
    origins = tuple(origin.lower() for origin in _texts(value))
    for origin in origins:
        # They become part of a header, in which other characters would mean something else.
        if not _ORIGIN.fullmatch(origin):
            raise ConfigError(f'{origin!r} is not a site; write for example "https://app.example.org"')
    return origins


ORIGINS: Final = Form(lambda value, place: check_origins(value), TEXTS.schema, list)
SCOPES: Final = Form(_scopes, TEXTS.schema, list)
DOMAINS: Final = Form(_domains, TEXTS.schema, list)


# -- rules -------------------------------------------------------------------------------------


def _rule(value: object, place: Spot) -> Any:
    from oncehook.rules import compile_rule

    if callable(value) and not place.is_program:
        raise ConfigError("must be a place")
    compile_rule(str(place.path[-1]), value)  # type: ignore[arg-type]
    return value


def _rank(value: object, place: Spot) -> Any:
    if isinstance(value, Mapping):
        if set(value) != {"of", "order"}:
            raise ConfigError('must be a rule, or { of = rule, order = ["sent", "delivered", "read"] }')
        _texts(value["order"])
    return _rule(value, place)


def _paths(compile: Callable[[Sequence[str]], object]) -> Form:
    """Return the form of a list of JSONPaths."""

    def read(value: object, place: Spot) -> tuple[str, ...]:
        compile(paths := _texts(value))
        return paths

    return Form(read, TEXTS.schema, list)


def _split(value: object, place: Spot) -> Any:
    from oncehook.sources import split_at

    if place.is_program and callable(value):
        return value
    split_at(text := _text(value))
    return text


def _preset(value: object, place: Spot) -> Any:
    from oncehook import presets
    from oncehook.sources import Preset

    if place.is_program and isinstance(value, Preset):
        return value
    presets.load(name := _text(value))
    return name


def _verify(value: object, place: Spot) -> Any:
    from oncehook.verify import from_config

    if place.is_program and (callable(value) or hasattr(value, "verifier")):
        return value
    if not isinstance(value, str | Mapping | list | tuple):
        raise ConfigError('must be a scheme; write for example "standard-webhooks" or { scheme = "hmac", … }')
    from_config(value)
    return value


def _missing_key(value: object, place: Spot) -> str:
    policy, colon, window = value.partition(":") if isinstance(value, str) else ("", "", "")
    if policy == "body_hash" and colon:
        duration(window)
        return f"body_hash:{window}"
    return one_of(value, ("accept", "reject", "body_hash"), ' or "body_hash:10s"')


def _when(value: object, place: Spot) -> dict[str, str | list[str]]:
    from oncehook.routes import compile_when

    if not isinstance(value, Mapping):
        raise ConfigError('must be a table; write for example { type = "message.*" }')
    when = {place: _read_wanted(wanted) for place, wanted in value.items()}
    for name in when.keys() - {"type"}:
        if near := nearest(name, ("type",)):
            raise ConfigError(f'has no "{name}"; did you mean "{near}"?')
    compile_when(when)
    return when


def _read_wanted(value: object) -> str | list[str]:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    return list(_texts(value)) if isinstance(value, list | tuple) else _text(value)


def _coalesce(value: object, place: Spot) -> bool | str:
    if isinstance(value, bool) or value == "any":
        return value
    near = nearest(value, ("any",)) if isinstance(value, str) else ""
    raise ConfigError('must be true, false or "any"' + (f'; did you mean "{near}"?' if near else ""))


def _account_id(value: object, place: Spot) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ConfigError('must be the id of an account; write for example "42"')
    return model.check_account_id(value)


_OF_SUBSCRIPTION: Final = ("type", "from", "when")


def _subscribe(value: object, place: Spot) -> tuple[Subscription, ...]:
    listed = value if isinstance(value, list | tuple) else [value]
    return tuple(_subscription(one, place) for one in listed)


def _subscription(value: object, place: Spot) -> Subscription:
    if isinstance(value, Subscription):
        return value
    if isinstance(value, str) and value:
        return Subscription(value)
    if not isinstance(value, Mapping):
        raise ConfigError('must be types; write for example ["message_created", "conversation.*"]')
    for key in value:
        if key not in _OF_SUBSCRIPTION:
            raise ConfigError(f'has no "{key}"; a subscription has {", ".join(_OF_SUBSCRIPTION)}')
    source = value.get("from")
    if source is not None and (not isinstance(source, str) or not source):
        raise ConfigError('from must be the name of a source; write for example { type = "message.*", from = "app" }')
    return Subscription(_text(value.get("type", "*")), source, _when(value.get("when", {}), place))


def _show_subscription(one: Subscription) -> object:
    if one.source is None and not one.when:
        return one.type
    shown = {"type": one.type, "from": one.source, "when": dict(one.when)}
    return {key: value for key, value in shown.items() if value}


def _names_account(text: str) -> bool:
    return text == model.ADDRESS or model.is_account_id(text)


_RULE: Final = {"anyOf": [{"type": "string"}, {"type": "array"}], "examples": ["$.id", ["header:X-Request-Id", "$.id"]]}

KEY: Final = Form(lambda value, place: value if value == "none" else _rule(value, place), _RULE)
PRESET: Final = Form(_preset, {"type": "string", "examples": ["stripe", "whatsapp-cloud"]})
RULE: Final = Form(_rule, _RULE)
ACCOUNT: Final = Form(
    lambda value, place: value if isinstance(value, str) and _names_account(value) else _rule(value, place),
    {**_RULE, "examples": [model.ADDRESS, "$.shop_id", "42"]},
)
ACCOUNT_ID: Final = Form(_account_id, {"type": "string", "examples": ["42"]})
SUBSCRIBE: Final = Form(
    _subscribe,
    {
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"anyOf": [{"type": "string"}, {"type": "object"}]}}],
        "examples": [["message_created", "conversation.*"]],
    },
    lambda subscribed: [_show_subscription(one) for one in subscribed],
)
RANK: Final = Form(_rank, {"anyOf": [_RULE, {"type": "object", "required": ["of", "order"]}]})
VOLATILE: Final = _paths(BodyHash)
REDACT: Final = _paths(Redaction)
SPLIT: Final = Form(_split, {"type": "string", "pattern": "^\\$"})
_SCHEME: Final = [{"type": "string"}, {"type": "object", "required": ["scheme"]}]
VERIFY: Final = Form(_verify, {"anyOf": [*_SCHEME, {"type": "array", "items": {"anyOf": _SCHEME}, "minItems": 1}]})
MISSING_KEY: Final = Form(
    _missing_key, {"type": "string", "pattern": "^(accept|reject|body_hash(:.+)?)$", "default": "accept"}
)
WHEN: Final = Form(_when, {"type": "object"})
COALESCE: Final = Form(_coalesce, {"enum": [True, False, "any"]})
