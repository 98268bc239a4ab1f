"""Evolution API v2: a WhatsApp bridge that signs nothing; a JWT or a fixed header says who sends, not what.

Its JWT is made once, lasts ten minutes, and is reused by retries that go on for twenty-five; a 401 is final. So an
expired one is accepted for an hour. Global and instance webhooks send the same event twice, which is stored once.
"""

from __future__ import annotations

from typing import Final

from oncehook.payload import BodyHash
from oncehook.presets import _base, _media
from oncehook.rules import Rule, RuleContext
from oncehook.sources import Preset, Sample, split_at
from oncehook.verify import Either, Jwt, Token

# The global webhook sends no header at all; the instance's token in the body, where that is enabled, is the only proof.
SCHEME: Final = Either(
    Jwt(leeway=3600.0, claims={"app": "evolution", "action": "webhook"}),
    Token(place="header:Authorization", prefix="Bearer "),
    Token(place="body:apikey"),
    every=True,
)

MESSAGE: Final = Rule.parse([["$.instance", "$.event", "$.data.key.id"], ["$.instance", "$.event", "$.data[0].key.id"]])
RULES: Final = {
    "messages.upsert": MESSAGE,
    "messages.set": MESSAGE,
    "send.message": MESSAGE,
    "messages.update": Rule.parse(
        [
            ["$.instance", "$.event", "$.data.keyId", "$.data.status", "$.data.participant"],
            ["$.instance", "$.event", "$.data.keyId", "$.data.status"],
        ]
    ),
    # What was deleted through the API has the database's id in `data.id`, and WhatsApp's in `data.key.id`.
    "messages.delete": Rule.parse([["$.instance", "$.event", "$.data.key.id"], ["$.instance", "$.event", "$.data.id"]]),
}
# Places of the text that a person wrote, by kind of message: names of the protocol, which both Evolutions keep.
TEXTS: Final = (
    "conversation",
    "extendedTextMessage.text",
    "imageMessage.caption",
    "videoMessage.caption",
    "documentMessage.caption",
    "documentWithCaptionMessage.message.documentMessage.caption",
    "listResponseMessage.title",
    "buttonsResponseMessage.selectedDisplayText",
    "templateButtonReplyMessage.selectedDisplayText",
    "reactionMessage.text",
)
ACKS: Final = ("PENDING", "SERVER_ACK", "DELIVERY_ACK", "READ", "PLAYED")

# The time of emission is the same for all attempts and both webhooks, and tells equal events apart.
EMISSION: Final = BodyHash(["$.destination", "$.apikey"])
CONTENT: Final = BodyHash(["$.destination", "$.apikey", "$.date_time"])


def key(context: RuleContext) -> tuple[str, ...] | None:
    """Return the message's id, or a hash of the event's content."""
    instance, event = context.data["instance"], context.data["event"]
    rule = RULES.get(event)
    if rule is not None and (found := rule.read(context)) is not None:
        return found
    # An edit has the id of the message that it changes, so only its content tells it from the next edit.
    content = CONTENT if event == "messages.edited" else EMISSION
    return instance, event, content(context.body, context.data).hex()


def rank(context: RuleContext) -> str | None:
    """Return the rank of a status. A message has a status too, which must not outrank the next message's."""
    status = context.data["data"]["status"] if context.data["event"] == "messages.update" else None
    return str(ACKS.index(status)) if status else None


_ENVELOPE: Final = (
    '{"event":"%s","instance":"sales","data":%s,"destination":"https://example.com/in/evolution-api",'
    '"date_time":"{now_iso}","sender":"5511977770100@s.whatsapp.net","server_url":"https://evolution.example.com",'
    '"apikey":null}'
)
_CODE: Final = "github.com/EvolutionAPI/evolution-api src/api"
_JID: Final = "5511988880142@s.whatsapp.net"

PRESET = Preset(
    name="evolution-api",
    title="Evolution API",
    scheme=SCHEME,
    body_authenticated=False,
    key_authenticated=False,
    # messages.set, chats.*, contacts.* and groups.* carry arrays.
    split=split_at("$.data"),
    key=key,
    on_missing_key="body_hash",
    type="$.event",
    subject=[
        ["$.instance", "$.data.key.remoteJid"],
        ["$.instance", "$.data.remoteJid"],
        ["$.instance", "$.data[0].key.remoteJid"],
        ["$.instance", "$.data[0].remoteJid"],
        ["$.instance", "$.data[0]"],  # chats.delete lists the chats themselves
        "$.instance",
    ],
    # Not date_time: that is local time, written as if it were UTC.
    event_time=["$.data.messageTimestamp", "$.data[0].messageTimestamp"],
    preview=[f"{data}.message.{text}" for data in ("$.data", "$.data[0]") for text in TEXTS],
    rank=rank,
    rank_scope=[["$.instance", "$.data.keyId"]],
    # A reconnect sends the same message again with another time, and each webhook names its own destination.
    volatile=("$.destination", "$.date_time", "$.apikey"),
    redact=("$.apikey",),
    horizon="25m",
    keep_keys="30d",
    daily_volume=50,
    volume=("messages.upsert", "send.message"),
    # With base64 on, a message contains its media: up to 16 MB, and a third more in base64.
    max_body="24MiB",
    budget="5s",
    facts={
        "scheme": f"{_CODE}/integrations/event/webhook/webhook.controller.ts (2.3.6)",
        "tolerance": f"{_CODE}/integrations/event/webhook/webhook.controller.ts (the token is made before the retries)",
        "key": f"{_CODE}/integrations/channel/whatsapp/whatsapp.baileys.service.ts",
        "split": f"{_CODE}/integrations/channel/whatsapp/whatsapp.baileys.service.ts",
        "event_time": f"{_CODE}/services/channel.service.ts",
        "redact": f"{_CODE}/services/channel.service.ts",
        "horizon": f"{_CODE}/integrations/event/webhook/webhook.controller.ts (10 attempts; reconnects unverified)",
        "budget": f"{_CODE}/integrations/event/webhook/webhook.controller.ts (30 s)",
        "preview": f"{_CODE}/integrations/chatbot/chatwoot/services/chatwoot.service.ts (getTypeMessage)",
        "volume": f"{_CODE}/types/wa.types.ts (Events)",
        "rank": "github.com/WhiskeySockets/Baileys WAMessageStatus",
        "max_body": "unverified (from WhatsApp's 16 MB for media)",
    },
    media_api=_media.EvolutionMedia(),
    samples={
        "messages.upsert": _base.fill(
            _ENVELOPE,
            "messages.upsert",
            '{"key":{"remoteJid":"' + _JID + '","fromMe":false,"id":"3EB0{id}"},"pushName":"Ana",'
            '"status":"DELIVERY_ACK","message":{"conversation":"Olá, tudo bem?"},"messageType":"conversation",'
            '"messageTimestamp":{now},"instanceId":"7c1f6a52-0000-4000-8000-000000000001","source":"android"}',
        ),
        "messages.update": _base.fill(
            _ENVELOPE,
            "messages.update",
            '{"keyId":"3EB0{id}","remoteJid":"' + _JID + '","fromMe":true,"status":"READ",'
            '"instanceId":"7c1f6a52-0000-4000-8000-000000000001"}',
        ),
        "connection.update": Sample(
            _ENVELOPE % ("connection.update", '{"instance":"sales","state":"open","statusReason":200}')
        ),
        "batch": _base.fill(
            _ENVELOPE,
            "contacts.upsert",
            '[{"remoteJid":"' + _JID + '","pushName":"Ana"},'
            '{"remoteJid":"5511966660177@s.whatsapp.net","pushName":"Rui"}]',
        ),
    },
)
