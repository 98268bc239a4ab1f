"""360dialog: the flat shape that Chatwoot still receives, Meta's own, and partner events.

From Chatwoot's `incoming_message_service_spec.rb`, and the pages "Webhook Reference" and "Coexistence Webhooks" of
docs.360dialog.com.
"""

from __future__ import annotations

from typing import Any

from tests.presets.families import Made, Payload, Said
from tests.presets.families.cloud import ACCOUNT, METADATA, NUMBER, SHEENA, USER, WAMID, document

SOJAN, ID = "2423423243", "SDFADSf23sfasdafasdfa"
BSUID, PARENT, PHONE = "IN.2081978709342942", "IN.ENT.9081726354", "919745786257"
CONTACT = {"profile": {"name": "Sojan Jose"}, "wa_id": SOJAN}


def flat(kind: str, content: Any, text: str = "", **more: Any) -> Payload:
    item = {"from": SOJAN, "id": ID, kind: content, "timestamp": "1633034394", "type": kind, **more}
    return Payload(
        {"contacts": [CONTACT], "messages": [item]}, [Made(f"message.{kind}", ID, SOJAN)], Said(SOJAN, SOJAN, text)
    )


def written_by(who: str) -> Payload:
    item = {"from": who, "id": ID, "text": {"body": "Test"}, "timestamp": "1633034394", "type": "text"}
    contact = {"profile": {"name": "Sojan Jose"}, "wa_id": who}
    return Payload({"contacts": [contact], "messages": [item]}, [Made("message.text", ID, who)], Said(who, who, "Test"))


def status(word: str, who: str = SOJAN, **more: Any) -> Payload:
    item = {"recipient_id": SOJAN, "id": ID, "status": word, **more.pop("fields", {})}
    return Payload({**more, "statuses": [item]}, [Made(f"status.{word}", f"{ID}:{word}", who)])


def identified(wamid: str, text: str, said: str, contact: dict[str, Any], **ids: str) -> Payload:
    item = {**ids, "id": wamid, "text": {"body": text}, "timestamp": "1778579582", "type": "text"}
    who = ids.get("from_parent_user_id") or ids["from_user_id"]
    return Payload(
        {"contacts": [{"profile": {"name": "Muhsin"}, **contact}], "messages": [item]},
        [Made("message.text", wamid, who)],
        Said(said, said, text),
    )


def event(kind: str, **data: Any) -> dict[str, Any]:
    known = {"id": ACCOUNT, "messaging_product": "whatsapp", "metadata": METADATA}
    return {"id": "9f7c1", "event": kind, "data": {**known, **data}}


PAYLOADS: dict[str, Payload] = {
    "text": flat("text", {"body": "Test"}, "Test"),
    "image": flat(
        "image",
        {
            "id": "b1c68f38-8734-4ad3-b4a1-ef0c10d683",
            "mime_type": "image/jpeg",
            "sha256": "29ed500fa64eb55fc19dc4124acb300e5dcca0f822a301ae99944db",
            "caption": "Check out my product!",
        },
        "Check out my product!",
    ),
    "button reply": flat(
        "interactive", {"button_reply": {"id": "1", "title": "First Button"}, "type": "button_reply"}, "First Button"
    ),
    "button of a template": flat("button", {"text": "Yes this is a button"}, "Yes this is a button"),
    "location": flat(
        "location",
        {"address": "San Francisco, CA, USA", "latitude": 37.7893768, "longitude": -122.3895553, "name": "Bay Bridge"},
    ),
    "contacts": flat(
        "contacts",
        [
            {"name": {"formatted_name": "Apple Inc."}, "phones": [{"phone": "+911800", "type": "MAIN"}]},
            {
                "name": {"first_name": "Chatwoot", "formatted_name": "Chatwoot"},
                "phones": [{"phone": "+1 (415) 341-8386"}],
            },
        ],
    ),
    "ephemeral": flat("ephemeral", {}),
    "unsupported": flat(
        "unsupported", {}, errors=[{"code": 131051, "title": "Message type is currently not supported."}]
    ),
    "Brazil, with the nine": written_by("5541988887777"),
    "Brazil, without it": written_by("554188887777"),
    "Argentina, with the nine": written_by("5491123456789"),
    "Argentina, without it": written_by("541123456789"),
    "a contact of another number": Payload(
        {
            "contacts": [{"profile": {"name": "Kedar"}, "wa_id": "919746334593", "user_id": BSUID}],
            "messages": [
                {"from": "919446284490", "id": "wamid.X", "timestamp": "1675823265", "type": "contacts", "contacts": []}
            ],
        },
        [Made("message.contacts", "wamid.X", "919446284490")],
        Said("919446284490", "919446284490", ""),
    ),
    "user id only": identified(
        "wamid.bsuid-only-message",
        "testing bsuid",
        BSUID,
        {"user_id": BSUID, "parent_user_id": PARENT},
        from_user_id=BSUID,
        from_parent_user_id=PARENT,
    ),
    "phone and user id": identified(
        "wamid.phone-bsuid-message",
        "phone and bsuid",
        PHONE,
        {"wa_id": PHONE, "user_id": BSUID},
        **{"from": PHONE, "from_user_id": BSUID},
    ),
    "user id, later": identified(
        "wamid.bsuid-follow-up-message", "bsuid only", BSUID, {"user_id": BSUID}, from_user_id=BSUID
    ),
    "read": status("read"),
    "delivered, with the ids in the contact": status(
        "delivered", PARENT, contacts=[{"wa_id": SOJAN, "user_id": BSUID, "parent_user_id": PARENT}]
    ),
    "failed": status("failed", fields={"errors": [{"code": 123, "title": "abc"}]}),
    "deleted": status("deleted", fields={"errors": [{"code": 123, "title": "abc"}]}),
    "as Meta writes it": Payload(
        document(
            contacts=[{"profile": {"name": "Sheena Nelson"}, "wa_id": SHEENA}],
            messages=[
                {
                    "from": SHEENA,
                    "id": WAMID,
                    "timestamp": "1749416383",
                    "type": "text",
                    "text": {"body": "MESSAGE_BODY"},
                }
            ],
        ),
        [Made("message.text", f"{NUMBER}:{WAMID}", f"{NUMBER}:{SHEENA}")],
        Said(SHEENA, SHEENA, "MESSAGE_BODY"),
    ),
    "partner: history": Payload(
        event(
            "history",
            history=[
                {
                    "metadata": {"phase": "0", "chunk_order": 1, "progress": "55"},
                    "threads": [
                        {
                            "id": SHEENA,
                            "messages": [
                                {
                                    "from": SHEENA,
                                    "id": WAMID,
                                    "timestamp": "1739230955",
                                    "type": "text",
                                    "text": {"body": "Thanks!"},
                                    "history_context": {"status": "READ"},
                                }
                            ],
                        }
                    ],
                }
            ],
        ),
        [Made("history.text", f"{NUMBER}:history:{WAMID}:text", f"{NUMBER}:{SHEENA}")],
        Said(SHEENA, SHEENA, "Thanks!"),
    ),
    "partner: contacts": Payload(
        event(
            "smb_app_state_sync",
            state_sync=[
                {
                    "type": "contact",
                    "contact": {
                        "full_name": "Pablo Morales",
                        "first_name": "Pablo",
                        "phone_number": SHEENA,
                        "user_id": USER,
                    },
                    "action": "add",
                    "metadata": {"timestamp": "1739321024"},
                }
            ],
        ),
        [Made("state_sync.add", f"{NUMBER}:state_sync:{USER}:add:1739321024", f"{NUMBER}:{USER}")],
    ),
}
