"""Media: files that messages refer to, fetched from their provider before they expire there, and kept once per content.

A preset's `MediaApi` finds the files in an event and knows how to fetch them; a `MediaKeeper` fetches the files of one
source through the guarded client and keeps them where large bodies are. Two callers end there, in any order: the
delivery that `media = "keep"` makes (`MediaDestination`), and `await event.media()` in a handler.
"""

from __future__ import annotations

import asyncio
import fnmatch
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar, Final
from urllib.parse import urlsplit

import msgspec

from oncehook import clock
from oncehook.bodies import GRACE, Bodies
from oncehook.categories import FailureRules
from oncehook.destinations.base import WELL, Result, Terms
from oncehook.destinations.handler import failure
from oncehook.errors import BodyMissing, ConfigError, OncehookError
from oncehook.http_client.addresses import Network
from oncehook.http_client.urls import read_url
from oncehook.human import show_size
from oncehook.model import Arrival, Category, Item, Lease, StoredEvent, StoredMedia, digest
from oncehook.retry import Policy, retry_after
from oncehook.routes import Route
from oncehook.secret import Secret
from oncehook.store.base import Store

if TYPE_CHECKING:
    from oncehook.http_client.client import HttpClient

MOST: Final = 100 << 20
"""Bytes of the largest file that is kept, unless the settings say otherwise: WhatsApp's own limit."""
TYPES: Final = ("image/*", "audio/*", "video/*", "application/*", "text/*")
TIMEOUT: Final = 120.0
"""Seconds for one event's files."""
_ABOUT_MOST: Final = 64 << 10
"""Bytes of an answer about a file."""
ERASED_AFTER: Final = 60.0
"""Seconds after which an erasure removes a file: it is written and referred to within a few."""
RETRIES: Final = Policy(attempts=12, base=5.0, cap=3600.0)
"""The first within seconds, because some providers have a file only after its message; the last after some hours."""


class MediaFailed(OncehookError):
    """A file could not be fetched from its provider."""

    code = "media_failed"

    def __init__(self, message: str, category: Category, after: float | None = None) -> None:
        super().__init__(message)
        self.category = category
        self.retry_after = after


class MediaItem(msgspec.Struct, frozen=True):
    """A file that an event refers to, as the event describes it."""

    id: str
    """Its name at the provider: an id, or a path."""
    type: str
    filename: str | None = None
    content: bytes | None = None
    """The file itself, where the event contains it."""


class MediaAccess(msgspec.Struct, frozen=True):
    """Credentials and address for fetching the files of a source."""

    token: str | None = None
    url: str | None = None
    """Where the provider's API is, where that is not always the same."""


class MediaCalls:
    """Calls of one fetch, all through the guarded client."""

    def __init__(self, client: HttpClient, most: int) -> None:
        self._client = client
        self.most = most
        self._ends_at = clock.steady() + TIMEOUT

    async def ask(self, method: str, url: str, headers: Mapping[str, str], body: bytes | None = None) -> Any:
        """Return an answer as JSON."""
        answer = await self._call(method, url, headers, body, _ABOUT_MOST if body is None else 2 * self.most)
        try:
            return msgspec.json.decode(answer)
        except msgspec.DecodeError:
            raise MediaFailed("the provider's answer is no JSON", Category.transient) from None

    async def fetch(self, url: str, headers: Mapping[str, str]) -> bytes:
        """Return the bytes of a file. One redirect is followed, without our credentials."""
        return await self._call("GET", url, headers, None, self.most, redirects=1)

    async def _call(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes | None, most: int, redirects: int = 0
    ) -> bytes:
        try:
            url = read_url(url)
        except ConfigError:
            raise MediaFailed("the provider names an address that cannot be called", Category.permanent) from None
        within = max(0.1, self._ends_at - clock.steady())
        answer = await self._client.request(method, url, headers, body, within=within, most=most)
        if answer.status in (301, 302, 303, 307, 308) and redirects and answer.location is not None:
            if urlsplit(answer.location).scheme != "https" and urlsplit(url).scheme == "https":
                raise MediaFailed("the provider redirects to an address without TLS", Category.permanent)
            return await self._call("GET", answer.location, {}, None, most, redirects - 1)
        if (category := FailureRules().of_status(answer.status)) is not None:
            after = retry_after(answer.retry_after, clock.now_utc())
            raise MediaFailed(f"the provider answered {answer.status}", category, after)
        if not answer.is_complete:
            if len(answer.body) >= most:
                raise MediaFailed(f"it is larger than {show_size(self.most)}", Category.permanent)
            raise MediaFailed("it did not come completely", Category.transient)
        return answer.body


class MediaApi(ABC):
    """A provider's files: how to find them in an event, and how to fetch one."""

    api: ClassVar[str] = ""
    """Senders of this API have the same credentials."""
    types: ClassVar[Sequence[str]] = ("*",)
    """Patterns of the types of events that may refer to files."""
    needs: ClassVar[Sequence[str]] = ("token",)
    """Fields of `MediaAccess` without which nothing can be fetched."""

    signs_with_token: ClassVar[bool] = False
    """Whether what the provider signs with is also what its API is called with."""

    @abstractmethod
    def find(self, body: bytes) -> list[MediaItem]:
        """Return the files of an event. May raise anything for a body of another shape, which has none."""

    @abstractmethod
    async def fetch(self, item: MediaItem, access: MediaAccess, calls: MediaCalls) -> bytes:
        """Return the bytes of a file. Raises MediaFailed or Unanswered."""


def find_files(api: MediaApi, body: bytes) -> list[MediaItem]:
    """Return the files that a body refers to; none for a body of another shape."""
    try:
        return api.find(body)
    except Exception:
        return []


class KeptMedia:
    """A file of an event, as a handler gets it."""

    __slots__ = ("_keeper", "filename", "sha256", "size", "type")

    def __init__(self, keeper: MediaKeeper, kept: StoredMedia) -> None:
        self._keeper = keeper
        self.type = kept.type
        """Media type: `image/jpeg`."""
        self.filename = kept.filename
        """Name that the sender gave it; not to be trusted as a path."""
        self.size = kept.size
        self.sha256 = kept.digest.hex()
        """Hash of its content: the same file has the same in every event."""

    async def read(self) -> bytes:
        """Return its content. Raises BodyMissing where it is gone, or ObjectsUnavailable."""
        return await self._keeper.read(bytes.fromhex(self.sha256))

    def __repr__(self) -> str:
        return f"<KeptMedia {self.type} {self.size} bytes>"


class MediaKeeper:
    """The files of one source's events."""

    def __init__(
        self,
        api: MediaApi,
        bodies: Callable[[], Bodies],
        store: Callable[[], Store],
        access: Callable[[str | None], Awaitable[MediaAccess]],
        *,
        account: str | None = None,
        most: int = MOST,
        types: Sequence[str] = TYPES,
        allow_private: bool | Sequence[Network] = False,
    ) -> None:
        """`access` is asked before each fetch, because a token may be rotated, with the account of the event.
        `account`: that of all events of the source, where it is fixed."""
        self.api = api
        self._bodies = bodies
        self._store = store
        self._access = access
        self._account = account
        self._most = most
        self._types = tuple(types)
        self._allow_private = allow_private
        self._client: HttpClient | None = None

    def find(self, body: bytes) -> list[MediaItem]:
        """Return the files that a body refers to; none for a body of another shape."""
        return find_files(self.api, body)

    async def keep(self, event: StoredEvent) -> list[KeptMedia]:
        """Return the files of an event; those that are not kept yet are fetched and kept.

        Raises MediaFailed, Unanswered, ObjectsUnavailable or ConfigError.
        """
        kept = {one.n: one for one in await self._store().media_of(event.id)}
        for n, item in enumerate(self.find(event.body)):
            if n not in kept:
                kept[n] = await self._keep(event, n, item)
        return [KeptMedia(self, one) for _, one in sorted(kept.items())]

    async def _keep(self, event: StoredEvent, n: int, item: MediaItem) -> StoredMedia:
        if self._account is not None and event.account != self._account:
            # A source of this name was made anew for somebody else, whose token and address these are.
            raise MediaFailed("its source belongs to another account now", Category.permanent)
        kind = item.type.partition(";")[0].strip().lower()
        if not any(fnmatch.fnmatchcase(kind, pattern) for pattern in self._types):
            raise MediaFailed(f"files of the type {kind[:100]!r} are not kept", Category.permanent)
        content = item.content
        if content is None:
            content = await self._fetch(item, event.account)
        if len(content) > self._most:
            raise MediaFailed(f"it is larger than {show_size(self._most)}", Category.permanent)
        found = await asyncio.to_thread(hashlib.sha256, content)
        media = StoredMedia(n, found.digest(), len(content), kind, item.filename and item.filename[:255])
        objects = self._objects()
        sealed = await asyncio.to_thread(self._store().cipher.encrypt, content, "media", _row(media.digest))
        # Written although it may be there: then it is young, and the sweep leaves it alone until the row refers to it.
        await objects.put(await self._name(media.digest), sealed)
        if not await self._store().keep_media(event.id, media):
            raise MediaFailed("its event is gone", Category.permanent)
        return media

    async def _fetch(self, item: MediaItem, account: str | None = None) -> bytes:
        access = await self._access(account)
        for field in self.api.needs:
            if getattr(access, field) is None:
                raise MediaFailed(f"media.{field} of its source is not set", Category.permanent)
        if self._client is None:
            from oncehook.http_client.client import HttpClient

            self._client = HttpClient(allow_private=self._allow_private)
            await self._client.open()
        return await self.api.fetch(item, access, MediaCalls(self._client, self._most))

    async def read(self, sha256: bytes) -> bytes:
        """Return the content of a file; raises like `read_media`."""
        return await read_media(self._store(), self._bodies(), sha256)

    def _objects(self) -> Any:
        objects = self._bodies().objects
        if objects is None:
            raise ConfigError("Media need a place to be kept at.", hint='Set bodies = "s3://…" or a folder.')
        return objects

    async def _name(self, sha256: bytes) -> str:
        return f"{await prefix_of(self._store())}{sha256.hex()}"

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
            self._client = None


async def prefix_of(store: Store) -> str:
    """Return the prefix of a store's media."""
    return f"media/{await store.inbox_number()}/"


async def read_media(store: Store, bodies: Bodies, sha256: bytes) -> bytes:
    """Return the content of a kept file. Raises BodyMissing, Undecryptable or ObjectsUnavailable."""
    if bodies.objects is None:
        raise BodyMissing(hint="It was kept elsewhere: set `bodies` to that place again.")
    kept = await bodies.objects.get(f"{await prefix_of(store)}{sha256.hex()}")

    def check() -> bytes:
        content = None if kept is None else store.cipher.decrypt(kept, "media", _row(sha256))
        if content is None or hashlib.sha256(content).digest() != sha256:
            raise BodyMissing("The file is not where it was kept.")
        return content

    return await asyncio.to_thread(check)


def _row(sha256: bytes) -> bytes:
    """Return what a file's encryption is bound to."""
    return digest(sha256)


async def sweep_media(store: Store, bodies: Bodies, grace: float = GRACE) -> int:
    """Remove files that no event refers to, and that are so many seconds old; return how many.

    A younger one may just have been written, while the row that refers to it is not there yet.
    """
    removed = 0
    if bodies.objects is None:
        return removed
    now = clock.now_utc()
    async for page in bodies.objects.list(await prefix_of(store)):
        names: dict[bytes, str] = {}
        for one in page:
            if (now - one.modified).total_seconds() >= grace:
                with suppress(ValueError):
                    names[bytes.fromhex(one.name.rpartition("/")[2])] = one.name
        known = await store.find_media(list(names)) if names else set()
        gone = [name for sha256, name in names.items() if sha256 not in known]
        await bodies.objects.delete(gone)
        removed += len(gone)
    return removed


class MediaRoute(Route):
    """A route of the events that refer to files. Their deliveries wait for no other."""

    is_ordered = False

    def __init__(self, source: str, destination: str, api: MediaApi, *, destination_id: int = 0) -> None:
        super().__init__(source, destination, destination_id=destination_id, when={"type": list(api.types)})
        self._api = api

    def matches(self, arrival: Arrival, item: Item) -> bool:
        return super().matches(arrival, item) and bool(find_files(self._api, item.body))


class MediaDestination:
    """The delivery that fetches and keeps an event's files."""

    kind = "media"
    crash_tolerance = 3

    def __init__(
        self,
        name: str,
        source: str,
        keep: Callable[[StoredEvent], Awaitable[object]],
        close: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`keep` fetches and keeps the files of an event."""
        self.name = name
        self.id = 0
        self.terms = Terms(retry=RETRIES, timeout=TIMEOUT + 5, concurrency=4)
        self.address = f"media of {source}"
        self._keep = keep
        self._close = close

    async def open(self) -> None:
        """Do nothing: the first fetch opens the client."""

    async def close(self) -> None:
        if self._close is not None:
            await self._close()

    async def attempt(self, lease: Lease) -> Result:
        try:
            await self._keep(lease.event)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            return failure(error, self.terms.rules)
        return WELL


def read_token(secret: Secret | str | None) -> str | None:
    """Return a token as text. Raises ConfigError where it is missing or empty."""
    if secret is None or isinstance(secret, str):
        return secret
    return secret.reveal().decode("ascii", "replace").strip()
