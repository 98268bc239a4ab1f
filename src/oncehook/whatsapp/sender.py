"""The base of every WhatsApp API's sender: send one message, return its id or raise why it was not sent.

`meta`, `evolution_api` and `evolution_go` encode messages for their API and decode its errors; this module makes the
calls through the guarded client and turns every failure into one `SendFailed`. Programs use it directly (`async with
MetaCloud(…) as whatsapp`), and the sender destination adds retries and dead letters.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol, Self, TypedDict, TypeVar, Unpack, cast

import msgspec

from oncehook import clock
from oncehook.errors import ConfigError, OncehookError
from oncehook.http_client import HttpAnswer, Unanswered
from oncehook.http_client.addresses import Guard, Network
from oncehook.http_client.proxy import proxy_from, read_proxy
from oncehook.http_client.urls import read_url
from oncehook.model import ANSWER_KEPT, Category
from oncehook.retry import Policy, policy, retry_after
from oncehook.secret import Secret
from oncehook.whatsapp.files import META_TYPES, FileTypes, OutgoingFile, StoredFile, clean_name, find_link_fault
from oncehook.whatsapp.messages import (
    Contact,
    InvalidMessage,
    Link,
    Location,
    Media,
    MediaKind,
    Message,
    Poll,
    Reaction,
    Read,
    Template,
    Text,
    check,
    type_of,
)
from oncehook.whatsapp.numbers import is_group_id, is_user_id, normalise
from oncehook.whatsapp.outcomes import (
    NOBODY_ANSWERED,
    Fault,
    Reason,
    SendFailed,
    Sent,
    build_silence,
    build_unsupported,
)

if TYPE_CHECKING:
    from oncehook.http_client.client import HttpClient

log = logging.getLogger("oncehook.whatsapp")

Credential = str | Secret
Retry = Policy | str | Sequence[str | float] | Mapping[str, object]
_M = TypeVar("_M", bound=Message)


class SendOptions(TypedDict, total=False):
    """Options of `Sender.send` besides the message."""

    id: str | None
    retry: Retry | None
    retry_unsure: bool


class ChatOptions(TypedDict, total=False):
    """Fields that any message in a chat may have; see `oncehook.whatsapp.Text`."""

    reply_to: str | None
    delay: int
    mentions: list[str]
    mention_all: bool


class _HowToSend(ChatOptions, SendOptions, total=False):
    """Options of the message and of sending it."""


FROM_ENVIRONMENT: Final = "env"
"""Value of `proxy` that reads it from the environment, see `oncehook.http_client.proxy`."""
TIMEOUT: Final = 30.0

_ANSWER_READ: Final = 1 << 18
"""Bytes read of an answer to a message: it repeats the message, with a thumbnail."""
_DOCUMENT_READ: Final = 1 << 21
"""Bytes read of an answer about an instance: a QR code is an image as text."""
_IDLE: Final = 2.0
"""Seconds for which an idle connection is kept: less than any server keeps it, because a message sent on a connection
that the server is closing may or may not have been received."""
_SHORTEST_SECRET: Final = 6
_MASKED: Final = b"[masked]"
_TEXT_KEPT: Final = 300
_CODE_KEPT: Final = 64


@dataclass(slots=True, frozen=True)
class Call:
    method: str
    path: str
    body: Mapping[str, Any] | None = field(default=None, repr=False)
    key: Credential | None = field(default=None, repr=False)
    """A credential instead of the sender's own (an administrator's)."""


class Files(Protocol):
    """A storage from which WhatsApp fetches files."""

    async def prepare(
        self,
        content: str | Path | bytes,
        /,
        *,
        filename: str | None = None,
        kind: MediaKind | None = None,
        types: FileTypes = META_TYPES,
    ) -> OutgoingFile:
        """Read a file and determine its type, among those an API takes; see `oncehook.whatsapp.files.prepare`."""

    async def store(self, file: OutgoingFile, /) -> StoredFile:
        """Upload a file."""

    async def link(self, key: str, /) -> str:
        """Return a URL from which it can be fetched for a while.

        Raises an OncehookError; one that is worth retrying has `transient` set.
        """


class Sender(ABC):
    """An account of a WhatsApp API, with the same methods for every API."""

    api: ClassVar[str]
    """Its name in settings."""
    actions: ClassVar[Mapping[str, str]] = {}
    """Methods by the actions of `instance`."""
    takes_meta_ids: ClassVar[bool] = False
    """Whether it can send to Meta's ids of people and groups."""
    file_types: ClassVar[FileTypes] = META_TYPES
    """Media types that the API takes, by kind."""
    address: str
    """The API's URL and account, without credentials."""
    message_id_path: ClassVar[Sequence[str | int]]
    """Keys that lead to the id of a sent message in the answer."""

    def __init__(
        self,
        base_url: str,
        key: Credential,
        *,
        name: str | None = None,
        timeout: float = TIMEOUT,
        proxy: Credential | None = None,
        files: Files | None = None,
        country: str | None = None,
        allow_private: bool | Sequence[Network] = False,
        ca: Path | None = None,
    ) -> None:
        self.base_url = _base(base_url)
        self.timeout = timeout
        self.country = country
        self.files = files
        self._key = key
        self._name = name
        self._proxy = proxy
        self._allow_private, self._ca = allow_private, ca
        self._guard = Guard(allow_private)
        self._client: HttpClient | None = None
        _reveal(key, self.api)
        # A wrong proxy is refused here, not at the first message.
        if isinstance(proxy, str) and (through := self._proxy_word()) is not None:
            read_proxy(through)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.address}>"

    # -- life ----------------------------------------------------------------------------------

    async def open(self) -> None:
        """Open the client on the running loop. The HTTP library is only loaded here."""
        from oncehook.http_client.client import HttpClient

        if self._client is None:
            self._client = HttpClient(
                allow_private=self._allow_private, ca=self._ca, proxy=self._proxy_word(), idle=_IDLE
            )
        await self._client.open()

    async def close(self) -> None:
        """Close the connections."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _proxy_word(self) -> str | None:
        if self._proxy == FROM_ENVIRONMENT:
            return proxy_from(os.environ, self._name)
        return None if self._proxy is None else _reveal(self._proxy, f"{self.api} proxy")

    # -- sending -------------------------------------------------------------------------------

    async def send(
        self, message: Message, *, id: str | None = None, retry: Retry | None = None, retry_unsure: bool = False
    ) -> Sent:
        """Send one message. Raises SendFailed.

        `id` is a stable id of this message, passed on if the API takes one, so that a retry carries the same.
        `retry` retries by that policy, in memory only: an inbox survives a restart. A message that may have been sent
        is not sent again unless `retry_unsure` is set. The end is logged in one line; the outcome counts `attempts`.
        """
        waits = None if retry is None else policy(retry)
        attempts = 1
        while True:
            try:
                sent = replace(await self.attempt(message, id=id), attempts=attempts)
            except SendFailed as error:
                wait = None if waits is None else _wait(waits, attempts, error, retry_unsure)
                if wait is None:
                    error.attempts = attempts
                    self._log_failed(message, error)
                    raise
                await asyncio.sleep(wait)
                attempts += 1
            else:
                self._log_sent(message, sent)
                return sent

    def _log_sent(self, message: Message, sent: Sent) -> None:
        fields = {"api": self.api, "type": type_of(message), "attempts": sent.attempts, "final_status": "done"}
        log.info("message.sent", extra={"fields": fields | {"status": sent.status, "message_id": sent.message_id}})

    def _log_failed(self, message: Message, error: SendFailed) -> None:
        fields = {"api": self.api, "type": type_of(message), "attempts": error.attempts, "final_status": "dead"}
        why = {"category": error.category.value, "reason": error.reason.value, "code": error.api_code}
        answer = {"status": error.status, "error": str(error), "unsure": error.unsure or None}
        log.warning("message.failed", extra={"fields": fields | why | answer})

    async def attempt(self, message: Message, *, id: str | None = None) -> Sent:
        """Try once to send a message without logging, which a destination does itself. Raises SendFailed."""
        call = self._call_for(await self._prepare(message), id)
        answer, data = await self._request(call, _ANSWER_READ)
        return Sent(self._message_id(data), answer.status, self._mask(answer.body)[:ANSWER_KEPT])

    def _message_id(self, data: Any) -> str | None:
        try:
            for name in self.message_id_path:
                data = data[name]
        except (TypeError, LookupError):
            return None
        return str(data) or None

    async def _prepare(self, message: Message) -> Message:
        """Return the message as `_check` does, with a fresh link to a stored file."""
        message = self._check(message)
        if isinstance(message, Link):
            self._check_links(url=message.url, image=message.image)
        return await self._prepare_media(message) if isinstance(message, Media) else message

    def _check(self, message: _M) -> _M:
        """Return the message with normalised numbers. Raises SendFailed for what could never be sent."""
        try:
            check(message)
        except InvalidMessage as error:
            raise SendFailed(str(error), Reason.invalid) from None
        try:
            message = self._normalise_numbers(message)
        except InvalidMessage as error:
            raise SendFailed(str(error), Reason.invalid_number) from None
        if message.to is not None and not self.takes_meta_ids and (is_user_id(message.to) or is_group_id(message.to)):
            raise build_unsupported(self.api, "to ids of Meta's; only to numbers and WhatsApp's own ids")
        if getattr(message, "delay", 0) >= self.timeout * 1000:
            raise SendFailed(f"The delay is longer than the {self.timeout:g} s of the timeout.", Reason.invalid)
        return message

    def _normalise_numbers(self, message: _M) -> _M:
        written = without_none(**{field: getattr(message, field, None) for field in ("to", "participant", "phone")})
        numbers: dict[str, str | list[str]] = {
            field: normalise(text, country=self.country) for field, text in written.items()
        }
        if mentions := getattr(message, "mentions", None):
            numbers["mentions"] = [normalise(text, country=self.country) for text in mentions]
        return msgspec.structs.replace(message, **numbers)

    def _check_links(self, **links: str | None) -> None:
        """Refuse links that the API must not fetch. Raises SendFailed."""
        for name, link in links.items():
            if link is not None and (wrong := find_link_fault(link, self._guard)):
                raise SendFailed(f"The {name} {wrong}.", Reason.invalid)

    async def _prepare_media(self, media: Media) -> Media:
        if media.filename is not None:
            media = msgspec.structs.replace(media, filename=clean_name(media.filename, media.mime or ""))
        self._check_links(link=media.link)
        if media.stored is not None:
            media = msgspec.structs.replace(media, stored=None, link=await self._link(media.stored))
        return media

    async def _link(self, key: str) -> str:
        files = self._require_files()
        try:
            return await files.link(key)
        except OncehookError as error:
            reason = Reason.unavailable if getattr(error, "transient", False) else Reason.invalid
            raise SendFailed(f"No link to the file: {error}", reason, hint=error.hint) from error

    async def send_text(self, to: str, text: str, *, preview_url: bool = False, **how: Unpack[_HowToSend]) -> Sent:
        """Send a text. `how`, here and below: `ChatOptions` (`reply_to`, `delay`, …) and `SendOptions`."""
        return await self._send_as(Text, how, to=to, text=text, preview_url=preview_url)

    async def send_link(
        self,
        to: str,
        url: str,
        *,
        text: str = "",
        title: str | None = None,
        description: str | None = None,
        image: str | None = None,
        **how: Unpack[_HowToSend],
    ) -> Sent:
        """Send a URL, shown as a card."""
        card = {"title": title, "description": description, "image": image}
        return await self._send_as(Link, how, to=to, url=url, text=text, **card)

    async def send_location(
        self,
        to: str,
        latitude: float,
        longitude: float,
        *,
        name: str | None = None,
        address: str | None = None,
        **how: Unpack[_HowToSend],
    ) -> Sent:
        """Send a place on the map."""
        place = {"latitude": latitude, "longitude": longitude, "name": name, "address": address}
        return await self._send_as(Location, how, to=to, **place)

    async def send_contact(
        self, to: str, name: str, phone: str, *, organization: str | None = None, **how: Unpack[_HowToSend]
    ) -> Sent:
        """Send a contact's name and number."""
        return await self._send_as(Contact, how, to=to, name=name, phone=phone, organization=organization)

    async def send_poll(
        self, to: str, question: str, options: Sequence[str], *, max_answers: int = 1, **how: Unpack[_HowToSend]
    ) -> Sent:
        """Send a question with answers to choose from."""
        return await self._send_as(Poll, how, to=to, question=question, options=list(options), max_answers=max_answers)

    async def send_media(
        self,
        to: str,
        kind: MediaKind,
        *,
        link: str | None = None,
        media_id: str | None = None,
        caption: str | None = None,
        filename: str | None = None,
        mime: str | None = None,
        **how: Unpack[_HowToSend],
    ) -> Sent:
        """Send an image, a video, a sound, a document or a sticker, from a URL or by the id Meta gave it."""
        names = {"caption": caption, "filename": filename, "mime": mime}
        return await self._send_as(Media, how, to=to, kind=kind, link=link, id=media_id, **names)

    async def send_template(
        self,
        to: str,
        name: str,
        *,
        language: str = "en_US",
        components: Sequence[dict[str, Any]] = (),
        **how: Unpack[SendOptions],
    ) -> Sent:
        """Send an approved template."""
        return await self.send(Template(to=to, name=name, language=language, components=list(components)), **how)

    async def react(
        self,
        to: str,
        message_id: str,
        emoji: str,
        *,
        from_me: bool = False,
        participant: str | None = None,
        **how: Unpack[SendOptions],
    ) -> Sent:
        """React with an emoji, or with an empty one remove it. In a group, `participant` wrote the message."""
        reaction = Reaction(to=to, message_id=message_id, emoji=emoji, from_me=from_me, participant=participant)
        return await self.send(reaction, **how)

    async def mark_read(self, message_id: str, to: str | None = None, **how: Unpack[SendOptions]) -> Sent:
        """Mark a received message as read; Evolution also needs who wrote it."""
        return await self.send(Read(message_id=message_id, to=to), **how)

    async def send_file(
        self,
        to: str,
        content: str | Path | bytes,
        *,
        caption: str | None = None,
        filename: str | None = None,
        kind: MediaKind | None = None,
        **how: Unpack[_HowToSend],
    ) -> Sent:
        """Upload a file of this machine, given as path or bytes, and send it as its own type."""
        chat, options = _split_options(how)
        file = await self.prepare_file(to, content, caption=caption, filename=filename, kind=kind, **chat)
        return await self.send(file, **options)

    async def prepare_file(
        self,
        to: str,
        content: str | Path | bytes,
        *,
        caption: str | None = None,
        filename: str | None = None,
        kind: MediaKind | None = None,
        **chat: Unpack[ChatOptions],
    ) -> Media:
        """Upload a file and return the message that sends it, for `Inbox.send_message`, which keeps and retries it.

        A file, caption or number that could not be sent is refused before anything is uploaded. The path is not
        checked: never build one from untrusted text.
        """
        files = self._require_files()
        file = await files.prepare(content, filename=filename, kind=kind, types=self.file_types)
        self._check(Media(to=to, kind=file.kind, stored=file.filename, caption=caption, **chat))
        stored = await files.store(file)
        names = {"caption": caption, "filename": stored.filename, "mime": stored.mime}
        return Media(to=to, kind=stored.kind, stored=stored.key, **names, **chat)

    async def _send_as(self, build: Callable[..., Message], how: _HowToSend, /, **fields: Any) -> Sent:
        chat, options = _split_options(how)
        return await self.send(build(**fields, **chat), **options)

    def _require_files(self) -> Files:
        if self.files is None:
            raise ConfigError(
                "This sender has no storage for files.",
                hint="Give it files=S3Files(…), or send media by a link of your own.",
            )
        return self.files

    # -- instances -----------------------------------------------------------------------------

    async def instance(self, action: str, **options: Any) -> dict[str, Any]:
        """Run one of `actions` on the account and return the API's answer. Raises SendFailed.

        Actions differ from API to API; options are those of the method behind each.
        """
        name = self.actions.get(action.replace("-", "_"))
        if name is None:
            raise ConfigError(f'"{self.api}" has no action "{action}"; there are {", ".join(self.actions)}.')
        method = getattr(self, name)
        try:
            inspect.signature(method).bind(**options)
        except TypeError:
            taken = ", ".join(inspect.signature(method).parameters) or "nothing"
            raise ConfigError(f'The action "{action}" of "{self.api}" takes {taken}.') from None
        done: dict[str, Any] = await method(**options)
        return done

    def _normalise_number(self, text: str) -> str:
        """Normalise the number of a call that is no message. Raises SendFailed."""
        try:
            return normalise(text, country=self.country)
        except InvalidMessage as error:
            raise SendFailed(str(error), Reason.invalid_number) from None

    async def _ask(self, call: Call) -> dict[str, Any]:
        """Make a call about an instance; anything but an object is returned as `data`."""
        answer, data = await self._request(call, _DOCUMENT_READ)
        if data is None and answer.body:
            raise SendFailed("The answer cannot be read.", Reason.unknown, status=answer.status)
        return data if isinstance(data, dict) else {} if data is None else {"data": data}

    # -- calling -------------------------------------------------------------------------------

    async def _request(self, call: Call, most: int) -> tuple[HttpAnswer, Any]:
        if self._client is None:
            raise ConfigError(
                "This sender is not open.", hint="Write `async with … as whatsapp:`, or await open() before."
            )
        key = _reveal(self._key if call.key is None else call.key, self.api)
        headers = {"user-agent": "oncehook", **self._authorization(key)}
        body = None
        if call.body is not None:
            headers["content-type"] = "application/json"
            body = msgspec.json.encode(call.body)
        try:
            answer = await self._client.request(
                call.method, self.base_url + call.path, headers, body, within=self.timeout, most=most
            )
        except Unanswered as error:
            raise build_silence(error) from None
        data = _decode(answer.body)
        if 200 <= answer.status < 300:
            return answer, data
        raise self._build_failure(answer, data)

    def _build_failure(self, answer: HttpAnswer, data: Any) -> SendFailed:
        fault = self._fault(answer.status, data)
        return SendFailed(
            self._clean(fault.text, _TEXT_KEPT) or f"HTTP {answer.status}",
            fault.reason,
            status=answer.status,
            api_code=None if fault.api_code is None else self._clean(fault.api_code, _CODE_KEPT),
            answer=self._mask(answer.body)[:ANSWER_KEPT],
            retry_after=retry_after(answer.retry_after, clock.now_utc()),
            unsure=fault.unsure or answer.status in NOBODY_ANSWERED,
        )

    def _clean(self, text: str, longest: int) -> str:
        return " ".join(self._mask(text.encode()).decode("utf-8", "replace").split())[:longest]

    def _mask(self, body: bytes) -> bytes:
        """Mask our own credentials in an answer that repeats them (S25)."""
        for credential in self._credentials():
            secret = _reveal(credential, self.api).encode()
            if len(secret) >= _SHORTEST_SECRET and secret in body:
                body = body.replace(secret, _MASKED)
        return body

    def _credentials(self) -> Sequence[Credential]:
        return (self._key,)

    @property
    def credential(self) -> Credential:
        """Return what authenticates its calls."""
        return self._key

    # -- what differs from API to API ----------------------------------------------------------

    @abstractmethod
    def _authorization(self, key: str) -> dict[str, str]:
        """Build the header that authenticates a call."""

    @abstractmethod
    def _call_for(self, message: Message, id: str | None) -> Call:
        """Build the request that sends this message. Raises SendFailed for what this API cannot send."""

    @abstractmethod
    def _fault(self, status: int, data: Any) -> Fault:
        """Read why the API refused from its answer; `data` is None where that was no JSON."""


def _split_options(how: _HowToSend) -> tuple[ChatOptions, SendOptions]:
    chat = {name: value for name, value in how.items() if name in ChatOptions.__annotations__}
    options = {name: value for name, value in how.items() if name not in chat}
    return cast("ChatOptions", chat), cast("SendOptions", options)


# -- trying again -------------------------------------------------------------------------------


def _wait(waits: Policy, attempt: int, error: SendFailed, retry_unsure: bool) -> float | None:
    """Return the seconds until the next attempt, by the rules of a delivery; None to give up."""
    if error.category is Category.permanent or (error.unsure and not retry_unsure):
        return None
    wait = waits.wait(attempt)
    if wait is not None and error.retry_after is not None:
        wait = max(wait, min(error.retry_after, waits.cap))
    return wait


def _decode(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


# -- requests ----------------------------------------------------------------------------------


def without_none(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def refuse_own_card(link: Link, api: str) -> None:
    """Refuse a user-defined card for an API that shows the page's own. Raises SendFailed."""
    if link.title or link.description or link.image:
        raise build_unsupported(
            api, "a link with a title, description or image of your own; it shows those of the page"
        )


# -- settings ----------------------------------------------------------------------------------


def _base(url: str) -> str:
    read = read_url(url)
    if "?" in read:
        raise ConfigError("The address of an API ends before any question mark.")
    return read.rstrip("/")


def _reveal(credential: Credential, whose: str) -> str:
    text = credential.reveal().decode("utf-8", "replace") if isinstance(credential, Secret) else credential
    text = text.strip()
    if not text:
        raise ConfigError(f"The credential of {whose} is empty.")
    if not text.isascii() or not text.isprintable():
        raise ConfigError(f"The credential of {whose} must be plain printable ASCII.")
    return text
