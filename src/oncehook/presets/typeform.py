"""Typeform: one answer sheet per request; 404 or 410 would switch the webhook off at once, so we never say those."""

from __future__ import annotations

from typing import Final

from oncehook.sources import Preset, Sample
from oncehook.verify import Hmac

_RESPONSE: Final = (
    '{"event_id":"{id}","event_type":"%s","form_response":{"form_id":"lT4Z3j","token":"t{id}",'
    '"landed_at":"{now_iso}",%s"definition":{"id":"lT4Z3j","title":"Trial lesson","fields":[{"id":"F1",'
    '"type":"short_text","ref":"name","title":"Your name?"}]},"answers":[{"type":"text","text":"Jo\\u00e3o",'
    '"field":{"id":"F1","type":"short_text","ref":"name"}}]}}'
)

PRESET = Preset(
    name="typeform",
    title="Typeform",
    # Base64 behind a prefix that elsewhere precedes hex.
    scheme=Hmac(header="Typeform-Signature", prefix="sha256=", encoding="base64"),
    key="$.event_id",
    type="$.event_type",
    subject=[["$.form_response.form_id", "$.form_response.token"], "$.form_response.form_id"],
    event_time=["$.form_response.submitted_at", "$.form_response.landed_at"],
    # Ten hours after a 503, a little more after other codes.
    horizon="12h",
    # Typeform waits 30 s.
    budget="5s",
    facts={
        "scheme": "typeform.com/developers/webhooks (unverified, but alike in all implementations)",
        "key": "typeform.com/developers/webhooks",
        "unavailable": "typeform.com/developers/webhooks (503: every 2 to 3 minutes)",
        "horizon": "typeform.com/developers/webhooks (10 h)",
        "budget": "typeform.com/developers/webhooks (30 s)",
    },
    samples={
        "form_response": Sample(_RESPONSE % ("form_response", '"submitted_at":"{now_iso}",')),
        "form_response_partial": Sample(_RESPONSE % ("form_response_partial", "")),
    },
)
