"""SendGrid Event Webhook: arrays of events, signed with a private key whose public half SendGrid shows.

Duplicates are common: one report found three copies of each event on average, over 29 hours. A retry may group the
events differently, so each is compared by itself.
"""

from __future__ import annotations

from typing import Final

from oncehook.presets import _base
from oncehook.sources import Preset, Sample
from oncehook.verify import SendGrid

_EVENT: Final = (
    '{"email":"ana@example.com","timestamp":{now},"smtp-id":"<14c5d75ce93.dfd.64b469@ismtpd-555>",'
    '"sg_event_id":"%s-{id}","sg_message_id":"14c5d75ce93.dfd.64b469.{id}.0","category":["receipts"],'
    '"event":"%s"%s}'
)
_DELIVERED: Final = _EVENT % ("ZGVsaXZlcmVk", "delivered", ',"response":"250 OK"')
_OPEN: Final = _EVENT % ("b3Blbg", "open", ',"useragent":"Mozilla/5.0","ip":"203.0.113.7"')
_BOUNCE: Final = _EVENT % (
    "Ym91bmNl",
    "bounce",
    ',"reason":"550 5.1.1 bo\\u00eete inconnue","status":"5.1.1","type":"bounce"',
)

PRESET = Preset(
    name="sendgrid",
    title="SendGrid",
    scheme=SendGrid(),
    split=_base.one_by_one,
    key="$[0].sg_event_id",
    # Documented as "where present". Without it, the same content is the same event: it contains its own time.
    on_missing_key="body_hash",
    type="$[0].event",
    # One message may go to many addresses, each with events of its own.
    subject=[["$[0].sg_message_id", "$[0].email"], "$[0].email"],
    event_time="$[0].timestamp",
    horizon="29h",
    max_body="4MiB",
    facts={
        "scheme": "github.com/sendgrid/sendgrid-python sendgrid/helpers/eventwebhook/__init__.py",
        "key": "docs.sendgrid.com/for-developers/tracking-events/troubleshooting (unique where present)",
        "split": "docs.sendgrid.com/for-developers/tracking-events/getting-started-event-webhook (an array)",
        "horizon": "docs.sendgrid.com/for-developers/tracking-events/event (24 h); copies for 29 h: "
        "github.com/sendgrid/docs issue 2933",
        "max_body": "unverified (no limit published)",
    },
    samples={
        "delivered": Sample(f"[{_DELIVERED}]"),
        "open": Sample(f"[{_OPEN}]"),
        "bounce": Sample(f"[{_BOUNCE}]"),
        **{
            kind: Sample("[" + _EVENT % (number, kind, about) + "]")
            for kind, number, about in (
                ("processed", "cHJvY2Vzc2Vk", ""),
                ("deferred", "ZGVmZXJyZWQ", ',"response":"400 try again later","attempt":"5"'),
                ("dropped", "ZHJvcHBlZA", ',"reason":"Bounced Address","status":"5.0.0"'),
                ("click", "Y2xpY2s", ',"url":"https://shop.example/tea","ip":"203.0.113.7"'),
                ("spamreport", "c3BhbXJlcG9ydA", ""),
                ("unsubscribe", "dW5zdWJzY3JpYmU", ""),
                ("group_unsubscribe", "Z3JvdXBfdW5z", ',"asm_group_id":42'),
                ("group_resubscribe", "Z3JvdXBfcmVz", ',"asm_group_id":42'),
            )
        },
        "batch": Sample(f"[{_DELIVERED},{_OPEN},{_BOUNCE}]"),
    },
)
