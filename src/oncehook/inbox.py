"""The inbox: sources, store, routes and destinations wired together. The one place that names engines.

Programs make one with `Inbox(store)` or `Inbox.from_toml()`, start it, and mount `asgi()`; the command line and the
web faces do the same and ask it for everything they show.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from ipaddress import ip_network
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from oncehook import clock, presets, routes, units, verify
from oncehook.config import Config, SourceConfig, load
from oncehook.errors import ConfigError, StoreUnavailable
from oncehook.keys import bounded
from oncehook.model import Arrival, Check, Headers, Intake, Item, Kind, Mark, Planned, digest, key_hash, new_id, show_id
from oncehook.observe import Observer
from oncehook.receive import Receipt, Receiver
from oncehook.secret import Secret
from oncehook.sources import Source, Splitter, build, split_at
from oncehook.store.base import Store
from oncehook.verify import Genuine, Nothing, Scheme

if TYPE_CHECKING:
    from oncehook.web.ingest import Mount

log = logging.getLogger("oncehook.inbox")

READY_FOR = 1.0
"""Seconds for which one proof that the store can write serves every probe."""


class Inbox:
    """The whole: what comes in, what is kept, where it goes."""

    def __init__(self, store: str = "sqlite:./oncehook.db", *, migrate: bool = True) -> None:
        self.store: Store = open_store(store)
        self.observer = Observer(self.store.engine.value)
        self.store.watch = self.observer.operation
        self.sources: dict[str, Source] = {}
        self.routes: list[routes.Route] = []
        self.destinations: dict[str, object] = {}
        self.draining = False
        self.local_token = clock.random_bytes(32).hex()
        """For commands of the same user on this machine; made anew at every start, kept in the lock file only."""
        self._migrate = migrate
        self._routes_by_source: dict[str, list[routes.Route]] = {}
        self._receiver: Receiver | None = None
        self._house: asyncio.Task[None] | None = None
        self._ready_until = 0.0
        self._emitters: dict[str, int] = {}

    # -- setting up ----------------------------------------------------------------------------

    @classmethod
    def from_toml(cls, path: str | Path | None = None) -> Inbox:
        """The inbox that a configuration file describes: the given one, ./oncehook.toml, or [tool.oncehook]."""
        return cls.from_config(load(None if path is None else Path(path)).config)

    @classmethod
    def from_config(cls, config: Config) -> Inbox:
        """The inbox that checked settings describe."""
        inbox = cls(config.store, migrate=config.migrate)
        for name, settings in config.source.items():
            inbox.add(_source_from(name, settings))
        for name, destination in config.destination.items():
            inbox.destinations[name] = destination
        for route in config.route:
            inbox.routes.append(
                routes.Route(
                    source=route.from_,
                    destination=route.to,
                    when=route.when or {},
                    coalesce=route.coalesce,
                    latest_wins=route.latest_wins,
                    on_dead=route.on_dead,
                )
            )
        return inbox

    def source(
        self,
        name: str,
        *,
        preset: str | None = None,
        verify: str | Mapping[str, object] | Scheme | Genuine | None = None,
        secret: str | bytes | Sequence[str | bytes] | None = None,
        secret_env: str | None = None,
        verify_token: str | None = None,
        verify_token_env: str | None = None,
        split: str | Splitter | None = None,
        **settings: Any,
    ) -> Source:
        """Add a source. Settings are those of `[source.NAME]`; durations and sizes may be words.

        Functions may stand for settings: `verify` is then given the arrival and a secret and says True for a genuine
        one, `split` is given the parsed body and the arrival and makes its parts, and `key`, `subject`, `type` and
        `event_time` are given a `Sight`.

        >>> inbox.source("stripe", preset="stripe", secret_env="STRIPE_SECRET", subject="$.data.object.customer")
        """
        token = _from_env(verify_token_env, name) if verify_token_env else (verify_token or "").encode()
        scheme = _scheme(verify)
        confirmed = isinstance(verify, Mapping) and "confirm" in verify
        # Unverified and unconfirmed: for direct requests of this machine (DESIGN.md 8.11).
        settings.setdefault("loopback_only", isinstance(scheme, Nothing) and not confirmed)
        return self.add(
            build(
                name,
                preset=presets.load(preset) if preset else None,
                scheme=scheme,
                secrets=[_from_env(secret_env, name)] if secret_env else _as_secrets(secret),
                verify_token=token or None,
                split=split_at(split) if isinstance(split, str) else split,
                **_in_units(settings),
            )
        )

    def add(self, source: Source) -> Source:
        """Add a source that is already built. Raises ConfigError when its name or path is taken."""
        if self._receiver is not None:
            raise ConfigError(f'Source "{source.name}" comes too late: this inbox has been started.')
        for other in self.sources.values():
            if source.name == other.name or source.path == other.path:
                raise ConfigError(f'Two sources are called "{source.name}" or share the path "{source.path}".')
        self.sources[source.name] = source
        return source

    # -- starting and stopping -----------------------------------------------------------------

    async def start(self) -> None:
        """Open the store, give every name its number, and be ready to receive."""
        await self.store.open(migrate=self._migrate)
        try:
            numbers = await self.store.enroll(self.sources, {*self.destinations, *(r.destination for r in self.routes)})
        except BaseException:
            await self.store.close()
            raise
        for source in self.sources.values():
            source.number = numbers.sources[source.name]
        for route in self.routes:
            route.destination_id = numbers.destinations[route.destination]
            self._routes_by_source.setdefault(route.source, []).append(route)
        self._receiver = Receiver(self.sources, self.store, self._plan, self.observer)
        self._house = asyncio.create_task(self._keep_house())

    async def stop(self) -> None:
        """Commit what was taken in and let go of the store."""
        self.draining = True
        if self._house is not None:
            self._house.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._house
            self._house = None
            await self._write_rejections()
        await self.store.close()
        self._receiver = None

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Inbox]:
        """`async with inbox.running():` starts it, and stops it whatever happens."""
        await self.start()
        try:
            yield self
        finally:
            await self.stop()

    @contextlib.asynccontextmanager
    async def lifespan(self, app: object) -> AsyncIterator[None]:
        """For the host application: `FastAPI(lifespan=inbox.lifespan)`."""
        async with self.running():
            yield

    def announce(self, address: str) -> None:
        """Let commands on this machine find the process that writes a SQLite store (DESIGN.md 8.7)."""
        hold = getattr(self.store, "hold", None)
        if hold is not None:
            hold.announce(address, self.local_token)

    # -- taking in -----------------------------------------------------------------------------

    @property
    def receiver(self) -> Receiver:
        """The front door; there is one only while the inbox runs."""
        if self._receiver is None:
            raise ConfigError("This inbox is not started.", hint="Use `async with inbox.running():` or its lifespan.")
        return self._receiver

    def asgi(self) -> Mount:
        """An ASGI application to mount in another: `app.mount("/hooks", inbox.asgi())` gives POST /hooks/{source}."""
        from oncehook.web.ingest import Mount

        return Mount(self)

    async def receive(
        self, source: str, headers: Headers | Mapping[str, str], body: bytes, *, query: bytes = b"", peer: str = ""
    ) -> Receipt:
        """Take in one arrival from a route of one's own. The receipt holds the answer to give."""
        return await self.receiver.receive(Arrival(source, _as_headers(headers), body, query, "POST", "", peer))

    async def emit(
        self,
        source: str,
        type: str,
        payload: object,
        *,
        key: str | None = None,
        subject: str | None = None,
    ) -> str:
        """Keep an event of one's own and fan it out like any other; returns its id, or the first one's with that key.

        `source` names where it comes from ("app") and need not be configured as a source of arrivals.
        """
        body = payload if isinstance(payload, bytes) else msgspec.json.encode(payload)
        if source not in self._emitters:
            numbers = await self.store.enroll([source], [])
            self._emitters[source] = numbers.sources[source]
        item = Item(
            new_id(),
            bounded(type, 200),
            None if key is None else bounded(key),
            None if key is None else key_hash(source, (key,)),
            units.seconds("30d"),
            None if subject is None else bounded(subject),
            body,
            digest(body),
            marks=Mark.emitted if key is not None else Mark.emitted | Mark.unkeyed,
        )
        item.deliveries = self._deliveries(Arrival(source, (), body), item)
        head = f"EMIT {source}\r\ncontent-type: application/json".encode()
        (verdict,) = await self.store.record(Intake(item.event_id, self._emitters[source], head, [item])).future
        return show_id(Kind.event, verdict.event_id)

    def _plan(self, source: Source, arrival: Arrival, item: Item) -> Sequence[Planned]:
        return self._deliveries(arrival, item)

    def _deliveries(self, arrival: Arrival, item: Item) -> Sequence[Planned]:
        found = self._routes_by_source.get(arrival.source)
        return routes.plan(found, arrival, item) if found else ()

    # -- looking after itself ------------------------------------------------------------------

    async def _keep_house(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            try:
                await self._write_rejections()
            except Exception:  # what it could not write down is lost; the next second must come all the same
                log.exception("rejections.failed")

    async def _write_rejections(self) -> None:
        """Write down what was turned away: outside every commit, so a flood of forgeries costs no fsync each."""
        rejections, counts = self.observer.take_rejections()
        if not rejections:
            return
        with contextlib.suppress(StoreUnavailable):
            await self.store.record_rejections(rejections, counts)

    async def troubles(self) -> dict[str, str]:
        """What keeps this inbox from receiving, by name; empty when it is ready."""
        if self.draining:
            return {"inbox": "stopping"}
        now = asyncio.get_running_loop().time()
        if now < self._ready_until:
            return {}
        try:
            await asyncio.wait_for(self.store.ping(), 2.0)
        except (StoreUnavailable, TimeoutError) as error:
            return {"store": str(error) or "does not answer"}
        self._ready_until = now + READY_FOR
        return {}

    async def metrics(self) -> bytes:
        """The numbers for Prometheus."""
        size: int | None = None
        with contextlib.suppress(StoreUnavailable, OSError):
            size = await self.store.size()
        return self.observer.exposition(size)

    async def check(self) -> list[Check]:
        """The store's conservation laws, for `doctor`."""
        return await self.store.check()


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


def _source_from(name: str, settings: SourceConfig) -> Source:
    translated = {"preset", "verify", "secret", "verify_token", "split", "keep_events", "revive_dead"}
    plain = {field: getattr(settings, field) for field in settings.__struct_fields__ if field not in translated}
    return build(
        name,
        preset=presets.load(settings.preset) if settings.preset else None,
        scheme=_scheme(settings.verify),
        secrets=[secret.reveal() for secret in settings.secret],
        verify_token=settings.verify_token.reveal() if settings.verify_token else None,
        split=split_at(settings.split) if settings.split else None,
        loopback_only=settings.is_loopback_only,
        **plain,
    )


def _scheme(spec: str | Mapping[str, object] | Scheme | Genuine | None) -> Scheme | None:
    if spec is None or isinstance(spec, str | Mapping):
        return None if spec is None else verify.from_config(spec)
    return cast("Scheme", spec) if hasattr(spec, "verifier") else verify.Custom(spec)


def _in_units(settings: dict[str, Any]) -> dict[str, Any]:
    """Words to numbers, where a setting is a duration or a size."""
    for field in ("budget", "keep_keys", "tolerance"):
        if isinstance(settings.get(field), str):
            off = field == "tolerance" and settings[field] == "off"
            settings[field] = float("inf") if off else units.seconds(settings[field])
    if isinstance(settings.get("max_body"), str):
        settings["max_body"] = units.size(settings["max_body"])
    if "ip_allow" in settings:
        settings["ip_allow"] = [ip_network(text) for text in settings["ip_allow"]]
    return settings


def _from_env(variable: str, source: str) -> bytes:
    return Secret.from_env(variable, f"source.{source}.secret", os.environ).reveal()


def _as_secrets(secret: str | bytes | Sequence[str | bytes] | None) -> list[bytes]:
    if secret is None:
        return []
    many: Iterable[str | bytes] = [secret] if isinstance(secret, str | bytes) else secret
    return [one.encode() if isinstance(one, str) else one for one in many]


def _as_headers(headers: Headers | Mapping[str, str]) -> Headers:
    if not isinstance(headers, Mapping):
        return [(name.lower(), value) for name, value in headers]
    return [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
