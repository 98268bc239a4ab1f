"""WhatsApp Cloud API: values of the references on developers.facebook.com and of Chatwoot's specs.

The pages are those of messages, status, group, history, calls, smb_app_state_sync, smb_message_echoes, user_preferences
and business-scoped user ids.
"""

from __future__ import annotations

from typing import Any

from tests.presets.families import HASH, Made, Payload, Said

ACCOUNT, NUMBER, BUSINESS = "102290129340398", "106540352242922", "15550783881"
SHEENA, USER, PARENT = "16505551234", "US.13491208655302741918", "US.11815799212886844830"
CHATWOOT_USER, CHATWOOT_PARENT, CHATWOOT_PHONE = "IN.2081978709342942", "IN.ENT.9081726354", "919745786257"
WAMID = "wamid.HBgLMTY1MDM4Nzk0MzkVAgASGBQzQTRBNjU5OUFFRTAzODEwMTQ0RgA="
SENT = "wamid.HBgLMTY1MDM4Nzk0MzkVAgASGBQzQUFERjg0NDEzNDdFODU3MUMxMAA="
GROUP = "Y2FwaV9ncm91cDoxNzA1NTU1MDEzOToxMjAzNjM0MDQ2OTQyMzM4MjAZD"
CALL = "wacid.HBgLMTIxODU1NTI4MjgVAgARGCAyODRQIAFRoA"

METADATA = {"display_phone_number": BUSINESS, "phone_number_id": NUMBER}
CONTACT = {"profile": {"name": "Sheena Nelson"}, "wa_id": SHEENA}


def document(
    field: str | None = "messages", metadata: dict[str, str] | None = METADATA, **value: Any
) -> dict[str, Any]:
    known = {"messaging_product": "whatsapp", "metadata": metadata} if metadata else {}
    change = {"value": {**known, **value}, **({"field": field} if field else {})}
    return {"object": "whatsapp_business_account", "entry": [{"id": ACCOUNT, "changes": [change]}]}


def received(kind: str, content: Any, text: str = "", **more: Any) -> Payload:
    """A message of Sheena's."""
    item = {"from": SHEENA, "id": WAMID, "timestamp": "1744344496", "type": kind, kind: content, **more}
    return Payload(
        document(contacts=[CONTACT], messages=[item]),
        [Made(f"message.{kind}", f"{NUMBER}:{WAMID}", f"{NUMBER}:{SHEENA}")],
        Said(SHEENA, SHEENA, text),
    )


def status(word: str, who: str = SHEENA, *, contacts: Any = None, **fields: Any) -> Payload:
    item = {"id": SENT, "status": word, "timestamp": "1750030073", **fields}
    value = {"statuses": [item]} if contacts is None else {"contacts": contacts, "statuses": [item]}
    return Payload(document(**value), [Made(f"status.{word}", f"{NUMBER}:{SENT}:{word}", f"{NUMBER}:{who}")])


def call(kind: str, field: str = "calls", **fields: Any) -> Payload:
    item = {"id": CALL, "timestamp": "1749196895", **fields}
    word = fields.get("event") or fields["status"]
    return Payload(
        document("calls", **{field: [item]}), [Made(f"call.{kind}", f"{NUMBER}:{CALL}:{word}", f"{NUMBER}:{CALL}")]
    )


def preference(value: str) -> Payload:
    detail = f"User requested to {value} marketing messages"
    item = {
        "wa_id": SHEENA,
        "detail": detail,
        "category": "marketing_messages",
        "value": value,
        "timestamp": 1731705721,
    }
    key = f"{NUMBER}:user_preference:{SHEENA}:marketing_messages:{value}:1731705721"
    return Payload(
        document("user_preferences", contacts=[{"wa_id": SHEENA}], user_preferences=[item]),
        [Made(f"user_preference.{value}", key, f"{NUMBER}:{SHEENA}")],
    )


def thread(who: str, *messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"id": who, "messages": list(messages), **more}


def old(wamid: str, sender: str, body: str, state: str) -> dict[str, Any]:
    at = "1775627842"
    context = {"status": state}
    return {
        "from": sender,
        "id": wamid,
        "text": {"body": body},
        "timestamp": at,
        "type": "text",
        "history_context": context,
    }


PABLO = {"full_name": "Pablo Morales", "first_name": "Pablo", "phone_number": SHEENA}
MEDIA = {
    "caption": "Taj Mahal",
    "mime_type": "image/jpeg",
    "sha256": "SfInY0gGKTsJlUWbwxC1k+FAD0FZHvzwfpvO0zX0GUI=",
    "id": "1003383421387256",
}
DECLINED = {
    "code": 2593109,
    "title": "History sync is turned off by the business from the WhatsApp Business App",
    "message": "History sharing is turned off by the business from the WhatsApp Business App",
    "error_data": {"details": "History sharing is turned off by the business"},
}

PAYLOADS: dict[str, Payload] = {
    "text": received("text", {"body": "Does it come in another color?"}, "Does it come in another color?"),
    "a reply": received(
        "text",
        {"body": "This is a reply"},
        "This is a reply",
        context={"from": BUSINESS, "id": "wamid.ORIGINAL_MESSAGE_ID"},
    ),
    "image": received("image", MEDIA, "Taj Mahal"),
    "voice": received(
        "audio",
        {
            "mime_type": "audio/ogg; codecs=opus",
            "sha256": "wvqXMe6n7n1W0zphvLPoLj+s/NtKqmr3zZ7YzTP7xFI=",
            "id": "1908647269898587",
            "voice": True,
        },
    ),
    "document": received(
        "document",
        {
            "caption": "my receipt",
            "filename": "receipt.pdf",
            "mime_type": "application/pdf",
            "sha256": "V5OPpLD/gEG6Xjg0MbmQDLFgcKsL+j5LfY4ny/pZ4MY=",
            "id": "622684793477189",
        },
        "my receipt",
    ),
    "reaction": received(
        "reaction", {"message_id": "wamid.HBgLMTQxMjU1NTA4MjkVAgASGBQzQUNCNjk5RDUwNUZGMUZEM0VBRAA=", "emoji": "👍"}
    ),
    "location": received(
        "location",
        {
            "address": "San Francisco, CA, USA",
            "latitude": 37.7893768,
            "longitude": -122.3895553,
            "name": "Bay Bridge",
            "url": "http://location_url.test",
        },
    ),
    "contacts": received(
        "contacts", [{"name": {"formatted_name": "Apple Inc."}, "phones": [{"phone": "+911800", "type": "MAIN"}]}]
    ),
    "button of a template": received("button", {"text": "Yes this is a button"}, "Yes this is a button"),
    "button reply": received(
        "interactive", {"type": "button_reply", "button_reply": {"id": "1", "title": "First Button"}}, "First Button"
    ),
    "list reply": received(
        "interactive",
        {
            "type": "list_reply",
            "list_reply": {
                "id": "priority_express",
                "title": "Priority Mail Express",
                "description": "Next Day to 2 Days",
            },
        },
        "Priority Mail Express",
    ),
    "call permission": received(
        "interactive",
        {"type": "call_permission_reply", "call_permission_reply": {"response": "accept", "is_permanent": False}},
    ),
    "unsupported": received(
        "unsupported",
        {"type": "poll_update"},
        errors=[{"code": 131051, "title": "Message type unknown", "message": "Message type unknown"}],
    ),
    "system": received(
        "system",
        {"body": "User Sheena Nelson changed from 16505551234 to 12195555358", "wa_id": "12195555358"},
    ),
    "user id only": Payload(
        document(
            # The page itself misspells the contact's id; the parent is right.
            contacts=[
                {
                    "profile": {"name": "Sheena Nelson", "username": "@realsheenanelson"},
                    "user_id": f"u{USER}",
                    "parent_user_id": PARENT,
                }
            ],
            messages=[
                {
                    "from_user_id": USER,
                    "from_parent_user_id": PARENT,
                    "id": WAMID,
                    "timestamp": "1749416383",
                    "type": "text",
                    "text": {"body": "Does it come in another color?"},
                }
            ],
        ),
        [Made("message.text", f"{NUMBER}:{WAMID}", f"{NUMBER}:{PARENT}")],
        Said(USER, USER, "Does it come in another color?"),
    ),
    "shared phone number": Payload(
        document(
            contacts=[{"profile": {"name": "Sheena Nelson", "username": "@realsheenanelson"}, "user_id": USER}],
            messages=[
                {
                    "id": WAMID,
                    "timestamp": "1749416383",
                    "type": "contacts",
                    "origin": "contact_request",
                    "contacts": [{"phones": [{"phone": SHEENA}]}],
                }
            ],
        ),
        [Made("message.contacts", f"{NUMBER}:{WAMID}", f"{NUMBER}:{USER}")],
        Said(USER, USER, ""),
    ),
    "Chatwoot: phone and user id, without metadata": Payload(
        document(
            None,
            None,
            contacts=[{"profile": {"name": "Muhsin"}, "wa_id": CHATWOOT_PHONE, "user_id": CHATWOOT_USER}],
            messages=[
                {
                    "from": CHATWOOT_PHONE,
                    "from_user_id": CHATWOOT_USER,
                    "id": "wamid.cloud-phone-bsuid-message",
                    "text": {"body": "phone and bsuid"},
                    "timestamp": "1778579582",
                    "type": "text",
                }
            ],
        ),
        [Made("message.text", "wamid.cloud-phone-bsuid-message", CHATWOOT_USER)],
        Said(CHATWOOT_PHONE, CHATWOOT_PHONE, "phone and bsuid"),
    ),
    "Chatwoot: user id only, without metadata": Payload(
        document(
            None,
            None,
            contacts=[{"profile": {"name": "Muhsin"}, "user_id": CHATWOOT_USER}],
            messages=[
                {
                    "from_user_id": CHATWOOT_USER,
                    "id": "wamid.cloud-bsuid-follow-up-message",
                    "text": {"body": "bsuid only"},
                    "timestamp": "1778579583",
                    "type": "text",
                }
            ],
        ),
        [Made("message.text", "wamid.cloud-bsuid-follow-up-message", CHATWOOT_USER)],
        Said(CHATWOOT_USER, CHATWOOT_USER, "bsuid only"),
    ),
    "Chatwoot: user id of the contact": Payload(
        document(
            contacts=[{"profile": {"name": "Muhsin"}, "wa_id": CHATWOOT_PHONE, "user_id": CHATWOOT_USER}],
            messages=[{"from": CHATWOOT_PHONE, "id": "wamid-test", "text": {"body": "Hello"}, "type": "text"}],
        ),
        [Made("message.text", f"{NUMBER}:wamid-test", f"{NUMBER}:{CHATWOOT_USER}")],
        Said(CHATWOOT_PHONE, CHATWOOT_PHONE, "Hello"),
    ),
    "Chatwoot: parent and user id": Payload(
        document(
            contacts=[
                {"profile": {"name": "Muhsin"}, "user_id": CHATWOOT_USER, "parent_user_id": CHATWOOT_PARENT},
            ],
            messages=[
                {
                    "from_user_id": CHATWOOT_USER,
                    "from_parent_user_id": CHATWOOT_PARENT,
                    "id": "wamid-test",
                    "text": {"body": "Hello"},
                    "type": "text",
                }
            ],
        ),
        [Made("message.text", f"{NUMBER}:wamid-test", f"{NUMBER}:{CHATWOOT_PARENT}")],
        Said(CHATWOOT_USER, CHATWOOT_USER, "Hello"),
    ),
    "in a group": Payload(
        document(
            contacts=[CONTACT],
            messages=[
                {
                    "from": SHEENA,
                    "group_id": GROUP,
                    "id": WAMID,
                    "timestamp": "1739321024",
                    "text": {"body": "What do you all think about this?"},
                    "type": "text",
                }
            ],
        ),
        [Made("message.text", f"{NUMBER}:{WAMID}", f"{NUMBER}:{GROUP}")],
        Said(GROUP, SHEENA, "What do you all think about this?"),
    ),
    "sent": status(
        "sent",
        recipient_id=SHEENA,
        conversation={"id": "72b14d6bd5407799e66f64d1b338e567", "origin": {"type": "marketing"}},
        pricing={"billable": True, "pricing_model": "PMP", "type": "regular", "category": "marketing"},
    ),
    "delivered, with every id": status(
        "delivered",
        PARENT,
        contacts=[{"wa_id": SHEENA, "user_id": USER, "parent_user_id": PARENT, "profile": {"name": "Pablo M."}}],
        recipient_id=SHEENA,
        recipient_user_id=USER,
        parent_recipient_user_id=PARENT,
    ),
    "delivered, without a phone number": status("delivered", PARENT, recipient_user_id=USER, parent_user_id=PARENT),
    "read, with the user id in the contact": status(
        "read", USER, contacts=[{"wa_id": SHEENA, "user_id": USER}], recipient_id=SHEENA
    ),
    "failed": status(
        "failed",
        recipient_id=SHEENA,
        errors=[{"code": 131049, "title": "This message was not delivered to maintain healthy ecosystem engagement."}],
    ),
    "read in a group": Payload(
        document(
            statuses=[
                {
                    "id": SENT,
                    "status": "read",
                    "timestamp": "1750030073",
                    "recipient_id": GROUP,
                    "recipient_type": "group",
                    "recipient_participant_id": SHEENA,
                    "recipient_participant_user_id": USER,
                }
            ]
        ),
        [Made("status.read", f"{NUMBER}:{SENT}:read:{USER}", f"{NUMBER}:{GROUP}")],
    ),
    "echo": Payload(
        document(
            "smb_message_echoes",
            message_echoes=[
                {
                    "from": BUSINESS,
                    "to": SHEENA,
                    "to_user_id": USER,
                    "id": WAMID,
                    "timestamp": "1739321024",
                    "type": "text",
                    "text": {"body": "Here's the info you requested!"},
                }
            ],
        ),
        [Made("echo.text", f"{NUMBER}:{WAMID}", f"{NUMBER}:{USER}")],
        Said(SHEENA, BUSINESS, "Here's the info you requested!", True),
    ),
    "history": Payload(
        document(
            "history",
            history=[
                {
                    "metadata": {"chunk_order": 1, "phase": 0, "progress": 100},
                    "threads": [
                        thread(
                            "917506080480",
                            old(
                                "wamid.HBgMOTE4NTg4MDk2MDcwFQIAERgSQ0FFNjA5RjM4MDdCRDRGMjdFAA==",
                                BUSINESS,
                                "Hi man",
                                "read",
                            ),
                            old(
                                "wamid.HBgMOTE3NTA2MDgwNDgwFQIAEhgUM0ExNDdBQ0ZEODQ3NTQ4MENDMzkA",
                                "917506080480",
                                "Hi dude",
                                "pending",
                            ),
                        ),
                        thread(
                            SHEENA,
                            {**old(WAMID, SHEENA, "", "read"), "type": "media_placeholder"},
                            context={"wa_id": SHEENA, "user_id": USER},
                        ),
                    ],
                }
            ],
        ),
        [
            Made("history.text", f"{NUMBER}:history:{wamid}:text", f"{NUMBER}:917506080480")
            for wamid in (
                "wamid.HBgMOTE4NTg4MDk2MDcwFQIAERgSQ0FFNjA5RjM4MDdCRDRGMjdFAA==",
                "wamid.HBgMOTE3NTA2MDgwNDgwFQIAEhgUM0ExNDdBQ0ZEODQ3NTQ4MENDMzkA",
            )
        ]
        + [Made("history.media_placeholder", f"{NUMBER}:history:{WAMID}:media_placeholder", f"{NUMBER}:{USER}")],
    ),
    "history: one message": Payload(
        document(
            "history",
            history=[{"metadata": {"phase": 0}, "threads": [thread(SHEENA, old(WAMID, BUSINESS, "Hello", "read"))]}],
        ),
        [Made("history.text", f"{NUMBER}:history:{WAMID}:text", f"{NUMBER}:{SHEENA}")],
        Said(SHEENA, BUSINESS, "Hello", True),
    ),
    "history: a picture follows": Payload(
        document(
            "history",
            contacts=[{"wa_id": SHEENA, "user_id": USER}],
            messages=[
                {
                    "from": SHEENA,
                    "from_user_id": USER,
                    "id": WAMID,
                    "timestamp": "1738796547",
                    "type": "image",
                    "image": MEDIA,
                }
            ],
        ),
        [Made("history.image", f"{NUMBER}:history:{WAMID}:image", f"{NUMBER}:{USER}")],
        Said(SHEENA, SHEENA, "Taj Mahal"),
    ),
    "history: declined": Payload(
        document("history", history=[{"errors": [DECLINED]}]), [Made("history", HASH, ACCOUNT)]
    ),
    "call of a user": call(
        "connect",
        event="connect",
        to=BUSINESS,
        **{"from": SHEENA},
        direction="USER_INITIATED",
        session={"sdp_type": "offer"},
    ),
    "call of the business": call(
        "connect", event="connect", to=SHEENA, to_user_id=USER, direction="BUSINESS_INITIATED"
    ),
    "call is over": call("terminate", event="terminate", status="COMPLETED", duration=42),
    "call rings": call("ringing", "statuses", type="call", status="RINGING", recipient_id=SHEENA),
    "call is accepted": call("accepted", "statuses", type="call", status="ACCEPTED", recipient_user_id=USER),
    "contact is added": Payload(
        document(
            "smb_app_state_sync",
            state_sync=[
                {"type": "contact", "contact": PABLO, "action": "add", "metadata": {"timestamp": "1739321024"}},
                {
                    "type": "contact",
                    "contact": {"phone_number": "919746334593", "user_id": USER},
                    "action": "remove",
                    "metadata": {"timestamp": "1739321025"},
                },
            ],
        ),
        [
            Made("state_sync.add", f"{NUMBER}:state_sync:{SHEENA}:add:1739321024", f"{NUMBER}:{SHEENA}"),
            Made("state_sync.remove", f"{NUMBER}:state_sync:{USER}:remove:1739321025", f"{NUMBER}:{USER}"),
        ],
    ),
    "no marketing any more": preference("stop"),
    "marketing again": preference("resume"),
    "account": Payload(
        document("account_update", None, event="DISABLED_UPDATE", ban_info={"waba_ban_state": "DISABLE"}),
        [Made("account_update", HASH, ACCOUNT)],
    ),
}
