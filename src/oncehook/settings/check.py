"""Checks of the whole configuration: names that must exist, and addresses that must not be open to everyone.

`check` takes the tables that were read and notes problems in the same reader; `load` calls it. A setting that is wrong
by itself is reported once. `loose_ends` is separate, because an app may define what a file only names.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Final, TypeAlias
from urllib.parse import urlsplit

import msgspec

from oncehook.destinations import registry
from oncehook.destinations.event_address import is_event_address
from oncehook.errors import ConfigError
from oncehook.http_client.urls import read_url, with_path
from oncehook.human import nearest, suggest_clause
from oncehook.model import ADDRESS
from oncehook.payload import descents
from oncehook.secret import SHORTEST_SECRET, SHORTEST_TOKEN, Secret, reveal_text, weakness
from oncehook.settings.origin import SettingPath
from oncehook.settings.read import Settings, SettingsReader, fields_of
from oncehook.settings.tables import Config, DestinationSettings, ServerConfig
from oncehook.settings.values import NAME, NAME_FORM, hide_password, is_loopback, split_bind

SHORTEST_PATH: Final = 22
"""Characters that hold 128 random bits in base64 (S8)."""

Finding: TypeAlias = tuple[SettingPath, str]


def check(config: Config, reader: SettingsReader) -> None:
    """Note everything that is wrong across settings."""
    for name, source in config.source.items():
        _check_verified(name, source, reader)
    _check_addresses(config, reader)
    for name, destination in config.destination.items():
        check_destination(name, destination, reader)
    _check_routes(config, reader)
    for path, sentence in _circles(config):
        reader.note(path, sentence)
    _check_tokens(config.server, reader)
    _check_oidc(config.server, reader)
    for path, sentence in _exposures(config, lambda key: reader.has_failed(("server", key))):
        reader.note(path, sentence)


def check_bind(config: Config, host: str) -> None:
    """Refuse a host that is not safe to listen on, where it is not the configured one (S28)."""
    server = msgspec.structs.replace(config.server, host=host)
    findings = list(_exposures(msgspec.structs.replace(config, server=server), lambda key: False))
    if findings:
        raise ConfigError("\n".join(sentence for _, sentence in findings))


def warnings(config: Config, reader: SettingsReader) -> Iterator[Finding]:
    """Yield warnings about settings that are allowed but risky."""
    for name, source in config.source.items():
        at, where = ("source", name), f"in [source.{name}]"
        if source.path is not None and len(source.path) < SHORTEST_PATH:
            yield (*at, "path"), f"path {where} can be guessed; take {SHORTEST_PATH} random characters or more"
        if is_unverified(source) and source.secret:
            yield (*at, "secret"), f'secret {where} is not used: verify is "none"'
        yield from _deep_paths(name, source)
        for secret in () if is_unverified(source) else source.secret:
            if secret.is_set() and (why := weakness(secret.reveal(), SHORTEST_SECRET)):
                threat = "whoever guesses it can send what passes for genuine"
                yield (*at, "secret"), f"secret {where} {why}: {threat}; make one with `openssl rand -hex 32`"
    for path, name, why in _weak_tokens(config.server):
        yield path, f"{name} in [server] {why}; take a random one: oncehook token NAME"
    yield from _relays(config)
    for name, goal in _own_destinations(config).items():
        yield ("destination", name, "url"), f"url in [destination.{name}] leads back to [source.{goal}] of this inbox"
    if reader.origin.file and reader.origin.line(("store",)) and hide_password(config.store) != config.store:
        sentence = "store holds a password, so this file is not safe to commit"
        yield ("store",), f"{sentence}; set ONCEHOOK_STORE in the environment instead"


def _deep_paths(name: str, source: Settings) -> Iterator[Finding]:
    """Yield paths with two descents: their cost is the square of the body's size, and they are abandoned in a large
    one."""
    for setting in (
        "key",
        "subject",
        "type",
        "event_time",
        "rank",
        "rank_scope",
        "account",
        "preview",
        "redact",
        "volatile",
    ):
        for text in _texts(getattr(source, setting)):
            if text.startswith(("$", "?$")) and descents(text) > 1:
                yield (
                    ("source", name, setting),
                    f'{setting} in [source.{name}]: "{text}" descends twice (..), which is given up in large bodies; '
                    "name the way to what it looks for",
                )


def _texts(spec: object) -> Iterator[str]:
    """Yield the places of a rule, at any depth."""
    if isinstance(spec, str):
        yield spec
    elif isinstance(spec, dict):
        yield from _texts(spec.get("of"))
    elif isinstance(spec, list | tuple):
        for one in spec:
            yield from _texts(one)


def _relays(config: Config) -> Iterator[Finding]:
    """Yield routes through which anyone can send WhatsApp messages in our name."""
    for route in config.route:
        source, destination = config.source.get(route.from_), config.destination.get(route.to)
        if source is None or destination is None or not hasattr(destination, "whatsapp"):
            continue
        is_hidden = source.path is not None and len(source.path) >= SHORTEST_PATH
        if is_unverified(source) and not is_for_loopback(source) and not is_hidden:
            sentence = f'anyone can send WhatsApp messages as "{route.to}": [source.{route.from_}] is not verified'
            yield ("source", route.from_, "verify"), sentence


# -- sources -----------------------------------------------------------------------------------

CONFIRMED: Final = 'verify = { scheme = "none", confirm = "anyone may send" }'
"""How settings say that a source takes what anyone sends, from anywhere."""


def is_unverified(source: Settings) -> bool:
    """Tell whether the settings turn verification off explicitly."""
    if isinstance(source.verify, Mapping):
        return source.verify.get("scheme") == "none"
    if source.verify is None or isinstance(source.verify, str | Sequence):
        return source.verify == "none"
    from oncehook.verify import Nothing

    return isinstance(source.verify, Nothing)


def is_for_loopback(source: Settings) -> bool:
    """Tell whether a source takes direct requests of this machine only: it is unverified, and nobody has confirmed
    that."""
    return is_unverified(source) and not (isinstance(source.verify, Mapping) and source.verify.get("confirm"))


def find_gaps(name: str, source: Settings) -> Iterator[tuple[str, str]]:
    """Yield each missing setting without which a forged arrival would pass (S4), with a sentence."""
    is_by_account = source.account == ADDRESS  # each account may have a secret of its own
    if source.preset is None:
        if source.verify is None:
            yield (
                "verify",
                f"[source.{name}] does not say how its arrivals are verified; give it a preset or a verify scheme "
                '(verify = "none" must be said by name)',
            )
        elif (
            isinstance(source.verify, str | Mapping | Sequence)
            and not is_unverified(source)
            and not source.secret
            and not is_by_account
        ):
            yield "secret", f'[source.{name}] needs a secret to verify with; write secret = {{ env = "NAME" }}'
        return
    from oncehook import presets

    preset = presets.load(source.preset)
    for need in preset.needs:
        if need == "secret" and is_by_account:
            continue
        # A verifier of one's own needs none of the preset's secrets.
        if not getattr(source, need) and (source.verify is None or need == "key"):
            yield need, f'[source.{name}] needs {need}: the preset "{preset.name}" asks for it'


def find_media_gap(name: str, source: Settings) -> str | None:
    """Return a sentence about a source that shall keep media of a provider whose files we cannot fetch."""
    if source.media is None:
        return None
    from oncehook import presets

    if source.preset is not None and presets.load(source.preset).media_api is not None:
        return None
    return f"[source.{name}] has media, and its preset knows no files; leave it out (WhatsApp presets and twilio do)"


def _check_verified(name: str, source: Settings, reader: SettingsReader) -> None:
    failed = {key for key in ("preset", "verify") if reader.has_failed(("source", name, key))}
    for setting, sentence in () if failed else find_gaps(name, source):
        if not reader.has_failed(("source", name, setting)):
            reader.note(("source", name), sentence)
    if not failed and (gap := find_media_gap(name, source)) is not None:
        reader.note(("source", name, "media"), gap)


def _check_addresses(config: Config, reader: SettingsReader) -> None:
    taken: dict[str, str] = {}
    for name, source in config.source.items():
        address = source.path or name
        if address in taken:
            # the path is not repeated, because it is meant to be unguessable
            reader.note(("source", name, "path"), f"[source.{name}] has the same address as [source.{taken[address]}]")
        taken.setdefault(address, name)


# -- destinations ------------------------------------------------------------------------------

_OF_A_URL: Final = ("path", "allow_hosts", "preset", "sign", "headers", "forward_headers")


def check_destination(name: str, destination: Settings, reader: SettingsReader) -> None:
    """Note what is wrong across the settings of one destination."""
    path = ("destination", name)
    if destination.kind is not None and not hasattr(destination, destination.kind):
        _add_kind(destination, reader, path)
    kinds = find_kinds(destination)
    if destination.url is None and not kinds:
        if not any(reader.has_failed((*path, key)) for key in ("url", "kind", *registry.names())):
            reader.note(
                path, f'[destination.{name}] needs a url; write url = "https://…", or [destination.{name}.whatsapp]'
            )
    elif len(kinds) + (destination.url is not None) > 1:
        first = "url" if destination.url is not None else kinds[0]
        reader.note((*path, kinds[-1]), f"[destination.{name}] has both {first} and {kinds[-1]}; keep one of them")
    for kind in kinds:
        for key in _OF_A_URL:
            if destination.url is None and getattr(destination, key):
                reader.note((*path, key), f"{key} in [destination.{name}] is for a url, not for {kind}")
        if (found := registry.find(kind)) is not None and found.check is not None:
            found.check(name, getattr(destination, kind), reader)
    if destination.url is not None:
        _check_event_address(destination, reader, path)
    for status in sorted({*destination.transient} & {*destination.permanent}):
        reader.note((*path, "permanent"), f"permanent in [destination.{name}]: {status} is listed in transient, too")


def _check_event_address(destination: Settings, reader: SettingsReader, path: tuple[str, str]) -> None:
    inside = f"in [destination.{path[1]}]"
    if not is_event_address(destination.url):
        if destination.allow_hosts:
            reader.note(
                (*path, "allow_hosts"),
                f'allow_hosts {inside} is for an address from the event (url = "{{$.callback_url}}"); leave it out',
            )
        return
    if not destination.allow_hosts and not reader.has_failed((*path, "allow_hosts")):
        reader.note(
            (*path, "allow_hosts"),
            f"url {inside} is an address from the event, and whoever sends an event could have anything called; "
            'say which hosts it may name: allow_hosts = ["hooks.example.org"]',
        )
    if destination.path is not None:
        reader.note((*path, "path"), f"path {inside} cannot follow an address from the event; leave it out")


def _add_kind(destination: Settings, reader: SettingsReader, path: tuple[str, str]) -> None:
    table = registry.find_table(destination.kind)
    if table is None:
        hint = suggest_clause(destination.kind, registry.names())
        reader.note((*path, "kind"), f'there is no kind of destination "{destination.kind}"; {hint}')
    elif (read := reader.read(table, {}, (*path, destination.kind))) is not None:
        setattr(destination, destination.kind, read)


def find_kinds(destination: Settings) -> list[str]:
    """Return the kinds of destination whose tables were given."""
    return [key for key in vars(destination) if key not in fields_of(DestinationSettings)]


def has_secret_address(destination: Settings) -> bool:
    """Tell whether its URL, or a part of it, is secret."""
    return destination.path is not None or isinstance(destination.url, Secret)


def read_address(destination: Settings) -> str | None:
    """Return the URL to be called, with references resolved, or the place in events that names it.

    Raises ConfigError, which does not repeat it.
    """
    if destination.url is None or is_event_address(destination.url):
        address: str | None = destination.url
        return address
    url = read_url(reveal_text(destination.url))
    return url if destination.path is None else read_url(with_path(url, reveal_text(destination.path)))


def check_surroundings(name: str, destination: Settings, reader: SettingsReader) -> None:
    """Note what depends on this machine: a secret URL that cannot be called, missing certificates."""
    path = ("destination", name)
    references = [one for one in (destination.url, destination.path) if isinstance(one, Secret)]
    if references and all(one.is_set() for one in references):  # one that is not set is reported elsewhere
        _note(reader, path, "url", partial(read_address, destination))
    if destination.ca is not None:
        from oncehook.http_client.client import read_certificates

        _note(reader, path, "ca", partial(read_certificates, destination.ca))


def _note(reader: SettingsReader, path: tuple[str, str], key: str, look: Callable[[], object]) -> None:
    try:
        look()
    except ConfigError as error:
        reader.note((*path, key), f"{key} in [destination.{path[1]}]: {error} {error.hint}".rstrip())


# -- destinations that are this inbox ----------------------------------------------------------

_INGEST: Final = re.compile(r".*/in/([A-Za-z0-9_-]+)/?")
_EVERYWHERE: Final = frozenset({"0.0.0.0", "::"})  # noqa: S104 - compared, not bound
_LOOPBACK: Final = frozenset({"127.0.0.1", "::1", "localhost"})


def _own_destinations(config: Config) -> dict[str, str]:
    """Return the destinations whose URL is a source of this inbox, each with that source."""
    server = config.server
    is_near = server.host in _EVERYWHERE or is_loopback(server.host)
    own = {("http", host, server.port) for host in (_LOOPBACK if is_near else {server.host})}
    public = {_place(source.public_url): name for name, source in config.source.items() if source.public_url}
    own |= {origin for origin, _ in public}
    by_address = {source.path or name: name for name, source in config.source.items()}
    found = {}
    for name, destination in config.destination.items():
        if url := _known_url(destination):
            origin, path = _place(url)
            match = _INGEST.fullmatch(path) if origin in own else None
            found[name] = public.get((origin, path)) or (by_address.get(match[1]) if match else None)
    return {name: source for name, source in found.items() if source is not None}


def _known_url(destination: Settings) -> str | None:
    try:
        return read_address(destination)
    except ConfigError:  # reported elsewhere
        return None


def _place(url: str) -> tuple[tuple[str, str, int], str]:
    """Return the identity of a URL: scheme, host, port and path."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return (parts.scheme, parts.hostname or "", port), parts.path


def _circles(config: Config) -> Iterator[Finding]:
    """Yield the destinations whose every event would come back: no route on the way has a condition."""
    own = _own_destinations(config)
    for name, first in own.items():
        reached, before = {first}, 0
        while before != len(reached):
            before = len(reached)
            goals = {route.to for route in config.route if route.from_ in reached and not route.when}
            reached |= {own[goal] for goal in goals & own.keys()}
        if name in goals:
            yield (
                ("destination", name, "url"),
                f"[destination.{name}] leads back to [source.{first}], whose events are routed to it again: each would "
                "go round until it is refused; remove that route, or narrow it by when",
            )


# -- routes and watermarks ---------------------------------------------------------------------

MISSPELT: Final = 0.8
"""Similarity from which an unknown name counts as a misspelt source, not as one that a program emits under."""


def _check_routes(config: Config, reader: SettingsReader) -> None:
    for path, route in _routes(config, reader):
        if not NAME.fullmatch(route.from_):
            reader.note((*path, "from"), f'"{route.from_}" is not a name for a source; use {NAME_FORM}')
        if source := config.source.get(route.from_):
            _check_needs(reader, path, route, source)


def _routes(config: Config, reader: SettingsReader) -> Iterator[tuple[tuple[str, int], Settings]]:
    # a route that failed is not in the configuration, so positions come from the file
    written = reader.origin.tree.get("route")
    count = len(written) if isinstance(written, list) else 0
    positions = [number for number in range(count) if not reader.has_failed(("route", number))]
    return ((("route", number), route) for number, route in zip(positions, config.route, strict=True))


@dataclass(frozen=True, slots=True)
class AppNames:
    """Names that an app defines beside the file."""

    sources: Collection[str] = ()
    destinations: Collection[str] = ()
    emitted: Collection[str] = ()
    """Names under which its routes expect events."""


def loose_ends(config: Config, reader: SettingsReader, app: AppNames) -> Iterator[Finding]:
    """Yield names in the file that neither the file nor the app defines."""
    sources = [*_names(reader, "source"), *app.sources]
    destinations = [*_names(reader, "destination"), *app.destinations]
    for path, route in _routes(config, reader):
        # A program may emit under any name, so an unknown one is reported only where it looks misspelt.
        misspelt = route.from_ not in sources and not reader.has_failed((*path, "from"))
        if misspelt and (near := nearest(route.from_, sources, MISSPELT)):
            yield (*path, "from"), f'there is no source "{route.from_}"; did you mean "{near}"?'
        if route.to not in destinations:
            yield (*path, "to"), f'there is no destination "{route.to}"; {suggest_clause(route.to, destinations)}'
    known = list(dict.fromkeys([*sources, *app.emitted, *(route.from_ for route in config.route)]))
    for name in config.watermark.daily_volume:
        if name not in known:
            yield ("watermark", "daily_volume", name), f'there is no source "{name}"; {suggest_clause(name, known)}'
    for place, token in enumerate(config.server.tokens):
        for name in token.sources or ():
            if name not in known:
                yield (
                    ("server", "tokens", place, "sources"),
                    f'there is no source "{name}"; {suggest_clause(name, known)}',
                )


def _check_needs(reader: SettingsReader, path: tuple[str, int], route: Settings, source: Settings) -> None:
    if source.preset is not None:
        return
    at = ("source", route.from_)
    if route.latest_wins and source.rank is None and not reader.has_failed((*at, "rank")):
        reader.note((*path, "latest_wins"), f"latest_wins in [[route]]: [source.{route.from_}] has no rank to compare")
    if route.coalesce and source.subject is None and not reader.has_failed((*at, "subject")):
        reader.note((*path, "coalesce"), f"coalesce in [[route]]: [source.{route.from_}] has no subject to gather by")


def _names(reader: SettingsReader, kind: str) -> list[str]:
    tables = reader.origin.tree.get(kind)
    return list(tables) if isinstance(tables, dict) else []


# -- who can reach the server-------------------------------------------------------------------


def _public_host(server: ServerConfig) -> str:
    """Return the host under which others can reach the server, or nothing."""
    hosts = [server.host]
    if server.admin_bind:
        hosts.append(split_bind(server.admin_bind)[0])
    return next((host for host in hosts if not is_loopback(host)), "")


_OTHERS: Final = ("admin", "local", "cli", "oncehook", "sender", "host")


def _check_tokens(server: ServerConfig, reader: SettingsReader) -> None:
    for name, count in Counter(token.name for token in server.tokens).items():
        if count > 1:
            reader.note(("server", "tokens"), f'tokens in [server]: "{name}" is the name of {count} tokens')
    for token in server.tokens:
        if token.sources is not None and token.name in _OTHERS:
            # Such a token sees the audit entries under its name, which must not be oncehook's own.
            reader.note(("server", "tokens"), f'tokens in [server]: "{token.name}" is a name of oncehook\'s own')


def _check_oidc(server: ServerConfig, reader: SettingsReader) -> None:
    if server.oidc is not None and find_spec("joserfc") is None:
        reader.note(
            ("server", "oidc"), "[server.oidc] needs a package that is not installed; run pip install 'oncehook[oidc]'"
        )


def _weak_tokens(server: ServerConfig) -> Iterator[tuple[SettingPath, str, str]]:
    """Yield every guessable token: its path, its name, and why."""
    tokens: list[tuple[SettingPath, str, Secret]] = []
    if server.admin_token is not None:
        tokens.append((("server", "admin_token"), "admin_token", server.admin_token))
    for number, one in enumerate(server.tokens):
        tokens.append((("server", "tokens", number), f'the token of "{one.name}"', one.token))
    for path, name, token in tokens:
        # A missing one is reported elsewhere.
        if token.is_set() and (why := weakness(token.reveal().strip(), SHORTEST_TOKEN)):
            yield path, name, why


def _exposures(config: Config, has_failed: Callable[[str], bool]) -> Iterator[Finding]:
    """Yield what is missing for listening on a public address: a credential, TLS, verification (S28)."""
    server = config.server
    public = _public_host(server)
    if not public:
        return
    path = ("server", "host") if public == server.host else ("server", "admin_bind")
    start = f'"{public}" is a public address'
    credentials = ("admin_token", "tokens", "oidc")
    if not any(getattr(server, key) or has_failed(key) for key in credentials):
        yield path, f'{start}; add admin_token = {{ env = "ONCEHOOK_TOKEN" }} to [server]'
    if not (server.trusted_proxies or server.public_without_tls or has_failed("trusted_proxies")):
        yield (
            path,
            f"{start} without TLS; add to [server] trusted_proxies with the networks of the proxy that ends TLS, "
            "or public_without_tls = true",
        )
    for place, name, why in _weak_tokens(server):
        yield place, f"{name} in [server] {why}, and {start}; take a random one: oncehook token NAME"
    for name, source in config.source.items():
        if is_for_loopback(source):
            yield (
                ("source", name, "verify"),
                f'verify in [source.{name}]: "none" lets anyone send, and {start}; verify the sender, or confirm by '
                + CONFIRMED,
            )
