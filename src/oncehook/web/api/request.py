"""Requests to the API: parameters, ids, cursor and body, read strictly.

An unknown parameter is refused with the nearest right one, never ignored: a misspelt filter that is ignored would mean
everything. Endpoints get an `ApiCall`; whatever cannot be read raises BadRequest.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta
from starlette.requests import ClientDisconnect, Request

from oncehook import human, payload
from oncehook.admin import Admin, place_behind
from oncehook.errors import BadRequest, ConfigError, NotFound
from oncehook.human import suggest
from oncehook.logs import plain
from oncehook.model import Filter, IdT, digest, flatten_text
from oncehook.query import WORDS, narrow, quote_value
from oncehook.web.auth import Access, Identity
from oncehook.web.live import Broadcast

MOST: Final = 200
USUAL: Final = 50
LARGEST_BODY: Final = 64 * 1024
LONGEST_KEY: Final = 255
_PLACES: Final = {"event": 16, "delivery": 16, "replay": 16, "audit": 8, "rejection": 8, "item": 8}
"""Bytes of a cursor in each list: an id, or a number. Others have a name of any length."""
LONGEST_NAME: Final = 100


class BodyTooLarge(BadRequest):
    """The body is larger than 64 KB."""

    code = "too_large"
    status = 413


class Body(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """What a request may say."""


class ReplayOne(Body, frozen=True):
    """How to replay one delivery."""

    force: bool = False
    fresh_id: bool = False
    reason: str = ""


class Choose(Body, frozen=True):
    """Which deliveries to replay, and how: by query, by ids of deliveries and events, or both."""

    query: str = ""
    ids: list[str] | None = None
    destination: str | None = None
    until: str | None = None
    force: bool = False
    fresh_id: bool = False
    rate: float | str | None = None


class StartReplay(Choose, frozen=True):
    """A plan as it was made, or the same words as for a plan; and why."""

    plan: str | None = None
    reason: str = ""


class Reason(Body, frozen=True):
    """Why."""

    reason: str = ""


class AddMark(Body, frozen=True):
    """What happens now, in a few words: "v1.2"."""

    text: str


class DiscardMatching(Body, frozen=True):
    """Which dead letters to close, as a plan has shown them or by a query; and why."""

    reason: str
    query: str = ""
    plan: str | None = None


MOST_KEYS: Final = 1000
LONGEST_PART: Final = 4096

Part = Annotated[str, Meta(min_length=1, max_length=LONGEST_PART)]
Parts = Annotated[list[Part], Meta(min_length=1, max_length=16)]


class Remember(Body, frozen=True):
    """Keys, each as the list of its parts: one, unless the source's key is a composite."""

    keys: Annotated[list[Parts], Meta(min_length=1, max_length=MOST_KEYS)]
    account: Annotated[str, Meta(min_length=1)] | None = None


class Erase(Body, frozen=True):
    """Whose events to erase, and why: of a subject, of an account, or of a subject within one. `reason` may be left out
    of a dry run only."""

    subject: Annotated[str, Meta(min_length=1)] | None = None
    source: str | None = None
    account: Annotated[str, Meta(min_length=1)] | None = None
    reason: str = ""
    dry_run: bool = False


class MakeAccount(Body, frozen=True):
    """An account: its id, what people and providers call it, and what its senders sign with, by source; "generate"
    makes a secret. With `move`, aliases of other accounts become this one's."""

    id: str | int
    name: str = ""
    aliases: list[str | int] = []
    secrets: dict[str, str] = {}
    move: bool = False


class MakePortalLink(Body, frozen=True):
    """For whom a link to the portal is, by a name for the audit log, and for how long it is valid."""

    name: str = ""
    expires: str | float = "10m"


class ChangeAccount(Body, frozen=True):
    """What changes about an account: `aliases` are all of them, of `secrets` those that are named; null takes one
    away."""

    name: str | None = None
    aliases: list[str | int] | None = None
    secrets: dict[str, str | None] = {}
    enabled: bool | None = None
    move: bool = False


class RotateSecret(Body, frozen=True):
    """Whose secret to replace, and for how long the old one stays valid."""

    source: str
    overlap: str = "1h"


class Rotate(Body, frozen=True):
    """How long the old secret is still valid; a new one is generated unless it is given."""

    overlap: str = "1h"
    secret: Annotated[str, Meta(min_length=8)] | None = None


class DefineSource(Body, frozen=True, forbid_unknown_fields=False):
    """A source: its name and the settings of `[source.NAME]`; `"secret": "generate"` has one made."""

    name: str
    account: str | None = None


class DefineDestination(Body, frozen=True, forbid_unknown_fields=False):
    """A destination: its name and the settings of `[destination.NAME]`; `"sign": "generate"` has a key made."""

    name: str
    account: str | None = None


class DefineRoute(Body, frozen=True, forbid_unknown_fields=False):
    """A route: the settings of `[[route]]`."""

    to: str
    from_: str = msgspec.field(name="from")
    account: str | None = None


class ChangeDefinition(Body, frozen=True, forbid_unknown_fields=False):
    """Settings to change; null takes one out. `enabled` and `account` can be changed, too."""

    enabled: bool = True


class Sample(Body, frozen=True):
    """Which sample; the preset's first one unless said."""

    type: str = ""


B = TypeVar("B", bound=Body)


@dataclass(slots=True)
class ApiCall:
    """One request, by somebody who may make it."""

    request: Request
    identity: Identity
    admin: Admin
    """The admin, limited to what this caller sees."""
    stream: Broadcast
    access: Access

    def __post_init__(self) -> None:
        check_parameters(self.request)

    @property
    def actor(self) -> str:
        return self.identity.name

    @property
    def name(self) -> str:
        """Return the name in the path."""
        return str(self.request.path_params["name"])

    def id(self, kind: type[IdT], place: str = "id") -> IdT:
        """Return the id in the path. An id of another kind is not found."""
        try:
            return kind.parse(self.request.path_params[place])
        except ValueError:
            noun = kind.__name__.removesuffix("Id").lower()
            written = flatten_text(self.request.path_params[place], 64)
            raise NotFound(f"No {noun} {written}.", hint=f"An id is {kind.prefix} and 32 digits (0-9, a-f).") from None

    def parameter(self, name: str, default: str = "") -> str:
        """Return a parameter of the query string; refuse one that is repeated."""
        values = self.request.query_params.getlist(name)
        if len(values) > 1:
            raise BadRequest(f"`{name}` is given twice.")
        return values[0] if values else default

    def filter(self) -> Filter:
        """Return the filter of `query=` and of the query words that are given as parameters."""
        words = [f"{word}:{quote_value(value)}" for word in WORDS if (value := self.parameter(word))]
        return narrow(self.admin.read(self.parameter("query")), self.admin.read(" ".join(words)))

    def limit(self) -> int:
        text = self.parameter("limit", str(USUAL))
        if not (text.isascii() and text.isdigit() and len(text) < 5 and 1 <= int(text) <= MOST):
            raise BadRequest(f"`limit` is a number from 1 to {MOST}.")
        return int(text)

    def cursor(self, kind: str) -> bytes | None:
        text = self.parameter("cursor")
        if not text:
            return None
        try:
            raw = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            raise _bad_cursor() from None
        head, _, place = raw.partition(b":")
        # A cursor of another size is invalid: PostgreSQL would refuse it, and that would look like a failing store.
        fits = len(place) == _PLACES[kind] if kind in _PLACES else len(place) <= LONGEST_NAME and place.isascii()
        if head != kind.encode() or not fits or (_PLACES.get(kind) == 8 and place[0] > 0x7F):
            raise _bad_cursor()
        return place

    def after(self, kind: str) -> str | None:
        """Return the name after which a list goes on; None for its beginning."""
        place = self.cursor(kind)
        return None if place is None else place.decode("ascii")

    def flag(self, name: str) -> bool:
        """Return a parameter that is true or false; false where it is not given."""
        text = self.parameter(name, "false")
        if text not in ("true", "false", "1", "0"):
            raise BadRequest(f"`{name}` is true or false.")
        return text in ("true", "1")

    def request_key(self) -> str | None:
        """Return the identity of an act: who asks, where, and their Idempotency-Key (R47)."""
        given = self.request.headers.getlist("idempotency-key")
        if not given:
            return None
        if len(given) > 1 or not 1 <= len(given[0]) <= LONGEST_KEY:
            raise BadRequest(f"Idempotency-Key is one header of 1 to {LONGEST_KEY} characters.")
        path = self.request.url.path.rpartition("/api/v1/")[2]  # the same wherever we are mounted
        return digest(self.actor.encode(), path.encode(), given[0].encode("latin-1")).hex()

    async def object(self) -> dict[str, Any]:
        """Return the JSON object in the body; a missing body as an empty one."""
        raw = await self._raw()
        try:
            value = payload.parse(raw) if raw.strip() else {}
        except payload.Unreadable as error:
            raise BadRequest(f"The body is {error}.") from None
        if not isinstance(value, dict):
            raise BadRequest("The body must be a JSON object.")
        check_characters(value.items())
        return value

    async def body(self, kind: type[B]) -> B:
        """Return the JSON body as one of the shapes above; a missing body as an empty one."""
        value = await self.object()
        for name in value:
            check_word(name, kind.__struct_fields__, "field of this request")
        try:
            return msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            raise BadRequest(f"The body does not fit: {error}.") from None

    async def _raw(self) -> bytes:
        parts, size = [], 0
        try:
            async for part in self.request.stream():
                size += len(part)
                if size > LARGEST_BODY:
                    raise BodyTooLarge
                parts.append(part)
        except ClientDisconnect:
            raise BadRequest("The request broke off.") from None
        return b"".join(parts)


def cursor(kind: str, place: bytes | None) -> str | None:
    return None if place is None else base64.urlsafe_b64encode(kind.encode() + b":" + place).decode().rstrip("=")


def next_definition(kind: str, found: Sequence[Any], after: str | None, limit: int) -> str | None:
    """Return the cursor of a list of definitions, of which one more was asked for than is shown."""
    if len(found) <= limit:
        return None
    last = found[limit - 1]
    stored = (last.id if kind == "route" else last.name) if last.origin == "store" else None
    return cursor(kind, place_behind(stored, after, limit).encode())


def _bad_cursor() -> BadRequest:
    return BadRequest("This is no cursor of this list.", hint="Hand `next` on as it is, with the same query.")


def check_word(word: str, words: Sequence[str], what: str) -> None:
    """Refuse an unknown word, naming the nearest one."""
    if word not in words:
        raise BadRequest(f"`{word[:60]}` is no {what}.", hint=suggest(word[:60], words) or "There are none here.")


def check_parameters(request: Request) -> None:
    """Refuse parameters of path and query that a database cannot store."""
    check_characters(request.path_params.items())
    check_characters(request.query_params.multi_items())


def check_characters(pairs: Iterable[tuple[str, object]]) -> None:
    """Refuse NUL in names and values at any depth: no database stores it in a text."""
    for name, value in pairs:
        if _has_nul(name) or _has_nul(value):
            raise BadRequest(f"`{plain(name[:60])}` has a NUL character in it.", hint="Leave it out.")


def _has_nul(value: object) -> bool:
    # Recursion is safe: JSON is nested at most 64 deep.
    if isinstance(value, str):
        return "\0" in value
    if isinstance(value, dict):
        return any(_has_nul(name) or _has_nul(inner) for name, inner in value.items())
    return isinstance(value, list) and any(map(_has_nul, value))


def rate(value: float | str | None) -> float | None:
    """Return deliveries per second: a number, or text such as "20/s"."""
    if value is None:
        return None
    try:
        per_second = human.rate(value) if isinstance(value, str) else human.rate(f"{value:.18f}/s")
    except ConfigError as error:
        raise BadRequest(str(error)) from None
    return per_second
