"""WhatsApp Cloud API (Meta): up to 1000 messages and statuses in one request, retried for seven days.

A retry goes to all apps of the business account, so another app's failure causes duplicates here. Any answer but 200
counts as failed. What Meta puts under `value` may also be at the top of the body, or under `data`: 360dialog sends its
old messages and its partner events like that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from oncehook.model import Arrival
from oncehook.payload import text_of
from oncehook.presets import _base, _media, _meta
from oncehook.rules import RuleContext
from oncehook.sources import Odd, Preset, Sample

LISTS: Final = {
    "messages": "message",
    "statuses": "status",
    # Messages that the business writes on its phone, where app and API share a number.
    "message_echoes": "echo",
    "calls": "call",
    "history": "history",
    "state_sync": "state_sync",
    "user_preferences": "user_preference",
}
"""The lists of a value, and the word for an item of each in the event's type."""

WORDS: Final = {"status": "status", "call": "event", "state_sync": "action", "user_preference": "value"}
"""The field of an item that tells what happened; for messages, their `type`."""

STATUSES: Final = ("sent", "delivered", "read")
PLAIN: Final = ("parent_user_id", "user_id", "wa_id")
WHO: Final[Mapping[str, Sequence[str]]] = {
    "messages": ("from_parent_user_id", "from_user_id", "from"),
    "message_echoes": ("to_parent_user_id", "to_user_id", "to"),
    "statuses": ("recipient_parent_user_id", "recipient_user_id", "recipient_id"),
    "state_sync": ("parent_user_id", "user_id", "phone_number"),
}
"""Fields that name the person an item is about: parent BSUID, BSUID, phone number."""

# Meta documents this field (the parent BSUID of a status's recipient) under three names.
PARENTS: Final = ("parent_recipient_user_id", "parent_user_id")
MEMBERS: Final = ("recipient_participant_user_id", "recipient_participant_id")
IDS: Final = frozenset({*PLAIN, *MEMBERS, *PARENTS, *(name for names in WHO.values() for name in names)})

VALUE: Final = "$.entry[0].changes[0].value"
# Places of the text that a person wrote, by kind of message.
TEXTS: Final = (
    "text.body",
    "image.caption",
    "video.caption",
    "document.caption",
    "document.filename",
    "button.text",
    "interactive.button_reply.title",
    "interactive.list_reply.title",
    "reaction.emoji",
)
WRITTEN: Final = (f"{VALUE}.messages[0]", f"{VALUE}.message_echoes[0]", "$.messages[0]", "$.data.messages[0]")
"""Paths of a message in the parts of a split request."""


# -- taking apart ------------------------------------------------------------------------------


def split(data: Any, arrival: Arrival) -> Iterator[Any]:
    """Make each message, status, call and contact an event of its own, with the metadata and contact it belongs to."""
    if isinstance(data, dict) and "entry" not in data:
        if _holds_items(data.get("data")):
            for part in _items(data["data"]):
                yield _meta.wrap(part, lambda item: {**data, "data": item})
            return
        if _holds_items(data):
            yield from _items(data)
            return
    yield from _documents(data)


def _holds_items(value: Any) -> bool:
    return isinstance(value, dict) and any(isinstance(value.get(name), list) and value[name] for name in LISTS)


def _items(value: dict[str, Any]) -> Iterator[Any]:
    """Yield the value once per item in its lists, with that item's contacts only: all contacts in each would multiply
    them."""
    contacts: Any = value.get("contacts")
    is_shared = isinstance(contacts, list) and len(contacts) > 1
    positions = _index(contacts) if is_shared else {}
    for part in _meta.one_of(value, LISTS, {"history": _chunk}):
        if is_shared and not isinstance(part, Odd):
            item = next(part[name][0] for name in LISTS if name in part)
            own = {position for name in IDS for position in positions.get(_hashable(item.get(name)), ())}
            part["contacts"] = [contacts[position] for position in sorted(own)]
        yield part


def _index(contacts: list[Any]) -> dict[str | int, list[int]]:
    """Index the contacts by id: searching them for each of 1000 items would take half a second."""
    found: dict[str | int, list[int]] = {}
    for position, contact in enumerate(contacts):
        for name in PLAIN if isinstance(contact, dict) else ():
            if (known := _hashable(contact.get(name))) is not None:
                found.setdefault(known, []).append(position)
    return found


def _hashable(value: Any) -> Any:
    return value if value and isinstance(value, str | int) else None


def _changes(change: Any) -> Iterator[Any]:
    value = change.get("value") if isinstance(change, dict) else None
    if not _holds_items(value):  # account, template and quality changes are one event each
        yield change if isinstance(change, dict) else Odd(change)
        return
    for part in _items(change["value"]):
        yield _meta.wrap(part, lambda item: {**change, "value": item})


def _chunk(chunk: Any) -> Iterator[Any]:
    # A chunk without threads means that the business did not share its history.
    if isinstance(chunk, dict) and "threads" not in chunk:
        yield chunk
    else:
        yield from _threads(chunk)


_threads: Final = _meta.each("threads", _meta.each("messages", _meta.itself))
_documents: Final = _meta.each("entry", _meta.each("changes", _changes))


# -- reading one event -------------------------------------------------------------------------


class WhatsAppPerson(NamedTuple):
    """The other person, by every id that Meta has."""

    parent: Any = None
    user_id: Any = None
    """The business-scoped user id (BSUID): always there since April 2026, while the phone number may be withheld."""
    phone: Any = None


class WhatsAppNotice(NamedTuple):
    """The one item of an event, with its surroundings."""

    kind: str
    """`message`, `status`, …; empty for a change without an item."""
    item: dict[str, Any]
    person: WhatsAppPerson
    group: Any
    """The group it belongs to, if any."""
    number: tuple[str, ...]
    """The `phone_number_id` of the business; empty where there is no metadata."""
    business: Any
    """The business's own phone number."""
    account: Any
    field: Any


def read(data: Any) -> WhatsAppNotice:
    """Read the one item of an event. A missing field raises, which a rule treats as a missing value."""
    value, field, account = _value(data)
    metadata = _object(value.get("metadata"))
    about = (_texts(metadata.get("phone_number_id")) or (), metadata.get("display_phone_number"), account, field)
    name = next((name for name in LISTS if isinstance(value.get(name), list) and value[name]), None)
    if name is None:
        return WhatsAppNotice("", {}, WhatsAppPerson(), None, *about)
    item, ids = _object(value[name][0]), None
    if name == "history":
        thread = _object(_first(item.get("threads")))
        item = _object(_first(thread.get("messages")))
        ids = {"wa_id": thread.get("id"), **_object(thread.get("context"))}
    person = _person(
        _object(item.get("contact")) if name == "state_sync" else item if ids is None else ids,
        WHO.get(name, PLAIN),
        value.get("contacts"),
    )
    return WhatsAppNotice(_kind(name, item, field), item, person, _group(item), *about)


def _value(data: Any) -> tuple[dict[str, Any], Any, Any]:
    """Return the object that holds the lists, the name of the field, and the id of the business account."""
    if "entry" in data:
        entry = data["entry"][0]
        change = entry["changes"][0]
        return _object(change.get("value")), change.get("field"), entry.get("id")
    if isinstance(data.get("data"), dict):
        return data["data"], data.get("event"), data["data"].get("id")
    return data, None, None


def _kind(name: str, item: dict[str, Any], field: Any) -> str:
    # Media of the history come later, as messages and echoes, which nobody should answer.
    if field == "history":
        return "history"
    return "call" if name == "statuses" and item.get("type") == "call" else LISTS[name]


def _group(item: dict[str, Any]) -> Any:
    return item.get("group_id") or (item.get("recipient_id") if item.get("recipient_type") == "group" else None)


def _person(ids: dict[str, Any], names: Sequence[str], contacts: Any) -> WhatsAppPerson:
    parent, user_id, phone = (ids.get(name) for name in names)
    parent = parent or next((ids[name] for name in PARENTS if ids.get(name)), None)
    contact = _contact(contacts, [one for one in (parent, user_id, phone) if one])
    return WhatsAppPerson(
        parent or contact.get("parent_user_id"), user_id or contact.get("user_id"), phone or contact.get("wa_id")
    )


def _contact(contacts: Any, ids: Sequence[Any]) -> dict[str, Any]:
    """Return the contact with one of these ids; for an item without ids, the only contact."""
    found = [one for one in contacts if isinstance(one, dict)] if isinstance(contacts, list) else []
    if not ids:
        return found[0] if len(found) == 1 else {}
    return next((one for one in found if any(one.get(name) in ids for name in PLAIN)), {})


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list) and value else None


def _texts(*parts: Any) -> tuple[str, ...] | None:
    """Return the parts as texts; None unless all of them exist."""
    found = [text_of(part) for part in parts]
    return tuple(text for text in found if text) if all(found) else None


# -- the rules ---------------------------------------------------------------------------------


def _notice(context: RuleContext) -> WhatsAppNotice:
    if context.memo is None:
        context.memo = read(context.data)
    notice: WhatsAppNotice = context.memo
    return notice


def key(context: RuleContext) -> tuple[str, ...] | None:
    """Return the number and the item's id, and the status where one id has several.

    Sent, delivered, read and failed all carry the message's wamid, so the key includes the status; in a group, the
    member, too. Contacts and preferences have no id: their key is the person, the kind and the time.
    """
    notice = _notice(context)
    item, number = notice.item, notice.number
    if notice.kind in ("message", "echo"):
        return _texts(*number, item.get("id"))
    if notice.kind == "history":  # a placeholder and the picture that replaces it have the same id
        return _texts(*number, "history", item.get("id"), item.get("type"))
    if notice.kind == "status":
        return _texts(*number, item.get("id"), item.get("status"), *_member(item))
    if notice.kind == "call":
        return _texts(*number, item.get("id"), _word(notice))
    if notice.kind in ("state_sync", "user_preference"):
        who, when = _who(notice.person), event_time(context)
        return _texts(*number, notice.kind, who, *filter(None, [item.get("category")]), _word(notice), when)
    return None


def kind(context: RuleContext) -> str | None:
    """Return `message.text`, `status.read`, `call.ringing`, `history.image` …; otherwise the name of the field."""
    notice = _notice(context)
    word = text_of(_word(notice))
    return f"{notice.kind}.{word.lower() if notice.kind == 'call' else word}" if word else text_of(notice.field)


def subject(context: RuleContext) -> tuple[str, ...] | str | None:
    """Return the number and the group, call or person; otherwise the account.

    A person is the parent BSUID, the BSUID or the phone number, whichever is there: the next message may withhold the
    phone number.
    """
    notice = _notice(context)
    about = notice.item.get("id") if notice.kind == "call" else notice.group or _who(notice.person)
    return _texts(*notice.number, about) or text_of(notice.account)


def event_time(context: RuleContext) -> str | None:
    item = _notice(context).item
    return text_of(item.get("timestamp") or _object(item.get("metadata")).get("timestamp"))


def rank(context: RuleContext) -> str | None:
    """Return how far a message has come: with `latest_wins`, a late `delivered` is not processed after `read`."""
    notice = _notice(context)
    return str(STATUSES.index(notice.item["status"])) if notice.kind == "status" else None


def rank_scope(context: RuleContext) -> tuple[str, ...] | None:
    """Return the message, and in a group the member."""
    notice = _notice(context)
    return _texts(notice.item.get("id"), *_member(notice.item)) if notice.kind == "status" else None


def _word(notice: WhatsAppNotice) -> Any:
    item = notice.item
    return item.get(WORDS.get(notice.kind, "type")) or (item.get("status") if notice.kind == "call" else None)


def _who(person: WhatsAppPerson) -> Any:
    return person.parent or person.user_id or person.phone


def _member(item: dict[str, Any]) -> list[Any]:
    return [item[name] for name in MEMBERS if item.get(name)][:1]


_ENVELOPE: Final = (
    '{"object":"whatsapp_business_account","entry":[{"id":"102290129340398","changes":[{"value":'
    '{"messaging_product":"whatsapp","metadata":{"display_phone_number":"15550783881","phone_number_id":"106540352242922"},'
    "%s},"
    '"field":"messages"}]}]}'
)
_CONTACT: Final = '"contacts":[{"profile":{"name":"Ana"},"wa_id":"5511988880142"}]'
_MESSAGE: Final = (
    '{"from":"5511988880142","id":"wamid.{id}%s","timestamp":"{now}","text":{"body":"Ol\\u00e1!"},"type":"text"}'
)
_STATUS: Final = '{"id":"wamid.{id}","status":"%s","timestamp":"{now}","recipient_id":"5511988880142"}'


def _message(kind: str, about: str) -> Sample:
    message = f'{{"from":"5511988880142","id":"wamid.{{id}}","timestamp":"{{now}}","type":"{kind}","{kind}":{about}}}'
    return Sample(_ENVELOPE % f'{_CONTACT},"messages":[{message}]')


PRESET = Preset(
    name="whatsapp-cloud",
    title="WhatsApp Cloud API",
    scheme=_meta.SIGNATURE,
    handshake=_meta.handshake,
    split=split,
    key=key,
    # account_update, template and quality changes have no id.
    on_missing_key="body_hash",
    type=kind,
    subject=subject,
    event_time=event_time,
    preview=[f"{item}.{text}" for item in WRITTEN for text in TEXTS],
    rank=rank,
    rank_scope=rank_scope,
    # Which contacts are included depends on the rest of the batch.
    volatile=("$.entry[*].time", "$.entry[*].changes[*].value.contacts", "$.contacts", "$.data.contacts"),
    horizon="7d",
    keep_keys="30d",
    daily_volume=50,
    volume=("message.*", "echo.*"),
    max_body="4MiB",
    needs=("secret", "verify_token"),
    facts={
        "scheme": "developers.facebook.com/docs/graph-api/webhooks/getting-started",
        "handshake": "developers.facebook.com/docs/graph-api/webhooks/getting-started",
        "split": "developers.facebook.com/documentation/business-messaging/whatsapp/webhooks/overview · "
        "…/reference/history, …/smb_app_state_sync, …/user_preferences · …/whatsapp/calling/reference",
        "key": "developers.facebook.com/documentation/business-messaging/whatsapp/webhooks/reference/messages/status "
        "(payloads; that a wamid is unique is said nowhere)",
        "subject": "developers.facebook.com/documentation/business-messaging/whatsapp/business-scoped-user-ids · "
        "github.com/chatwoot/chatwoot app/jobs/webhooks/whatsapp_events_job.rb (order of ids; calls)",
        "preview": "developers.facebook.com/documentation/business-messaging/whatsapp/webhooks/reference/messages",
        "rank": "unverified",
        "max_body": "developers.facebook.com/documentation/business-messaging/whatsapp/webhooks/overview (3 MB)",
        "horizon": "developers.facebook.com/documentation/business-messaging/whatsapp/webhooks/overview (7 days)",
        "budget": "docs.360dialog.com/partner/messaging/receiving-messages-via-webhook (under 1 % above 1 s)",
    },
    media_api=_media.MetaMedia(),
    samples={
        "message.text": Sample(_ENVELOPE % (_CONTACT + ',"messages":[' + _MESSAGE % "" + "]")),
        "message.image": _message(
            "image", '{"caption":"The blue one","mime_type":"image/jpeg","sha256":"{id}","id":"{number}"}'
        ),
        "message.audio": _message(
            "audio", '{"mime_type":"audio/ogg; codecs=opus","sha256":"{id}","id":"{number}","voice":true}'
        ),
        "message.document": _message(
            "document", '{"filename":"order.pdf","mime_type":"application/pdf","sha256":"{id}","id":"{number}"}'
        ),
        "message.location": _message("location", '{"latitude":-23.55,"longitude":-46.63,"name":"Casa"}'),
        "message.contacts": _message(
            "contacts",
            '[{"name":{"formatted_name":"Bruno","first_name":"Bruno"},"phones":[{"phone":"+5521977770381"}]}]',
        ),
        "message.interactive": _message(
            "interactive", '{"type":"button_reply","button_reply":{"id":"confirm","title":"Confirmar"}}'
        ),
        "message.reaction": _message("reaction", '{"message_id":"wamid.{number}","emoji":"\\ud83d\\udc4d"}'),
        **{
            f"status.{word}": Sample(_ENVELOPE % ('"statuses":[' + _STATUS % word + "]"))
            for word in ("sent", "delivered", "read")
        },
        "status.failed": Sample(
            _ENVELOPE
            % (
                '"statuses":[{"id":"wamid.{id}","status":"failed","timestamp":"{now}","recipient_id":"5511988880142",'
                '"errors":[{"code":131026,"title":"Message undeliverable"}]}]'
            )
        ),
        "batch": _base.fill(
            _ENVELOPE,
            _CONTACT
            + ',"messages":['
            + ",".join(_MESSAGE % part for part in ("A", "B"))
            + '],"statuses":['
            + ",".join(_STATUS % word for word in ("sent", "delivered", "read"))
            + "]",
        ),
    },
)
