"""Linear: stamps each attempt with its time inside the signed body, so a retry has other bytes than the first try.

It accepts only 200, within five seconds, and retries after 1 minute, 1 hour and 6 hours.
"""

from __future__ import annotations

from typing import Final

from oncehook.sources import Preset, Sample
from oncehook.verify import Hmac

_ENVELOPE: Final = (
    '{"action":"%s","actor":{"id":"b5ea5f1f-8adc-4f52-b4bd-ab4e84cf51ba","type":"user","name":"Ana"},'
    '"createdAt":"{now_iso}","data":%s,"url":"https://linear.app/example/issue/EX-42","type":"%s",'
    '"organizationId":"2fd6a1f4-6d0c-4a3b-9d38-0a3a5e8b9f10","webhookTimestamp":{now_ms},'
    '"webhookId":"000042e3-d123-4980-b49f-8e140eef9329"}'
)
_ISSUE: Final = (
    '{"id":"{id}-1d5f-4f2b-9a51-0f6f3c8d7e21","number":42,"title":"Caf\\u00e9 opens at 8","updatedAt":"{now_iso}",'
    '"createdAt":"2027-01-11T09:00:00.000Z","state":{"name":"%s"},"team":{"key":"EX"}}'
)
_COMMENT: Final = (
    '{"id":"{id}-77aa-4c11-8ae0-2b4c5d6e7f80","body":"Obrigada!","issueId":"5b8e0a4c-1d5f-4f2b-9a51-0f6f3c8d7e21",'
    '"createdAt":"{now_iso}","updatedAt":"{now_iso}"}'
)


def _headers(event: str) -> dict[str, str]:
    return {"Linear-Delivery": "{id}-b617-4388-90fe-adc3633d6b72", "Linear-Event": event}


PRESET = Preset(
    name="linear",
    title="Linear",
    # The Linear-Timestamp header is not signed; the timestamp in the body is.
    scheme=Hmac(header="Linear-Signature", timestamp="body:webhookTimestamp", unit="milliseconds", tolerance=60.0),
    # The delivery's id probably stays the same across retries; that is not documented.
    key=["header:Linear-Delivery", ["$.webhookId", "$.type", "$.action", "$.data.id", "$.data.updatedAt"]],
    key_authenticated=False,
    # Changes with every attempt.
    own="$.webhookTimestamp",
    type=[["$.type", "?$.action"]],
    subject=[["$.organizationId", "$.data.id"], ["$.organizationId", "$.agentSession.id"], "$.organizationId"],
    event_time="$.createdAt",
    volatile=("$.webhookTimestamp",),
    horizon="8h",
    budget="2s",
    facts={
        "scheme": "npm @linear/sdk webhooks (60 s, from the body)",
        "key": "linear.app/developers/webhooks (Linear-Delivery; that a retry repeats it is unverified)",
        "volatile": "npm @linear/sdk webhooks",
        "horizon": "linear.app/developers/webhooks (1 min, 1 h, 6 h)",
        "budget": "linear.app/developers/webhooks (5 s)",
    },
    samples={
        "Issue.create": Sample(_ENVELOPE % ("create", _ISSUE % "Todo", "Issue"), _headers("Issue")),
        "Issue.update": Sample(_ENVELOPE % ("update", _ISSUE % "Done", "Issue"), _headers("Issue")),
        "Comment.create": Sample(_ENVELOPE % ("create", _COMMENT, "Comment"), _headers("Comment")),
    },
)
