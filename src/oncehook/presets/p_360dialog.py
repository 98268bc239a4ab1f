"""360dialog: WhatsApp Cloud API hooks passed on by a partner, with its own signature or a header of one's own.

Everything but the proof is Meta's: envelope, batches, ids and statuses. Older numbers have the lists of Meta's `value`
at the top of the body, and partner events under `data`. It wants its answer within a second.
"""

from __future__ import annotations

from typing import Final

from oncehook.presets import _media, whatsapp_cloud
from oncehook.verify import Either, Hmac, Token

SIGNATURE: Final = "x-360dialog-signature"
AUTHORIZATION: Final = "header:Authorization"

PRESET = whatsapp_cloud.PRESET.replace(
    name="360dialog",
    title="360dialog",
    # How the digest is encoded is not documented: plain hex is what people see, `sha256=` is Meta's form. Only partners
    # have the platform secret; everybody else sets a header next to the URL instead.
    scheme=Either(
        Either(Hmac(header=SIGNATURE), Hmac(header=SIGNATURE, prefix="sha256="), every=True),
        Either(Token(place=AUTHORIZATION), Token(place=AUTHORIZATION, prefix="Bearer "), every=True),
    ),
    # True for the signature only; the header proves the sender, not the content.
    body_authenticated=False,
    key_authenticated=False,
    handshake=None,
    needs=("secret",),
    budget="800ms",
    daily_volume=50,
    media_api=_media.DialogMedia(),
    facts={
        **{
            name: page
            for name, page in whatsapp_cloud.PRESET.facts.items()
            if name in ("key", "subject", "preview", "rank")
        },
        "scheme": "docs.360dialog.com/partner/onboarding/webhook-events-and-setup/signature-validation",
        "split": "docs.360dialog.com/partner/messaging/receiving-messages-via-webhook · …/partner/onboarding/"
        "whatsapp-coexistence/coexistence-webhooks · github.com/chatwoot/chatwoot "
        "spec/services/whatsapp/incoming_message_service_spec.rb (the flat shape)",
        "horizon": "docs.360dialog.com/partner/messaging/receiving-messages-via-webhook (7 days)",
        "budget": "docs.360dialog.com/partner/messaging/receiving-messages-via-webhook (under 1 % above 1 s)",
        "max_body": "unverified (as WhatsApp)",
        "handshake": "unverified (none seen)",
    },
)
