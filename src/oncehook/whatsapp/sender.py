"""What every WhatsApp API has in common: send one message, say under which id it went or why it did not.

`meta`, `evolution_api` and `evolution_go` each say how a message is written for their API and what its errors mean;
this module makes the calls, through the guarded client, and turns every failure into one `SendFailed`. Used directly by
programs (`async with MetaCloud(…) as whatsapp`) and by the sender destination, which adds retries and dead letters.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol, Self, TypedDict, TypeVar, Unpack, cast

import msgspec

from oncehook import clock
from oncehook.errors import ConfigError, OncehookError
from oncehook.http_client import Answer, Unanswered
from oncehook.http_client.addresses import Guard, Network
from oncehook.http_client.proxy import proxy_from, read_proxy
from oncehook.http_client.urls import read_url
from oncehook.model import ANSWER_KEPT, Category
from oncehook.retry import Policy, policy, retry_after
from oncehook.secret import Secret
from oncehook.whatsapp.files import META_TYPES, FileTypes, OutgoingFile, clean_name, why_not
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
from oncehook.whatsapp.outcomes import CATEGORY, NOBODY_ANSWERED, Fault, Reason, SendFailed, Sent, silence, unsupported

if TYPE_CHECKING:
    from oncehook.http_client.client import HttpClient

__all__ = [
    "CATEGORY",
    "ChatOptions",
    "Files",
    "Reason",
    "SendFailed",
    "SendOptions",
    "Sender",
    "Sent",
    "StoredFile",
]

log = logging.getLogger("oncehook.whatsapp")

Credential = str | Secret
Retry = Policy | str | Sequence[str | float] | Mapping[str, object]
_M = TypeVar("_M", bound=Message)


class SendOptions(TypedDict, total=False):
    """How to send: what `Sender.send` takes beside the message."""

    id: str | None
    retry: Retry | None
    retry_unsure: bool


class ChatOptions(TypedDict, total=False):
    """What any message in a chat may carry; see `oncehook.whatsapp.Text`."""

    reply_to: str | None
    delay: int
    mentions: list[str]
    mention_all: bool


class _HowToSend(ChatOptions, SendOptions, total=False):
    """All that may be said beside what is sent."""


FROM_ENVIRONMENT: Final = "env"
"""As `proxy`: look in the environment, see `oncehook.http_client.proxy`."""
TIMEOUT: Final = 30.0

_ANSWER_READ: Final = 1 << 18
"""Bytes of an answer to a message: it repeats the message, with a small picture of what was sent."""
_DOCUMENT_READ: Final = 1 << 21
"""Bytes of an answer about an instance: a QR code is a picture in text."""
_IDLE: Final = 2.0
"""Seconds for which an idle connection is kept: less than any server waits, so that none is found closing. Nobody could
tell whether a message that met such a one was received."""
_SHORTEST_SECRET: Final = 6
_MASKED: Final = b"[masked]"
_TEXT_KEPT: Final = 300
_CODE_KEPT: Final = 64


@dataclass(slots=True, frozen=True)
class Call:
    """One request to an API."""

    method: str
    path: str
    body: Mapping[str, Any] | None = field(default=None, repr=False)
    key: Credential | None = field(default=None, repr=False)
    """Another credential than the sender's own (an administrator's)."""


class StoredFile(Protocol):
    """A file in storage."""

    @property
    def key(self) -> str:
        """Its name there, for as long as it is kept."""

    @property
    def kind(self) -> MediaKind:
        """As what it is sent."""

    @property
    def mime(self) -> str:
        """Its media type."""

    @property
    def filename(self) -> str | None:
        """What the recipient sees it called."""


class Files(Protocol):
    """Where files lie while WhatsApp fetches them."""

    async def prepare(
        self,
        content: str | Path | bytes,
        /,
        *,
        filename: str | None = None,
        kind: MediaKind | None = None,
        types: FileTypes = META_TYPES,
    ) -> OutgoingFile:
        """Read it and see what it is, by what an API takes; `oncehook.whatsapp.files.prepare` does that."""

    async def store(self, file: OutgoingFile, /) -> StoredFile:
        """Keep it."""

    async def link(self, key: str, /) -> str:
        """An address from which it can be fetched, for a while.

        Raises an OncehookError; one that is worth trying again has `transient` set.
        """


class Sender(ABC):
    """One WhatsApp API, as one account of it: the same few verbs for all of them."""

    api: ClassVar[str]
    """Its name in settings."""
    actions: ClassVar[Mapping[str, str]] = {}
    """What `instance` can do, and the method behind it."""
    takes_meta_ids: ClassVar[bool] = False
    """Whether it can send to the ids that Meta gives to people and groups."""
    file_types: ClassVar[FileTypes] = META_TYPES
    """Which files the API takes as pictures, films, sounds and stickers."""
    address: str
    """Whom it reaches, without credentials."""

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
        self._outbound: HttpClient | None = None
        _revealed(key, self.api)
        # Whoever asked for a proxy is refused here, and not at the first message.
        if isinstance(proxy, str) and (through := self._proxy_word()) is not None:
            read_proxy(through)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.address}>"

    # -- life ----------------------------------------------------------------------------------

    async def open(self) -> None:
        """Be ready to send, on the running loop. The HTTP library is loaded here, and nowhere before."""
        from oncehook.http_client.client import HttpClient

        if self._outbound is None:
            self._outbound = HttpClient(
                allow_private=self._allow_private, ca=self._ca, proxy=self._proxy_word(), idle=_IDLE
            )
        await self._outbound.open()

    async def close(self) -> None:
        """Let go of the connections."""
        outbound, self._outbound = self._outbound, None
        if outbound is not None:
            await outbound.close()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _proxy_word(self) -> str | None:
        if self._proxy == FROM_ENVIRONMENT:
            return proxy_from(os.environ, self._name)
        return None if self._proxy is None else _revealed(self._proxy, f"{self.api} proxy")

    # -- sending -------------------------------------------------------------------------------

    async def send(
        self, message: Message, *, id: str | None = None, retry: Retry | None = None, retry_unsure: bool = False
    ) -> Sent:
        """Send one message. Raises SendFailed.

        `id` is a stable id of this message, handed on as far as the API can: so that it is the same at a second try.
        `retry` tries again by that policy, which an inbox would do better: here it is lost with the process. What may
        have been sent is not sent again, unless `retry_unsure` says so. How it ended is logged in one line, and counted
        in `attempts` of the outcome.
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
        told = {"status": error.status, "error": str(error), "unsure": error.unsure or None}
        log.warning("message.failed", extra={"fields": fields | why | told})

    async def attempt(self, message: Message, *, id: str | None = None) -> Sent:
        """Try once to send a message, and log nothing: a destination keeps count itself. Raises SendFailed."""
        call = self._call_for(await self._ready(message), id)
        answer, said = await self._make(call, _ANSWER_READ)
        return Sent(self._message_id(said), answer.status, self._masked(answer.body)[:ANSWER_KEPT])

    async def _ready(self, message: Message) -> Message:
        """Return the message as `_checked` does, with a fresh link to what is in storage."""
        message = self._checked(message)
        if isinstance(message, Link):
            self._check_links(url=message.url, image=message.image)
        return await self._ready_media(message) if isinstance(message, Media) else message

    def _checked(self, message: _M) -> _M:
        """Return the message with its numbers in one spelling. Raises SendFailed for what could never be sent."""
        try:
            check(message)
        except InvalidMessage as error:
            raise SendFailed(str(error), Reason.invalid) from None
        try:
            message = self._with_numbers(message)
        except InvalidMessage as error:
            raise SendFailed(str(error), Reason.invalid_number) from None
        if message.to is not None and not self.takes_meta_ids and (is_user_id(message.to) or is_group_id(message.to)):
            raise unsupported(self.api, "to ids of Meta's; only to numbers and WhatsApp's own ids")
        if getattr(message, "delay", 0) >= self.timeout * 1000:
            raise SendFailed(f"The delay is longer than the {self.timeout:g} s of the timeout.", Reason.invalid)
        return message

    def _with_numbers(self, message: _M) -> _M:
        written = without_none(**{field: getattr(message, field, None) for field in ("to", "participant", "phone")})
        numbers: dict[str, str | list[str]] = {
            field: normalise(text, country=self.country) for field, text in written.items()
        }
        if mentions := getattr(message, "mentions", None):
            numbers["mentions"] = [normalise(text, country=self.country) for text in mentions]
        return msgspec.structs.replace(message, **numbers)

    def _check_links(self, **links: str | None) -> None:
        """Refuse what the API must not be sent to fetch. Raises SendFailed."""
        for name, link in links.items():
            if link is not None and (wrong := why_not(link, self._guard)):
                raise SendFailed(f"The {name} {wrong}.", Reason.invalid)

    async def _ready_media(self, media: Media) -> Media:
        if media.filename is not None:
            media = msgspec.structs.replace(media, filename=clean_name(media.filename, media.mime or ""))
        self._check_links(link=media.link)
        if media.stored is not None:
            media = msgspec.structs.replace(media, stored=None, link=await self._link(media.stored))
        return media

    async def _link(self, key: str) -> str:
        files = self._needed_files()
        try:
            return await files.link(key)
        except OncehookError as error:
            reason = Reason.unavailable if getattr(error, "transient", False) else Reason.invalid
            raise SendFailed(f"No link to the file: {error}", reason, hint=error.hint) from error

    async def send_text(self, to: str, text: str, *, preview_url: bool = False, **how: Unpack[_HowToSend]) -> Sent:
        """Words. `how`: what any message may carry (`reply_to`, `delay`, …), and options of `send`; here and below."""
        said, options = _parted(how)
        return await self.send(Text(to=to, text=text, preview_url=preview_url, **said), **options)

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
        """A web address, shown as a card."""
        said, options = _parted(how)
        card = Link(to=to, url=url, text=text, title=title, description=description, image=image, **said)
        return await self.send(card, **options)

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
        """A place on the map."""
        said, options = _parted(how)
        place = Location(to=to, latitude=latitude, longitude=longitude, name=name, address=address, **said)
        return await self.send(place, **options)

    async def send_contact(
        self, to: str, name: str, phone: str, *, organization: str | None = None, **how: Unpack[_HowToSend]
    ) -> Sent:
        """Somebody's name and number."""
        said, options = _parted(how)
        return await self.send(Contact(to=to, name=name, phone=phone, organization=organization, **said), **options)

    async def send_poll(
        self, to: str, question: str, options: Sequence[str], *, max_answers: int = 1, **how: Unpack[_HowToSend]
    ) -> Sent:
        """A question with answers to choose from."""
        said, sending = _parted(how)
        poll = Poll(to=to, question=question, options=list(options), max_answers=max_answers, **said)
        return await self.send(poll, **sending)

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
        """A picture, a film, a sound, a document or a sticker, from a web address or by the id Meta gave it."""
        said, options = _parted(how)
        words = {"caption": caption, "filename": filename, "mime": mime}
        return await self.send(Media(to=to, kind=kind, link=link, id=media_id, **words, **said), **options)

    async def send_template(
        self,
        to: str,
        name: str,
        *,
        language: str = "en_US",
        components: Sequence[dict[str, Any]] = (),
        **how: Unpack[SendOptions],
    ) -> Sent:
        """Words approved beforehand."""
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
        """An emoji on a message; an empty one takes it back. In a group, `participant` is who wrote the message."""
        reaction = Reaction(to=to, message_id=message_id, emoji=emoji, from_me=from_me, participant=participant)
        return await self.send(reaction, **how)

    async def mark_read(self, message_id: str, to: str | None = None, **how: Unpack[SendOptions]) -> Sent:
        """The two blue ticks on a received message; Evolution also asks whose it was."""
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
        """A file of this machine, by its path, or bytes: put into storage, and sent as what it is."""
        said, options = _parted(how)
        file = await self.prepare_file(to, content, caption=caption, filename=filename, kind=kind, **said)
        return await self.send(file, **options)

    async def prepare_file(
        self,
        to: str,
        content: str | Path | bytes,
        *,
        caption: str | None = None,
        filename: str | None = None,
        kind: MediaKind | None = None,
        **said: Unpack[ChatOptions],
    ) -> Media:
        """A file as a message: put into storage, and not sent. For `Inbox.send_message`, which keeps and retries it.

        What could not be sent (the file, its caption, the number) is refused before anything is uploaded. A path is
        believed: never make one of what a stranger wrote.
        """
        files = self._needed_files()
        file = await files.prepare(content, filename=filename, kind=kind, types=self.file_types)
        self._checked(Media(to=to, kind=file.kind, stored=file.filename, caption=caption, **said))
        stored = await files.store(file)
        return Media(
            to=to,
            kind=stored.kind,
            stored=stored.key,
            caption=caption,
            filename=stored.filename,
            mime=stored.mime,
            **said,
        )

    def _needed_files(self) -> Files:
        if self.files is None:
            raise ConfigError(
                "This sender has no storage for files.",
                hint="Give it files=S3Files(…), or send media by a link of your own.",
            )
        return self.files

    # -- instances -----------------------------------------------------------------------------

    async def instance(self, action: str, **options: Any) -> dict[str, Any]:
        """Do something about the account behind this sender, as the API answers it. Raises SendFailed.

        Which `actions` there are differs from API to API; options are those of the method behind each.
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

    def _one_spelling(self, text: str) -> str:
        """Return a number of a call that is no message in one spelling. Raises SendFailed."""
        try:
            return normalise(text, country=self.country)
        except InvalidMessage as error:
            raise SendFailed(str(error), Reason.invalid_number) from None

    async def _ask(self, call: Call) -> dict[str, Any]:
        """Make a call about an instance; what comes back is always a table."""
        answer, said = await self._make(call, _DOCUMENT_READ)
        if said is None and answer.body:
            raise SendFailed("The answer cannot be read.", Reason.unknown, status=answer.status)
        return said if isinstance(said, dict) else {} if said is None else {"data": said}

    # -- calling -------------------------------------------------------------------------------

    async def _make(self, call: Call, most: int) -> tuple[Answer, Any]:
        if self._outbound is None:
            raise ConfigError(
                "This sender is not open.", hint="Write `async with … as whatsapp:`, or await open() before."
            )
        key = _revealed(self._key if call.key is None else call.key, self.api)
        headers = {"user-agent": "oncehook", **self._authorization(key)}
        body = None
        if call.body is not None:
            headers["content-type"] = "application/json"
            body = msgspec.json.encode(call.body)
        try:
            answer = await self._outbound.request(
                call.method, self.base_url + call.path, headers, body, within=self.timeout, most=most
            )
        except Unanswered as error:
            raise silence(error) from None
        said = _decoded(answer.body)
        if 200 <= answer.status < 300:
            return answer, said
        raise self._failed(answer, said)

    def _failed(self, answer: Answer, said: Any) -> SendFailed:
        fault = self._fault(answer.status, said)
        return SendFailed(
            self._line(fault.text, _TEXT_KEPT) or f"HTTP {answer.status}",
            fault.reason,
            status=answer.status,
            api_code=None if fault.api_code is None else self._line(fault.api_code, _CODE_KEPT),
            answer=self._masked(answer.body)[:ANSWER_KEPT],
            retry_after=retry_after(answer.retry_after, clock.now_utc()),
            unsure=fault.unsure or answer.status in NOBODY_ANSWERED,
        )

    def _line(self, text: str, longest: int) -> str:
        return " ".join(self._masked(text.encode()).decode("utf-8", "replace").split())[:longest]

    def _masked(self, body: bytes) -> bytes:
        """An answer that repeats our own credentials must not carry them any further (S25)."""
        for credential in self._credentials():
            secret = _revealed(credential, self.api).encode()
            if len(secret) >= _SHORTEST_SECRET and secret in body:
                body = body.replace(secret, _MASKED)
        return body

    def _credentials(self) -> Sequence[Credential]:
        return (self._key,)

    # -- what differs from API to API ----------------------------------------------------------

    @abstractmethod
    def _authorization(self, key: str) -> dict[str, str]:
        """The header that says who calls."""

    @abstractmethod
    def _call_for(self, message: Message, id: str | None) -> Call:
        """The request that sends this message. Raises SendFailed for what this API cannot send."""

    @abstractmethod
    def _message_id(self, said: Any) -> str | None:
        """The id a message got, from the answer to it."""

    @abstractmethod
    def _fault(self, status: int, said: Any) -> Fault:
        """Why the API refused, from its answer; `said` is None where that was no JSON."""


def _parted(how: _HowToSend) -> tuple[ChatOptions, SendOptions]:
    """Tell what the message carries from how it is sent."""
    said = {name: value for name, value in how.items() if name in ChatOptions.__annotations__}
    options = {name: value for name, value in how.items() if name not in said}
    return cast("ChatOptions", said), cast("SendOptions", options)


# -- trying again -------------------------------------------------------------------------------


def _wait(waits: Policy, attempt: int, error: SendFailed, retry_unsure: bool) -> float | None:
    """Seconds until the next attempt, as a delivery's would be; None: give up."""
    if error.category is Category.permanent or (error.unsure and not retry_unsure):
        return None
    wait = waits.wait(attempt)
    if wait is not None and error.retry_after is not None:
        wait = max(wait, min(error.retry_after, waits.cap))
    return wait


def _decoded(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


# -- requests ----------------------------------------------------------------------------------


def without_none(**fields: Any) -> dict[str, Any]:
    """Return those fields that are not None."""
    return {name: value for name, value in fields.items() if value is not None}


def refuse_own_card(link: Link, api: str) -> None:
    """Refuse a title, description or image for an API that takes those of the page. Raises SendFailed."""
    if link.title or link.description or link.image:
        raise unsupported(api, "a link with a title, description or image of your own; it shows those of the page")


# -- settings ----------------------------------------------------------------------------------


def _base(url: str) -> str:
    read = read_url(url)
    if "?" in read:
        raise ConfigError("The address of an API ends before any question mark.")
    return read.rstrip("/")


def _revealed(credential: Credential, whose: str) -> str:
    text = credential.reveal().decode("utf-8", "replace") if isinstance(credential, Secret) else credential
    text = text.strip()
    if not text:
        raise ConfigError(f"The credential of {whose} is empty.")
    if not text.isascii() or not text.isprintable():
        raise ConfigError(f"The credential of {whose} must be plain printable ASCII.")
    return text
