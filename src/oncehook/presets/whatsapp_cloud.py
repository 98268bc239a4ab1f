"""WhatsApp Cloud API (Meta): up to 1000 messages and statuses in one request, retried for seven days.

A retry goes to all apps of the business account, so somebody else's failure brings us duplicates. Anything but 200
counts as failed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from oncehook.model import Arrival
from oncehook.presets import _meta
from oncehook.sources import Preset, Sample

VALUE: Final = "$.entry[0].changes[0].value"
NUMBER: Final = f"{VALUE}.metadata.phone_number_id"
MESSAGE: Final = f"{VALUE}.messages[0]"
STATUS: Final = f"{VALUE}.statuses[0]"


def split(data: Any, arrival: Arrival) -> Iterable[Any]:
    """Each message and each status is an event of its own, with the metadata and the contact it belongs to."""
    for part in _meta.one_of_each(data, ("messages", "statuses")):
        value = part["entry"][0]["changes"][0].get("value")
        if isinstance(value, dict) and value.get("messages") and len(value.get("contacts") or ()) > 1:
            sender = value["messages"][0].get("from")
            theirs = [contact for contact in value["contacts"] if contact.get("wa_id") == sender]
            value["contacts"] = theirs or value["contacts"]
        yield part


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
    key=[[NUMBER, f"{MESSAGE}.id"], [NUMBER, f"{STATUS}.id", f"{STATUS}.status"]],
    # account_update, template and quality changes have no id.
    on_missing_key="body_hash",
    type=[
        ["literal:message", f"{MESSAGE}.type"],
        ["literal:status", f"{STATUS}.status"],
        "$.entry[0].changes[0].field",
    ],
    subject=[[NUMBER, f"{MESSAGE}.from"], [NUMBER, f"{STATUS}.recipient_id"], "$.entry[0].id"],
    event_time=[f"{MESSAGE}.timestamp", f"{STATUS}.timestamp"],
    # Statuses may overtake each other: with `latest_wins`, delivered never comes after read.
    rank={"of": f"{STATUS}.status", "order": ["sent", "delivered", "read"]},
    rank_scope=f"{STATUS}.id",
    # Which contacts come along depends on what else is in the batch.
    volatile=("$.entry[*].time", "$.entry[*].changes[*].value.contacts"),
    horizon="7d",
    keep_keys="30d",
    max_body="4MiB",
    needs=("secret", "verify_token"),
    facts={
        "scheme": "developers.facebook.com/docs/graph-api/webhooks/getting-started",
        "handshake": "developers.facebook.com/docs/graph-api/webhooks/getting-started",
        "split": "developers.facebook.com/documentation/business-messaging/whatsapp/webhooks/overview",
        "max_body": "developers.facebook.com/documentation/business-messaging/whatsapp/webhooks/overview (3 MB)",
        "horizon": "developers.facebook.com/documentation/business-messaging/whatsapp/webhooks/overview (7 days)",
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
