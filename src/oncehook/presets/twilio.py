"""Twilio: forms, signed together with the URL they are posted to; the answer is read as instructions (TwiML).

All its attempts happen within 15 seconds, so we wait for the store rather than answer 503.
"""

from __future__ import annotations

from typing import Final

from oncehook.rules import Rule, RuleContext
from oncehook.sources import Preset, Reply, Sample
from oncehook.verify import Twilio

# queued, sent, delivered: each is called back with the same sid.
MESSAGE: Final = Rule.parse(
    [
        ["form:MessageSid", "form:MessageStatus", "form:ErrorCode"],
        ["form:MessageSid", "form:MessageStatus"],
        "form:MessageSid",
    ]
)
# Only progress callbacks are numbered. A call in progress may ask for instructions any number of times.
CALL: Final = Rule.parse([["form:CallSid", "form:CallStatus", "form:SequenceNumber"]])


def key(context: RuleContext) -> tuple[str, ...] | None:
    """Return the message and its status, or the call and its step; anything else has no key."""
    # Conversations, another product, sends several events about one message: added, updated, removed.
    return None if context.form("EventType") else MESSAGE.read(context) or CALL.read(context)


def kind(context: RuleContext) -> str | None:
    """Return `message.received`, `message.delivered`, `call.completed`; Conversations name their own events."""
    if context.form("EventType"):
        return context.form("EventType")
    if context.form("MessageSid"):
        return f"message.{context.form('MessageStatus') or context.form('SmsStatus') or 'received'}"
    return f"call.{context.form('CallStatus')}" if context.form("CallStatus") else None


FORM: Final = "application/x-www-form-urlencoded; charset=UTF-8"
_ACCOUNT: Final = "AccountSid=AC00000000000000000000000000000042&ApiVersion=2010-04-01"
_NUMBERS: Final = "From=%2B15550100142&To=%2B15550100100"

PRESET = Preset(
    name="twilio",
    title="Twilio",
    scheme=Twilio(),
    needs=("secret", "public_url"),
    key=key,
    on_missing_key="body_hash",
    # The signed text is the fields without separators between names and values.
    key_authenticated=False,
    type=kind,
    preview="form:Body",
    volume=("message.received",),
    subject=["form:MessageSid", "form:CallSid", "form:ConversationSid"],
    # Callbacks may overtake each other.
    rank={
        "of": "form:MessageStatus",
        "order": ["accepted", "scheduled", "queued", "sending", "sent", "delivered", "read"],
    },
    rank_scope="form:MessageSid",
    # An empty answer to an incoming message: do nothing. Our own JSON would be error 12300 in Twilio's log.
    answer=Reply(
        200, b'<?xml version="1.0" encoding="UTF-8"?><Response></Response>', ((b"content-type", b"text/xml"),)
    ),
    horizon="15s",
    keep_keys="30d",
    budget="10s",
    facts={
        "scheme": "github.com/twilio/twilio-python twilio/request_validator.py",
        "key": "twilio.com/docs/usage/webhooks (calls and Conversations unverified)",
        "answer": "twilio.com/docs/api/errors/12300 (unverified)",
        "horizon": "twilio.com/docs/usage/webhooks/webhooks-connection-overrides (15 s in all)",
        "budget": "twilio.com/docs/usage/webhooks/webhooks-connection-overrides (15 s)",
        "rank": "unverified",
    },
    samples={
        "message.received": Sample(
            f"MessageSid=SM{{id}}{{id}}&SmsSid=SM{{id}}{{id}}&SmsMessageSid=SM{{id}}{{id}}&SmsStatus=received"
            f"&NumMedia=0&NumSegments=1&{_NUMBERS}&Body=Ol%C3%A1%21&{_ACCOUNT}",
            content_type=FORM,
        ),
        "message.delivered": Sample(
            f"MessageSid=SM{{id}}{{id}}&MessageStatus=delivered&SmsSid=SM{{id}}{{id}}&SmsStatus=delivered"
            f"&{_NUMBERS}&{_ACCOUNT}",
            content_type=FORM,
        ),
        "call.completed": Sample(
            f"CallSid=CA{{id}}{{id}}&CallStatus=completed&CallDuration=42&SequenceNumber=3"
            f"&CallbackSource=call-progress-events&Direction=outbound-api&{_NUMBERS}&{_ACCOUNT}",
            content_type=FORM,
        ),
    },
)
