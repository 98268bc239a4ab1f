"""Evolution Go: what `whatsmeow.go` and `send_service.go` post (89eaae3), and edits as `events-system.md` tells.

The fields are those of whatsmeow's `types/message.go` and `types/events/events.go`.
"""

from __future__ import annotations

from typing import Any

from tests.presets.families import HASH, Made, Payload, Said

ANA, NUMBER, MEMBER = "5511988880142@s.whatsapp.net", "5511988880142", "5511966660177"
OWN, LID, GROUP = "5511977770100:12@s.whatsapp.net", "258111234567890@lid", "120363025555555555@g.us"
CHANNEL, ID, INSTANCE = "120363144038483540@newsletter", "3EB0C5A277F7F9B6C599", "0d9d2c1e-0000-4000-8000-000000000001"
AT = "2026-03-25T22:27:23Z"


def envelope(event: str, data: Any, **more: Any) -> dict[str, Any]:
    token = "canary-5f1c9a77e2"  # what the tests' source knows
    return {
        "event": event,
        "data": data,
        "instanceToken": token,
        "instanceId": INSTANCE,
        "instanceName": "sales",
        **more,
    }


def info(**fields: Any) -> dict[str, Any]:
    known = {
        "Chat": ANA,
        "Sender": ANA,
        "IsFromMe": False,
        "IsGroup": False,
        "AddressingMode": "pn",
        "SenderAlt": LID,
        "RecipientAlt": "",
        "BroadcastListOwner": "",
        "ID": ID,
        "ServerID": 0,
        "Type": "text",
        "PushName": "Ana",
        "Timestamp": AT,
        "Category": "",
        "Multicast": False,
        "MediaType": "",
        "Edit": "",
    }
    return {**known, **fields}


def message(
    content: Any, text: str = "", said: Said | None = None, flags: dict[str, Any] | None = None, **about: Any
) -> Payload:
    data = {"Info": info(**about), "Message": content, "IsEphemeral": False, "IsViewOnce": False, "IsEdit": False}
    return Payload(
        envelope("Message", {**data, **(flags or {})}),
        [Made("Message", f"{INSTANCE}:Message:{ID}", f"{INSTANCE}:{data['Info']['Chat']}")],
        said or Said(NUMBER, NUMBER, text),
    )


def receipt(state: str, *ids: str, chat: str = ANA, sender: str = ANA) -> Payload:
    data = {
        "Chat": chat,
        "Sender": sender,
        "IsFromMe": False,
        "IsGroup": chat == GROUP,
        "MessageIDs": list(ids),
        "Timestamp": AT,
    }
    return Payload(
        envelope("Receipt", {**data, "Type": state.lower()}, state=state),
        [Made("Receipt", f"{INSTANCE}:{one}:{state}:{sender}", f"{INSTANCE}:{chat}") for one in ids],
    )


def other(event: str, data: Any, subject: str = "", **more: Any) -> Payload:
    return Payload(envelope(event, data, **more), [Made(event, HASH, f"{INSTANCE}:{subject}" if subject else INSTANCE)])


CALL = {"From": ANA, "Timestamp": AT, "CallCreator": ANA, "CallID": "A1B2", "GroupJID": ""}

PAYLOADS: dict[str, Payload] = {
    "conversation": message({"conversation": "Olá!"}, "Olá!"),
    "extended text": message({"extendedTextMessage": {"text": "Veja https://example.com"}}, "Veja https://example.com"),
    "image": message(
        {"imageMessage": {"URL": "https://mmg.whatsapp.net/x", "mimetype": "image/jpeg", "caption": "Este"}},
        "Este",
        Type="media",
        MediaType="image",
    ),
    "video": message(
        {"videoMessage": {"mimetype": "video/mp4", "caption": "Veja"}}, "Veja", Type="media", MediaType="video"
    ),
    "voice": message(
        {"audioMessage": {"mimetype": "audio/ogg; codecs=opus", "PTT": True}}, Type="media", MediaType="ptt"
    ),
    "document": message(
        {"documentMessage": {"fileName": "nota.pdf", "caption": "A nota"}},
        "A nota",
        flags={"IsDocumentWithCaption": True},
        Type="media",
        MediaType="document",
    ),
    "sticker": message({"stickerMessage": {"mimetype": "image/webp"}}, Type="media", MediaType="sticker"),
    "location": message({"locationMessage": {"degreesLatitude": -23.55, "degreesLongitude": -46.63}}, Type="media"),
    "contact": message(
        {"contactMessage": {"displayName": "Rui", "vcard": "BEGIN:VCARD"}}, Type="media", MediaType="vcard"
    ),
    "reaction": message({"reactionMessage": {"key": {"remoteJID": ANA, "ID": "3EB0A"}, "text": "👍"}}, Type="reaction"),
    "buttons response": message({"buttonsResponseMessage": {"Response": {"SelectedDisplayText": "Sim"}}}, "Sim"),
    "list response": message({"listResponseMessage": {"title": "Segunda via"}}, "Segunda via"),
    "interactive response": message({"interactiveResponseMessage": {"body": {"text": "Quero"}}}, "Quero"),
    "hidden number": message({"conversation": "Oi"}, "Oi", Chat=LID, Sender=LID, SenderAlt=ANA, AddressingMode="lid"),
    "hidden number, and no other": message(
        {"conversation": "Oi"}, said=Said(LID, LID, "Oi"), Chat=LID, Sender=LID, SenderAlt="", AddressingMode="lid"
    ),
    "in a group": message(
        {"conversation": "Bom dia"},
        said=Said(GROUP, MEMBER, "Bom dia"),
        Chat=GROUP,
        Sender=f"{MEMBER}@s.whatsapp.net",
        IsGroup=True,
    ),
    "written on the phone": message(
        {"conversation": "Já vai"}, said=Said(NUMBER, "5511977770100", "Já vai", True), Sender=OWN, IsFromMe=True
    ),
    "view once that could not be read": Payload(
        envelope(
            "Message", {"Info": info(), "IsUnavailable": True, "UnavailableType": "view_once", "DecryptFailMode": ""}
        ),
        [Made("Message", f"{INSTANCE}:Message:{ID}", f"{INSTANCE}:{ANA}")],
        Said(NUMBER, NUMBER, ""),
    ),
    "edited": message(
        {
            "protocolMessage": {
                "key": {"remoteJID": ANA, "ID": "3EB0ORIGINAL"},
                "type": 14,
                "typeName": "MESSAGE_EDIT",
                "editedMessage": {"conversation": "Olá, de novo!"},
            }
        },
        "Olá, de novo!",
        flags={"IsEdit": True, "messageType": "edit"},
    ),
    "deleted": message(
        {"protocolMessage": {"key": {"remoteJID": ANA, "ID": "3EB0ORIGINAL"}, "type": 0, "typeName": "REVOKE"}},
        flags={"IsRevoke": True, "messageType": "revoke"},
    ),
    "edited in a channel": Payload(
        envelope(
            "Message",
            {
                "Info": info(Chat=CHANNEL, Sender=CHANNEL, SenderAlt=""),
                "Message": {"conversation": "Novo horário"},
                "NewsletterMeta": {"EditTS": "2026-03-25T22:30:00Z", "OriginalTS": AT},
            },
        ),
        [Made("Message", f"{INSTANCE}:Message:{ID}:2026-03-25T22\\:30\\:00Z", f"{INSTANCE}:{CHANNEL}")],
        Said(CHANNEL, CHANNEL, "Novo horário"),
    ),
    "sent over the API": Payload(
        envelope(
            "SendMessage",
            {
                "Info": info(Sender=OWN, IsFromMe=True, SenderAlt="", Type="ExtendedTextMessage"),
                "Message": {"extendedTextMessage": {"text": "On its way"}},
                "MessageContextInfo": {"stanzaID": "", "participant": "", "quotedMessage": {"conversation": ""}},
            },
        ),
        [Made("SendMessage", f"{INSTANCE}:SendMessage:{ID}", f"{INSTANCE}:{ANA}")],
        Said(NUMBER, "5511977770100", "On its way", True),
    ),
    "delivered": receipt("Delivered", ID),
    "read, several": receipt("Read", "3EB0A", "3EB0B", "3EB0C"),
    "read in a group": receipt("Read", ID, chat=GROUP, sender=f"{MEMBER}@s.whatsapp.net"),
    "presence": other("Presence", {"From": ANA, "Unavailable": True, "LastSeen": AT}, ANA, state="offline"),
    "typing": other("ChatPresence", {"Chat": ANA, "Sender": ANA, "State": "composing", "Media": ""}, ANA),
    "call": other("CallOffer", {**CALL, "RemotePlatform": "android", "RemoteVersion": "2.26.1"}, ANA),
    "call is over": other("CallTerminate", {**CALL, "Reason": "timeout"}, ANA),
    "connected": other("Connected", {"status": "open", "jid": OWN, "pushName": "Sales"}),
    "paired": other(
        "PairSuccess", {"ID": OWN, "BusinessName": "", "Platform": "android", "status": "open", "pushName": "Sales"}
    ),
    "banned": other(
        "TemporaryBan", {"Code": 101, "Expire": 3600000000000, "reason": "101: you sent too many messages"}
    ),
    "logged out": other(
        "LoggedOut", {"OnConnect": False, "Reason": 401, "reason": "401: logged out from another device"}
    ),
    "qr code": other("QRCode", {"qrcode": "data:image/png;base64,iVBO", "code": "2@x", "count": 1, "maxCount": 5}),
    "name": other("PushName", {"JID": ANA, "OldPushName": "Ana", "NewPushName": "Ana Maria"}, ANA),
    "group": other(
        "GroupInfo", {"JID": GROUP, "Notify": "", "Sender": ANA, "Timestamp": AT, "Name": {"Name": "Suporte"}}, GROUP
    ),
}
