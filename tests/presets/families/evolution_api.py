"""Evolution API v2: what its channels hand to `sendDataWebhook`, in the envelope of `webhook.controller.ts` (2.3.6).

The channels are `whatsapp.baileys.service.ts` and `whatsapp.business.service.ts`.
"""

from __future__ import annotations

from typing import Any

from tests.presets.families import HASH, Made, Payload, Said

OWN, ANA = "5511977770100@s.whatsapp.net", "5511988880142@s.whatsapp.net"
NUMBER, MEMBER = "5511988880142", "5511966660177"
LID, GROUP, ID = "258111234567890@lid", "120363025555555555@g.us", "3EB0C767D097B7C7C030"
INSTANCE_ID = "7c1f6a52-0000-4000-8000-000000000001"


def envelope(event: str, data: Any) -> dict[str, Any]:
    return {
        "event": event,
        "instance": "sales",
        "data": data,
        "destination": "https://example.com/in/evolution-api",
        "date_time": "2025-10-21T11:40:39.000Z",
        "sender": OWN,
        "server_url": "https://evolution.example.com",
        "apikey": "B6D711FCDE4D4FD5936544120E713976",
    }


def raw(content: Any, kind: str, **key: Any) -> dict[str, Any]:
    """As `prepareMessage` makes it."""
    return {
        "key": {"remoteJid": ANA, "fromMe": False, "id": ID, **key},
        "pushName": "Ana",
        "status": "DELIVERY_ACK",
        "message": content,
        "messageType": kind,
        "messageTimestamp": 1761046839,
        "instanceId": INSTANCE_ID,
        "source": "android",
    }


def upsert(
    content: Any, kind: str, text: str = "", *, said: Said | None = None, chat: str = ANA, **key: Any
) -> Payload:
    return Payload(
        envelope("messages.upsert", raw(content, kind, remoteJid=chat, **key)),
        [Made("messages.upsert", f"sales:messages.upsert:{ID}", f"sales:{chat}")],
        said or Said(NUMBER, NUMBER, text),
    )


def other(event: str, data: Any, subject: str, *keys: str) -> Payload:
    return Payload(envelope(event, data), [Made(event, key, subject) for key in keys or (HASH,)])


PAYLOADS: dict[str, Payload] = {
    "conversation": upsert({"conversation": "Olá, tudo bem?"}, "conversation", "Olá, tudo bem?"),
    "a reply, as extended text": upsert(
        {"extendedTextMessage": {"text": "Sim", "contextInfo": {"stanzaId": "3EB0A", "participant": OWN}}},
        "extendedTextMessage",
        "Sim",
    ),
    "image": upsert(
        {
            "imageMessage": {
                "url": "https://mmg.whatsapp.net/o1/v/t62.7118-24",
                "mimetype": "image/jpeg",
                "caption": "Este",
            }
        },
        "imageMessage",
        "Este",
    ),
    "video": upsert(
        {"videoMessage": {"mimetype": "video/mp4", "caption": "Veja", "seconds": 12}}, "videoMessage", "Veja"
    ),
    "voice": upsert(
        {"audioMessage": {"mimetype": "audio/ogg; codecs=opus", "seconds": 3, "ptt": True}}, "audioMessage"
    ),
    "document": upsert(
        {"documentMessage": {"fileName": "nota.pdf", "mimetype": "application/pdf", "caption": "A nota"}},
        "documentMessage",
        "A nota",
    ),
    "document with caption, wrapped": upsert(
        {"documentWithCaptionMessage": {"message": {"documentMessage": {"fileName": "nota.pdf", "caption": "A nota"}}}},
        "documentWithCaptionMessage",
        "A nota",
    ),
    "sticker": upsert({"stickerMessage": {"mimetype": "image/webp", "isAnimated": False}}, "stickerMessage"),
    "location": upsert({"locationMessage": {"degreesLatitude": -23.55, "degreesLongitude": -46.63}}, "locationMessage"),
    "contact": upsert({"contactMessage": {"displayName": "Rui", "vcard": "BEGIN:VCARD"}}, "contactMessage"),
    "reaction": upsert(
        {"reactionMessage": {"key": {"remoteJid": ANA, "fromMe": True, "id": "3EB0A"}, "text": "👍"}}, "reactionMessage"
    ),
    "list response": upsert(
        {"listResponseMessage": {"title": "Segunda via", "singleSelectReply": {"selectedRowId": "2"}}},
        "listResponseMessage",
        "Segunda via",
    ),
    "buttons response": upsert(
        {"buttonsResponseMessage": {"selectedButtonId": "1", "selectedDisplayText": "Sim"}},
        "buttonsResponseMessage",
        "Sim",
    ),
    "template button": upsert(
        {"templateButtonReplyMessage": {"selectedId": "1", "selectedDisplayText": "Quero"}},
        "templateButtonReplyMessage",
        "Quero",
    ),
    "ephemeral": upsert(
        {"ephemeralMessage": {"message": {"extendedTextMessage": {"text": "some"}}}}, "ephemeralMessage", "some"
    ),
    "view once": upsert(
        {"viewOnceMessageV2": {"message": {"imageMessage": {"caption": "uma vez"}}}}, "viewOnceMessageV2", "uma vez"
    ),
    "hidden number": upsert(
        {"conversation": "Oi"},
        "conversation",
        said=Said(NUMBER, NUMBER, "Oi"),
        chat=LID,
        remoteJidAlt=ANA,
        addressingMode="lid",
    ),
    "hidden number, and no other": upsert({"conversation": "Oi"}, "conversation", said=Said(LID, LID, "Oi"), chat=LID),
    "in a group": upsert(
        {"conversation": "Bom dia"},
        "conversation",
        said=Said(GROUP, MEMBER, "Bom dia"),
        chat=GROUP,
        participant=f"{MEMBER}@s.whatsapp.net",
    ),
    "in a group, hidden": upsert(
        {"conversation": "Bom dia"},
        "conversation",
        said=Said(GROUP, MEMBER, "Bom dia"),
        chat=GROUP,
        participant=LID,
        participantAlt=f"{MEMBER}@s.whatsapp.net",
        addressingMode="lid",
    ),
    "written on the phone": upsert(
        {"conversation": "Já vai"}, "conversation", said=Said(NUMBER, "5511977770100", "Já vai", True), fromMe=True
    ),
    "status of a friend": upsert(
        {"conversation": "Praia"},
        "conversation",
        said=Said("status@broadcast", MEMBER, "Praia"),
        chat="status@broadcast",
        participant=f"{MEMBER}@s.whatsapp.net",
    ),
    "over Meta, a button": Payload(
        envelope(
            "messages.upsert",
            {
                "key": {"id": "wamid.HBgM", "remoteJid": NUMBER, "fromMe": False},
                "pushName": "Ana",
                "message": {"conversation": "Yes this is a button"},
                "messageType": "buttonMessage",
                "messageTimestamp": 1633034394,
                "source": "unknown",
                "instanceId": INSTANCE_ID,
            },
        ),
        [Made("messages.upsert", "sales:messages.upsert:wamid.HBgM", f"sales:{NUMBER}")],
        Said(NUMBER, NUMBER, "Yes this is a button"),
    ),
    "sent over the API": Payload(
        envelope("send.message", raw({"conversation": "On its way"}, "conversation", fromMe=True)),
        [Made("send.message", f"sales:send.message:{ID}", f"sales:{ANA}")],
        Said(NUMBER, "5511977770100", "On its way", True),
    ),
    "history": Payload(
        envelope(
            "messages.set",
            [raw({"conversation": text}, "conversation", id=one) for one, text in (("A", "Oi"), ("B", "Olá"))],
        ),
        [Made("messages.set", f"sales:messages.set:{one}", f"sales:{ANA}") for one in "AB"],
    ),
    "edited": Payload(
        envelope(
            "messages.edited",
            {
                "key": {"remoteJid": ANA, "fromMe": False, "id": ID},
                "type": "MESSAGE_EDIT",
                "editedMessage": {"conversation": "Olá, tudo certo?"},
                "timestampMs": "1761046899000",
            },
        ),
        [Made("messages.edited", HASH, f"sales:{ANA}")],
        Said(NUMBER, NUMBER, "Olá, tudo certo?"),
    ),
    "read": other(
        "messages.update",
        {
            "keyId": ID,
            "remoteJid": ANA,
            "fromMe": True,
            "status": "READ",
            "instanceId": INSTANCE_ID,
            "messageId": "cmh0",
        },
        f"sales:{ANA}",
        f"sales:messages.update:{ID}:READ",
    ),
    "read in a group": other(
        "messages.update",
        {
            "keyId": ID,
            "remoteJid": GROUP,
            "fromMe": True,
            "participant": ANA,
            "status": "READ",
            "instanceId": INSTANCE_ID,
        },
        f"sales:{GROUP}",
        f"sales:messages.update:{ID}:READ:{ANA}",
    ),
    "deleted by them": other(
        "messages.delete", {"remoteJid": ANA, "fromMe": False, "id": ID}, f"sales:{ANA}", f"sales:messages.delete:{ID}"
    ),
    "connection": other("connection.update", {"instance": "sales", "state": "open", "statusReason": 200}, "sales"),
    "qr code": other(
        "qrcode.updated",
        {"qrcode": {"instance": "sales", "pairingCode": None, "code": "2@x", "base64": "data:"}},
        "sales",
    ),
    "presence": other("presence.update", {"id": ANA, "presences": {ANA: {"lastKnownPresence": "composing"}}}, "sales"),
    "call": other("call", {"chatId": ANA, "from": ANA, "id": "C1", "status": "offer", "isVideo": False}, "sales"),
    "labels": other("labels.association", {"instance": "sales", "type": "add", "chatId": ANA, "labelId": "5"}, "sales"),
    "chats deleted": Payload(
        envelope("chats.delete", [ANA, GROUP]), [Made("chats.delete", HASH, f"sales:{one}") for one in (ANA, GROUP)]
    ),
    "members": other(
        "group-participants.update",
        {
            "id": GROUP,
            "participants": [LID],
            "action": "add",
            "participantsData": [{"jid": LID, "phoneNumber": f"{MEMBER}@s.whatsapp.net"}],
        },
        "sales",
    ),
}
