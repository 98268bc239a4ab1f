"""360dialog: WhatsApp's envelope under another proof. No vector is published, so signatures are made here."""

from __future__ import annotations

import hashlib
import hmac
import json
from pathlib import Path

import pytest

from oncehook import presets
from tests.presets.messaging import SECRET, ask, counts, ground, keys, meta_signature, send_as
from tests.presets.test_messaging_whatsapp import BATCH, NUMBER, change, document, message

BODY = json.dumps(BATCH).encode()
DIGEST = hmac.new(SECRET, BODY, hashlib.sha256).hexdigest()


@pytest.mark.parametrize(
    "headers",
    [
        {"x-360dialog-signature": DIGEST},
        {"X-360Dialog-Signature": DIGEST.upper()},
        {"x-360dialog-signature": f"sha256={DIGEST}"},
        {"Authorization": SECRET.decode()},
        {"Authorization": f"Bearer {SECRET.decode()}"},
        {"x-360dialog-signature": DIGEST, "Authorization": "whatever a gateway put there"},
    ],
)
async def test_a_signature_or_a_header_of_ones_own(tmp_path: Path, headers: dict[str, str]) -> None:
    async with ground(tmp_path, "360dialog") as place:
        assert counts(await send_as(place, BODY, headers)) == (5, 0, 0)
        assert len(await keys(place)) == 5


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"x-360dialog-signature": ""},
        {"x-360dialog-signature": DIGEST[:-1] + "x"},
        {"x-360dialog-signature": DIGEST[:32]},
        {"x-360dialog-signature": f"sha1={DIGEST}"},
        {"Authorization": "Bearer another"},
        {"Authorization": ""},
        {"X-Partner-Auth": SECRET.decode()},
        # Meta's own signature is not passed on: this one would be of another secret
        meta_signature(BODY),
        # a wrong signature is not rescued by a right header beside it
        {"x-360dialog-signature": "0" * 64, "Authorization": SECRET.decode()},
    ],
)
async def test_negative_cases(tmp_path: Path, headers: dict[str, str]) -> None:
    async with ground(tmp_path, "360dialog") as place:
        assert (await send_as(place, BODY, headers)).reply.status == 401
        assert await place.events() == []


async def test_there_is_no_handshake(tmp_path: Path) -> None:
    async with ground(tmp_path, "360dialog") as place:
        asked = b"hub.mode=subscribe&hub.verify_token=our%20verify%20token&hub.challenge=1"
        assert ask(place, asked).status == 403, "as for a source that does not exist"


async def test_what_is_read_is_what_whatsapp_has(tmp_path: Path) -> None:
    mine, theirs = presets.load("360dialog"), presets.load("whatsapp-cloud")
    for name in ("key", "type", "subject", "event_time", "rank", "rank_scope", "split", "volatile"):
        assert getattr(mine.settings, name) == getattr(theirs.settings, name)
    assert mine.samples == theirs.samples
    async with ground(tmp_path, "360dialog") as place:
        await place.send(BATCH)
        again = await place.send(document(change(messages=[message("wamid.A"), message("wamid.Z")])))
        assert counts(again) == (1, 1, 0)
        assert (await keys(place))[-1] == f"{NUMBER}:wamid.Z"
