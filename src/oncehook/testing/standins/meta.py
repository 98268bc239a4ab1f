"""A stand-in for Meta's WhatsApp Cloud API: `POST /{version}/{phone_number_id}/messages`, media, and signed webhooks.

Errors have Meta's codes and format. The HTTP status of a code has changed over the years and must not be relied on, as
Meta says itself; `fail(status=…)` overrides it.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from oncehook import clock
from oncehook.errors import ConfigError
from oncehook.model import Arrival
from oncehook.testing.standins.base import WhatsAppStandIn, digits, json_request, new_hex, read_reference
from oncehook.testing.standins.server import FormPart, Reply, Request

ERRORS: Final[dict[int, tuple[int, str, str]]] = {
    0: (401, "AuthException", "Unable to authenticate the app user."),
    1: (400, "An unknown error occurred", "Invalid request or possible server error."),
    2: (503, "Service temporarily unavailable", "Temporary due to downtime or due to being overloaded."),
    4: (400, "Application request limit reached", "The app has reached its API call rate limit."),
    10: (403, "Application does not have permission for this action", "Permission is not granted or was removed."),
    100: (400, "Invalid parameter", "The request included one or more unsupported or misspelled parameters."),
    190: (401, "Error validating access token: Session has expired.", "Your access token has expired."),
    368: (403, "Temporarily blocked for policies violations", "The account has been restricted."),
    80007: (400, "Rate limit issues", "The WhatsApp Business Account has reached its rate limit."),
    130429: (400, "Rate limit hit", "Cloud API message throughput has been reached."),
    131000: (500, "Something went wrong", "Message failed to send due to an unknown error."),
    131009: (400, "Parameter value is not valid", "One or more parameter values are invalid."),
    131016: (500, "Service unavailable", "A service is temporarily unavailable."),
    131026: (400, "Message undeliverable", "Unable to deliver message."),
    131030: (400, "Recipient phone number not in allowed list", "Add the number to the recipient list and try again."),
    131047: (
        400,
        "Re-engagement message",
        "Message failed to send because more than 24 hours have passed since the customer last replied to this number.",
    ),
    131048: (400, "Spam rate limit hit", "Too many previous messages were blocked or flagged as spam."),
    131051: (400, "Unsupported message type", "Message type is currently not supported."),
    131052: (400, "Media download error", "Unable to download the media sent by the user."),
    131053: (400, "Media upload error", "Unable to upload the media used in the message."),
    131056: (
        400,
        "(Business Account, Consumer Account) pair rate limit hit",
        "Too many messages sent from the sender to the same recipient in a short period of time.",
    ),
    132001: (404, "Template name does not exist in the translation", "The template does not exist or is not approved."),
}
"""Usual HTTP status, title and details by code."""

STATUSES: Final = {400: 100, 401: 190, 403: 10, 404: 132001, 429: 130429, 500: 131000, 503: 131016}
"""Code of a failure of which only the status is given."""

TEXT_LIMIT: Final = 4096

MEDIA_LIMITS: Final = {
    "image/jpeg": 5 << 20,
    "image/png": 5 << 20,
    "image/webp": 500 << 10,
    "audio": 16 << 20,
    "video": 16 << 20,
    "application": 100 << 20,
    "text": 100 << 20,
}
"""Largest upload in bytes, by media type or its first half."""

MEDIA_KINDS: Final = ("audio", "document", "image", "sticker", "video")
KINDS: Final = (*MEDIA_KINDS, "contacts", "interactive", "location", "reaction", "template", "text")


@dataclass(slots=True, frozen=True)
class MetaHook:
    """One message or status: an item of a list in a webhook, and the contact that belongs to it."""

    list: Literal["messages", "statuses"]
    item: dict[str, Any]
    contact: dict[str, Any] | None = None

    @property
    def id(self) -> str:
        """Return the wamid."""
        return str(self.item["id"])


@dataclass(slots=True, frozen=True)
class Upload:
    id: str
    content: bytes
    content_type: str
    filename: str | None


class MetaStandIn(WhatsAppStandIn[MetaHook]):
    """A server of Meta's WhatsApp Cloud API.

    >>> async with MetaStandIn() as meta:
    ...     sender = MetaCloud(meta.token, meta.phone_number_id, base_url=meta.url, allow_private=True)
    ...     meta.fail(code=130429)
    """

    preset = "whatsapp-cloud"

    def __init__(
        self,
        *,
        token: str = "EAAstand-in",  # noqa: S107 - of a stand-in
        phone_number_id: str = "106540352242922",
        display_phone_number: str = "15550783881",
        business_account_id: str = "102290129340398",
        secret: str = "meta-app-secret",  # noqa: S107
        port: int = 0,
    ) -> None:
        """Sign webhooks with the app's `secret`, which the source that takes them has as well."""
        super().__init__(token=token, secret=secret, port=port)
        self.phone_number_id = phone_number_id
        self.display_phone_number = display_phone_number
        self.business_account_id = business_account_id
        self.uploads: dict[str, Upload] = {}
        """Files by media id."""
        self._closed: set[str] = set()

    # -- what goes wrong -----------------------------------------------------------------------

    def fail(
        self,
        status: int | None = None,
        *,
        message: object = None,
        code: int | None = None,
        details: str | None = None,
        retry_after: int | None = None,
        times: int | None = 1,
    ) -> None:
        """Answer the next calls with an error. Status and code follow from each other; without both it is 500.

        >>> meta.fail(code=131056, times=2)
        >>> meta.fail(status=429, retry_after=7)
        """
        if code is None:
            code = STATUSES.get(status or 500, 131000)
        elif code not in ERRORS and status is None:
            raise ConfigError(f"Say which HTTP status goes with the code {code}.")
        title = None if message is None else str(message)
        self.script_error(graph_error(code, status=status, title=title, details=details), retry_after, times)

    def error(self, status: int, message: object = None) -> Reply:
        return graph_error(STATUSES.get(status, 131000), status=status, title=None if message is None else str(message))

    def close_window(self, number: str) -> None:
        """Close the 24-hour window of a customer: only templates are accepted, until `message` opens it again.

        Messages are refused at once. Meta may also accept one and report the failure later: that is `status(sent,
        "failed", code=131047)`.
        """
        self._closed.add(digits(number))

    # -- the API -------------------------------------------------------------------------------

    def answer(self, request: Request) -> Reply:
        if (refusal := self._refusal(request)) is not None:
            return refusal
        match request.method, request.path.strip("/").split("/"):
            case "POST", [_, self.phone_number_id, "messages"]:
                return self._message(request.json())
            case "POST", [_, self.phone_number_id, "media"]:
                return self._upload(request.form())
            case "GET", [_, self.phone_number_id]:
                return Reply(200, self._about_number())
            case "GET", ["media", id] if id in self.uploads:
                return Reply(200, self.uploads[id].content, {"content-type": self.uploads[id].content_type})
            case "GET", [_, id] if id in self.uploads:
                return Reply(200, self._about_upload(self.uploads[id]))
            case "DELETE", [_, id] if id in self.uploads:
                del self.uploads[id]
                return Reply(200, {"success": True})
            case method, [_, id, *_]:
                return _unknown_object(method, id)
        return graph_error(2500, status=400, title="Unknown path components", details=request.path)

    def _refusal(self, request: Request) -> Reply | None:
        authorization = request.headers.get("authorization", "")
        if not authorization.lower().startswith("bearer "):
            return graph_error(
                104, status=401, title="An access token is required to request this resource.", details=""
            )
        if self._expired:
            return graph_error(190, subcode=463)
        if authorization[7:].strip() != self.token:
            return graph_error(190, title="Invalid OAuth access token - Cannot parse access token", details="")
        return None

    def _message(self, fields: dict[str, Any]) -> Reply:
        if fields.get("messaging_product") != "whatsapp":
            return graph_error(100, details="The parameter messaging_product is required.", bare=True)
        if fields.get("status") == "read":
            self.read.append(str(fields.get("message_id")))
            return Reply(200, {"success": True})
        kind = str(fields.get("type", "text"))
        written = str(fields.get("to") or fields.get("recipient") or "")
        to = digits(written) if fields.get("to") and fields.get("recipient_type") != "group" else written
        if (wrong := self._wrong(kind, to, fields)) is not None:
            return wrong
        sent = self.take(_wamid(to), to, kind, fields)
        return Reply(
            200,
            {
                "messaging_product": "whatsapp",
                "contacts": [{"input": written, "wa_id" if fields.get("to") else "user_id": to}],
                "messages": [
                    {"id": sent.id, **({"message_status": "accepted"} if kind == "template" else {})},
                ],
            },
        )

    def _wrong(self, kind: str, to: str, fields: dict[str, Any]) -> Reply | None:
        if not to:
            return graph_error(100, details="The parameter to or recipient is required.", bare=True)
        if kind not in KINDS:
            return graph_error(100, details=f"Param type must be one of {{{', '.join(map(str.upper, KINDS))}}}")
        if not isinstance(fields.get(kind), list if kind == "contacts" else dict):
            return graph_error(131009, details=f"Parameter '{kind}' is mandatory for type '{kind}'")
        content: Any = fields[kind]
        if kind == "text" and len(str(content.get("body", ""))) > TEXT_LIMIT:
            return graph_error(100, details=f"Param text['body'] must be at most {TEXT_LIMIT} characters long.")
        if kind in MEDIA_KINDS and (wrong := self._wrong_media(kind, content)) is not None:
            return wrong
        if to in self._absent:
            return graph_error(131026)
        if to in self._closed and kind != "template":
            return graph_error(131047)
        return None

    def _wrong_media(self, kind: str, content: dict[str, Any]) -> Reply | None:
        if ("id" in content) == ("link" in content):
            return graph_error(131009, details=f"Exactly one of the parameters ['id', 'link'] must be set for {kind}.")
        if "id" in content and str(content["id"]) not in self.uploads:
            return graph_error(131053, details=f"Media with id {content['id']} was not found.")
        return None

    def _upload(self, form: dict[str, FormPart]) -> Reply:
        file = form.get("file")
        if file is None or "messaging_product" not in form:
            return graph_error(100, details="The parameters file and messaging_product are required.", bare=True)
        kind = form["type"].text if "type" in form else file.content_type
        kind = kind.partition(";")[0].strip()
        limit = MEDIA_LIMITS.get(kind) or MEDIA_LIMITS.get(kind.partition("/")[0])
        if limit is None:
            return graph_error(100, details=f"Param file must be a file of a supported type, not '{kind}'.")
        if len(file.content) > limit:
            return graph_error(131053, details=f"The file is larger than {limit} bytes.")
        made = Upload(_media_id(), file.content, kind, file.filename)
        self.uploads[made.id] = made
        return Reply(200, {"id": made.id})

    def _about_upload(self, upload: Upload) -> dict[str, Any]:
        return {
            "messaging_product": "whatsapp",
            "url": f"{self.url}/media/{upload.id}",
            "mime_type": upload.content_type,
            "sha256": hashlib.sha256(upload.content).hexdigest(),
            "file_size": len(upload.content),
            "id": upload.id,
        }

    def _about_number(self) -> dict[str, Any]:
        return {
            "verified_name": "Stand-in",
            "display_phone_number": self.display_phone_number,
            "quality_rating": "GREEN",
            "id": self.phone_number_id,
        }

    # -- webhooks ------------------------------------------------------------------------------

    def message(
        self,
        *,
        from_: str,
        text: str | None = None,
        type: str = "text",
        id: str | None = None,
        name: str = "Ana",
        **content: Any,
    ) -> MetaHook:
        """Build a customer's message: `text`, or another type with its own fields.

        >>> meta.message(from_="5511988880142", text="Hi")
        >>> meta.message(from_="5511988880142", type="image", mime_type="image/jpeg", sha256="…")
        """
        is_user_id = "." in from_
        number = from_ if is_user_id else digits(from_)
        self._closed.discard(number)
        if type == "text":
            content = {"body": text or "", **content}
        elif type in MEDIA_KINDS:
            content = {"id": _media_id(), **content}
        item = {
            "from_user_id" if is_user_id else "from": number,
            "id": id or _wamid(number),
            "timestamp": _now(),
            type: content,
            "type": type,
        }
        return MetaHook("messages", item, {"profile": {"name": name}, "user_id" if is_user_id else "wa_id": number})

    def status(self, of: object, status: str, *, to: str | None = None, code: int | None = None) -> MetaHook:
        """Build the status of a message: `sent`, `delivered`, `read` or `failed` (with an error code).

        `of` is one of `sent`, or a wamid, which needs `to`.

        >>> read_first = [meta.status(meta.sent[0], word) for word in ("sent", "read", "delivered")]
        """
        wamid, recipient = read_reference(of, to)
        item: dict[str, Any] = {
            "id": wamid, "status": status, "timestamp": _now(), "recipient_id": digits(recipient),
        }  # fmt: skip
        if status == "failed":
            _, title, details = ERRORS[code or 131000]
            item["errors"] = [
                {"code": code or 131000, "title": title, "message": title, "error_data": {"details": details}}
            ]
        return MetaHook("statuses", item)

    def webhooks(self, *hooks: MetaHook) -> Sequence[Arrival]:
        """Build one request for all hooks: Meta sends up to 1000 messages and statuses together."""
        value: dict[str, Any] = {
            "messaging_product": "whatsapp",
            "metadata": {"display_phone_number": self.display_phone_number, "phone_number_id": self.phone_number_id},
        }
        contacts = {str(hook.contact): hook.contact for hook in hooks if hook.contact is not None}
        if contacts:
            value["contacts"] = list(contacts.values())
        for hook in hooks:
            value.setdefault(hook.list, []).append(hook.item)
        entry = {"id": self.business_account_id, "changes": [{"value": value, "field": "messages"}]}
        return [json_request(_as_meta_writes({"object": "whatsapp_business_account", "entry": [entry]}))]


def graph_error(
    code: int,
    *,
    status: int | None = None,
    title: str | None = None,
    details: str | None = None,
    subcode: int | None = None,
    bare: bool = False,
) -> Reply:
    """Build an error in the Graph API's format; `bare`: without `error_data`, as for a malformed request."""
    known = ERRORS.get(code, (400, "An unknown error occurred", ""))
    title, details = title or known[1], known[2] if details is None else details
    error: dict[str, Any] = {
        "message": f"(#{code}) {details if bare else title}" if code not in (0, 104, 190) else title,
        "type": "OAuthException",
        "code": code,
    }
    if subcode is not None:
        error["error_subcode"] = subcode
    if details and not bare and code not in (104, 190):
        error["error_data"] = {"messaging_product": "whatsapp", "details": details}
    error["fbtrace_id"] = f"A{new_hex(22)}"
    return Reply(status or known[0], {"error": error})


def _unknown_object(method: str, id: str) -> Reply:
    title = (
        f"Unsupported {method.lower()} request. Object with ID '{id}' does not exist, cannot be loaded due to missing "
        "permissions, or does not support this operation."
    )
    answer = graph_error(100, title=title, details="", subcode=33)
    answer.body["error"].update({"message": title, "type": "GraphMethodException"})  # type: ignore[index]
    return answer


def _wamid(number: str) -> str:
    inside = b"\x1d\x0b" + number.encode() + b"\x15\x02\x00\x11\x18\x12" + new_hex(18).encode() + b"\x00"
    return "wamid." + base64.b64encode(inside).decode()


def _media_id() -> str:
    return str(clock.chance.randrange(10**15, 10**16))


def _now() -> str:
    return str(int(clock.now()))


def _as_meta_writes(data: object) -> bytes:
    """Encode JSON with everything outside ASCII and slashes escaped: Meta signs this form."""
    return json.dumps(data, separators=(",", ":")).replace("/", "\\/").encode()
