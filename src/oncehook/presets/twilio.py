"""Twilio: forms, signed together with the URL they are posted to; the answer is read as instructions (TwiML).

All its attempts happen within 15 seconds, so we wait for the store rather than answer 503.
"""

from __future__ import annotations

from typing import Final

from oncehook.presets import _media
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


def _form(about: str) -> Sample:
    return Sample(f"{about}&{_NUMBERS}&{_ACCOUNT}", content_type=FORM)


def _message(status: str, more: str = "") -> Sample:
    return _form(f"MessageSid=SM{{id}}{{id}}&MessageStatus={status}&SmsSid=SM{{id}}{{id}}&SmsStatus={status}{more}")


def _call(status: str, step: int, more: str = "") -> Sample:
    return _form(
        f"CallSid=CA{{id}}{{id}}&CallStatus={status}&SequenceNumber={step}"
        f"&CallbackSource=call-progress-events&Direction=outbound-api{more}"
    )


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
    media_api=_media.TwilioMedia(),
    samples={
        "message.received": _form(
            "MessageSid=SM{id}{id}&SmsSid=SM{id}{id}&SmsMessageSid=SM{id}{id}&SmsStatus=received"
            "&NumMedia=0&NumSegments=1&Body=Ol%C3%A1%21"
        ),
        **{f"message.{status}": _message(status) for status in ("queued", "sent", "delivered", "read")},
        "message.undelivered": _message("undelivered", "&ErrorCode=30003"),
        "message.failed": _message("failed", "&ErrorCode=30008"),
        "call.initiated": _call("initiated", 0),
        "call.ringing": _call("ringing", 1),
        "call.in-progress": _call("in-progress", 2),
        "call.completed": _call("completed", 3, "&CallDuration=42"),
        "call.no-answer": _call("no-answer", 3),
    },
)
