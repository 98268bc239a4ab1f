"""WhatsApp Cloud API (Meta): up to 1000 messages and statuses in one request, retried for seven days.

A retry goes to all apps of the business account, so somebody else's failure brings us duplicates. Anything but 200
counts as failed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from oncehook.model import Arrival
from oncehook.presets import _meta
from oncehook.sources import Odd, Preset, Sample

VALUE: Final = "$.entry[0].changes[0].value"
NUMBER: Final = f"{VALUE}.metadata.phone_number_id"
MESSAGE: Final = f"{VALUE}.messages[0]"
STATUS: Final = f"{VALUE}.statuses[0]"
# What the business itself writes on its phone, where app and API share a number.
ECHO: Final = f"{VALUE}.message_echoes[0]"
LISTS: Final = ("messages", "statuses", "message_echoes")
# Who an item is about. People with a username may have no phone number to show, only an id of their own.
PEOPLE: Final = ("from", "from_user_id", "to", "to_user_id", "recipient_id", "recipient_user_id")
MEMBERS: Final = ("recipient_participant_id", "recipient_participant_user_id")


def split(data: Any, arrival: Arrival) -> Iterator[Any]:
    """Each message and each status is an event of its own, with the metadata and the contact it belongs to."""
    return _documents(data)


def _changes(change: Any) -> Iterator[Any]:
    value = change.get("value") if isinstance(change, dict) else None
    parts = list(_meta.one_of(value, LISTS)) if isinstance(value, dict) else []
    for part in parts:
        yield Odd({**change, "value": part.part}) if isinstance(part, Odd) else {**change, "value": _theirs(part)}
    if not parts:  # account, template and quality changes are one event each
        yield change if isinstance(change, dict) else Odd(change)


_documents: Final = _meta.each("entry", _meta.each("changes", _changes))


def _theirs(value: dict[str, Any]) -> dict[str, Any]:
    """Of all contacts in the batch, those of this item: the others are none of its business, and would multiply."""
    contacts = value.get("contacts")
    if not isinstance(contacts, list) or len(contacts) < 2:
        return value
    item = next(value[name][0] for name in LISTS if name in value)
    ids = [item[name] for name in (*PEOPLE, *MEMBERS) if item.get(name)]
    known = [
        one for one in contacts if isinstance(one, dict) and (one.get("wa_id") in ids or one.get("user_id") in ids)
    ]
    return {**value, "contacts": known}


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

PRESET = Preset(
    name="whatsapp-cloud",
    title="WhatsApp Cloud API",
    scheme=_meta.SIGNATURE,
    handshake=_meta.handshake,
    split=split,
    # Sent, delivered, read and failed all carry the wamid of the message: only with the status is it one event.
    # In a group every member has a status of their own.
    key=[
        [NUMBER, f"{MESSAGE}.id"],
        *[[NUMBER, f"{STATUS}.id", f"{STATUS}.status", f"{STATUS}.{member}"] for member in MEMBERS],
        [NUMBER, f"{STATUS}.id", f"{STATUS}.status"],
        [NUMBER, f"{ECHO}.id"],
    ],
    # account_update, template and quality changes have no id.
    on_missing_key="body_hash",
    type=[
        ["literal:message", f"{MESSAGE}.type"],
        ["literal:status", f"{STATUS}.status"],
        ["literal:echo", f"{ECHO}.type"],
        "$.entry[0].changes[0].field",
    ],
    subject=[
        [NUMBER, f"{MESSAGE}.from"],
        [NUMBER, f"{MESSAGE}.from_user_id"],
        [NUMBER, f"{STATUS}.recipient_id"],
        [NUMBER, f"{STATUS}.recipient_user_id"],
        [NUMBER, f"{ECHO}.to"],
        [NUMBER, f"{ECHO}.to_user_id"],
        "$.entry[0].id",
    ],
    event_time=[f"{MESSAGE}.timestamp", f"{STATUS}.timestamp", f"{ECHO}.timestamp"],
    # Statuses may overtake each other: with `latest_wins`, delivered never comes after read.
    rank={"of": f"{STATUS}.status", "order": ["sent", "delivered", "read"]},
    rank_scope=[*[[f"{STATUS}.id", f"{STATUS}.{member}"] for member in MEMBERS], f"{STATUS}.id"],
    # Which contacts come along depends on what else is in the batch.
    volatile=("$.entry[*].time", "$.entry[*].changes[*].value.contacts"),
    horizon="7d",
    keep_keys="30d",
    daily_volume=50,
    max_body="4MiB",
    needs=("secret", "verify_token"),
    facts={
        "scheme": "developers.facebook.com/docs/graph-api/webhooks/getting-started",
        "handshake": "developers.facebook.com/docs/graph-api/webhooks/getting-started",
        "split": "developers.facebook.com/documentation/business-messaging/whatsapp/webhooks/overview",
        "key": "developers.facebook.com/documentation/business-messaging/whatsapp/webhooks/reference/messages/status "
        "(payloads; that a wamid is unique is said nowhere)",
        "subject": "developers.facebook.com/documentation/business-messaging/whatsapp/business-scoped-user-ids",
        "rank": "unverified",
        "max_body": "developers.facebook.com/documentation/business-messaging/whatsapp/webhooks/overview (3 MB)",
        "horizon": "developers.facebook.com/documentation/business-messaging/whatsapp/webhooks/overview (7 days)",
        "budget": "docs.360dialog.com/partner/messaging/receiving-messages-via-webhook (under 1 % above 1 s)",
    },
    samples={
        "message.text": Sample(_ENVELOPE % (_CONTACT + ',"messages":[' + _MESSAGE % "" + "]")),
        "status.delivered": Sample(_ENVELOPE % ('"statuses":[' + _STATUS % "delivered" + "]")),
        "batch": Sample(
            _ENVELOPE
            % (
                _CONTACT
                + ',"messages":['
                + ",".join(_MESSAGE % part for part in ("A", "B"))
                + '],"statuses":['
                + ",".join(_STATUS % word for word in ("sent", "delivered", "read"))
                + "]"
            )
        ),
    },
)
