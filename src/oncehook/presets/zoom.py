"""Zoom: asks at set-up, and every 72 hours, for proof that the address knows the secret; waits three seconds.

There is no event id, and a 4xx is never tried again. Recordings bring a token to download them with: it is not kept.
"""

from __future__ import annotations

import contextlib
import hmac
import math
import re
from typing import Final

import msgspec

from oncehook import payload
from oncehook.errors import SignatureInvalid
from oncehook.model import Arrival
from oncehook.presets import _base
from oncehook.sources import Preset, Reply, Sample, Source
from oncehook.verify import Hmac

VALIDATION: Final = "endpoint.url_validation"
_PLAIN: Final = re.compile(r"[A-Za-z0-9+/=_-]{1,200}")
"""Form of a plainToken. With a colon allowed, our answer could be a signature for `v0:time:body`."""


def handshake(arrival: Arrival, source: Source) -> Reply | None:
    """Answer `{"event":"endpoint.url_validation","payload":{"plainToken":p}}` with p and its HMAC."""
    # Only a POST was verified, age included. Answering others would sign any text for anybody.
    if arrival.method != "POST" or VALIDATION.encode() not in arrival.body:
        return None
    data = _base.read_body(arrival)
    plain = payload.walk(data, ("payload", "plainToken"))
    if payload.walk(data, ("event",)) != VALIDATION or not isinstance(plain, str) or not _PLAIN.fullmatch(plain):
        return None
    proof = hmac.digest(_signer(arrival, source), plain.encode(), "sha256").hex()
    return Reply(200, msgspec.json.encode({"plainToken": plain, "encryptedToken": proof}))


def _signer(arrival: Arrival, source: Source) -> bytes:
    """Return the secret that this arrival was signed with: during a rotation there are two, and Zoom uses one."""
    for secret in source.valid_secrets:
        with contextlib.suppress(SignatureInvalid):
            source.scheme.verifier([secret], url=source.settings.public_url, tolerance=math.inf)(arrival)
            return secret
    raise SignatureInvalid("mismatch")


_OBJECT: Final = "$.payload.object"
# Two people may join, or write, in the same millisecond.
_WHO: Final = (
    f"?{_OBJECT}.participant.user_id",
    f"?{_OBJECT}.participant.participant_uuid",
    f"?{_OBJECT}.registrant.id",
    f"?{_OBJECT}.chat_message.message_id",
)
_MEETING: Final = (
    '{"event":"%s","event_ts":{now_ms},"payload":{"account_id":"AAAAAABBBB","object":{"id":"85042424242",'
    '"uuid":"4444AAA{id}==","host_id":"x1yCzABCDEfg23HiJKl4mN","topic":"Weekly stand-up","type":2,'
    '"start_time":"2027-01-11T09:00:00Z","timezone":"Europe/Lisbon","duration":60%s}}%s}'
)

PRESET = Preset(
    name="zoom",
    title="Zoom",
    scheme=Hmac(
        header="x-zm-signature",
        prefix="v0=",
        timestamp="header:x-zm-request-timestamp",
        signed="v0:{timestamp}:{body}",
    ),
    handshake=handshake,
    key=[
        ["$.event", "$.event_ts", f"{_OBJECT}.uuid", *_WHO],
        ["$.event", "$.event_ts", f"{_OBJECT}.id", *_WHO],
    ],
    # Phone and contact centre events name their object differently; they contain their own time, so a hash identifies
    # them.
    on_missing_key="body_hash",
    type="$.event",
    subject=[
        f"{_OBJECT}.uuid",
        f"{_OBJECT}.id",
        f"{_OBJECT}.call_id",
        f"{_OBJECT}.engagement_id",
        "$.payload.account_id",
    ],
    event_time="$.event_ts",
    redact=("$.download_token",),
    # After 5 minutes, 20 more, 60 more.
    horizon="2h",
    budget="1.5s",
    facts={
        "scheme": "developers.zoom.us/docs/api/webhooks (Verify webhook events)",
        "handshake": "developers.zoom.us/docs/api/webhooks (Validate your webhook endpoint); signed: "
        "github.com/zoom/webhook-sample index.js",
        "key": "developers.zoom.us/docs/api/webhooks (event_ts is when it happened; that it stays the same across "
        "retries is unverified)",
        "redact": "developers.zoom.us/docs/api/meetings/events (recording.completed)",
        "horizon": "developers.zoom.us/docs/api/webhooks (Notification delivery)",
        "budget": "developers.zoom.us/docs/api/webhooks (3 s)",
    },
    samples={
        "meeting.started": Sample(_MEETING % ("meeting.started", "", "")),
        "meeting.participant_joined": _base.fill(
            _MEETING,
            "meeting.participant_joined",
            ',"participant":{"user_id":"16778240","user_name":"Ana","participant_uuid":"P{id}",'
            '"join_time":"2027-01-11T09:01:00Z"}',
            "",
        ),
        "recording.completed": _base.fill(
            _MEETING,
            "recording.completed",
            ',"recording_files":[{"id":"R{id}","file_type":"MP4","download_url":"https://zoom.example/rec/{id}"}]',
            ',"download_token":"sample-token-{id}"',
        ),
    },
)
