"""WAHA: a WhatsApp bridge that signs its hooks with HMAC-SHA512 once it is given a key, and repeats them 15 times.

Older versions have neither signature nor event id; there the message's own id makes the key.
"""

from __future__ import annotations

from typing import Final

from oncehook.presets import _base, _media
from oncehook.rules import Rule, RuleContext
from oncehook.sources import Preset, Sample
from oncehook.verify import Hmac

EVENT: Final = Rule.parse("$.id")
MESSAGE: Final = Rule.parse([["$.session", "$.event", "$.payload.id"]])
# One message is acknowledged several times, in a group by several people.
ACK: Final = Rule.parse(
    [
        ["$.session", "$.event", "$.payload.id", "$.payload.ack", "$.payload.participant"],
        ["$.session", "$.event", "$.payload.id", "$.payload.ack"],
    ]
)


def key(context: RuleContext) -> tuple[str, ...] | None:
    """Return the event's id; in versions without one, the message's."""
    event = context.data["event"]
    rule = ACK if event.startswith("message.ack") else MESSAGE if event.startswith("message") else None
    return EVENT.read(context) or (rule.read(context) if rule else None)


def subject(context: RuleContext) -> tuple[str, ...]:
    """Return the session and the chat, which is in the message's id: `true_5511988880142@c.us_3EB0…`."""
    session, payload = context.data["session"], context.data["payload"]
    parts = str(payload.get("id") or "").split("_")
    chat = parts[1] if len(parts) > 2 and "@" in parts[1] else payload.get("from")
    return (session, chat) if chat else (session,)


def rank(context: RuleContext) -> str | None:
    """Return the rank of an acknowledgement. A message has one too, which must not outrank the next message's."""
    return str(context.data["payload"]["ack"]) if context.data["event"].startswith("message.ack") else None


_ENVELOPE: Final = (
    '{"id":"evt_{id}","timestamp":{now_ms},"event":"%s","session":"default","engine":"NOWEB",'
    '"me":{"id":"5511977770100@c.us","pushName":"Sales"},"payload":%s}'
)

PRESET = Preset(
    name="waha",
    title="WAHA",
    # A header names the algorithm, too; it is ignored, because a forger could choose it.
    scheme=Hmac(header="X-Webhook-Hmac", algorithm="sha512"),
    key=key,
    # session.status and the like, in versions without event ids: the same body within a short time is the same event.
    on_missing_key="body_hash:10m",
    type="$.event",
    subject=subject,
    event_time=["$.payload.timestamp", "$.timestamp"],
    preview="$.payload.body",
    rank=rank,
    rank_scope=[["$.session", "$.payload.id", "$.payload.participant"], ["$.session", "$.payload.id"]],
    horizon="30s",
    keep_keys="30d",
    daily_volume=50,
    # With both events subscribed, a person's message comes as both, and counts twice.
    volume=("message", "message.any"),
    max_body="4MiB",
    budget="2s",
    facts={
        "scheme": "waha.devlike.pro/docs/how-to/events",
        "key": "github.com/devlikeapro/waha src/core/webhooks.core.ts (payload; the event's id unverified)",
        "subject": "waha.devlike.pro/docs/how-to/receive-messages (the chat inside the message's id unverified)",
        "volume": "waha.devlike.pro/docs/how-to/events",
        "rank": "waha.devlike.pro/docs/how-to/events",
        "horizon": "waha.devlike.pro/docs/how-to/events (15 attempts, 2 s apart, by default)",
        "budget": "unverified",
        "max_body": "unverified",
    },
    media_api=_media.WahaMedia(),
    samples={
        "message": _base.fill(
            _ENVELOPE,
            "message",
            '{"id":"false_5511988880142@c.us_3EB0{id}","timestamp":{now},"from":"5511988880142@c.us",'
            '"fromMe":false,"to":"5511977770100@c.us","body":"Olá, tudo bem?","hasMedia":false,"ack":1,'
            '"ackName":"SERVER"}',
        ),
        "message.ack": _base.fill(
            _ENVELOPE,
            "message.ack",
            '{"id":"true_5511988880142@c.us_3EB0{id}","from":"5511988880142@c.us","fromMe":true,'
            '"participant":null,"ack":3,"ackName":"READ"}',
        ),
        "session.status": Sample(_ENVELOPE % ("session.status", '{"status":"WORKING"}')),
    },
)
