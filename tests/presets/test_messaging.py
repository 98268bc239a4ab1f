"""What holds for every messaging preset: its samples are taken, repeats are duplicates, forgeries are not believed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from oncehook import clock, human, presets, samples
from oncehook.errors import ConfigError
from oncehook.sources import build
from oncehook.verify import Either, Scheme, Token
from tests.presets.messaging import NAMES, SECRET, VERIFY_TOKEN, ground
from tests.presets.trial import URL, try_sample

# What providers.md says: how long the sender retries.
HORIZONS = {
    "whatsapp-cloud": "7d",
    "messenger": "36h",
    "360dialog": "7d",
    "evolution-api": "25m",
    "evolution-go": "2m",
    "waha": "30s",
    "twilio": "15s",
    "telegram": "24h",
    "slack": "6m",
}
SAMPLES = [(name, kind) for name in NAMES for kind in presets.load(name).samples]
BODY_PROVEN = {"whatsapp-cloud", "messenger", "waha", "twilio", "slack"}


@pytest.mark.parametrize("name", NAMES)
def test_horizon(name: str) -> None:
    assert human.seconds(presets.load(name).horizon) >= human.seconds(HORIZONS[name])


@pytest.mark.parametrize("name", NAMES)
def test_every_claim_has_its_source(name: str) -> None:
    for claim, page in presets.load(name).facts.items():
        assert "https://" not in page, claim
        assert re.match(r"[a-z0-9.-]+\.[a-z]+/|unverified", page), (claim, page)


@pytest.mark.parametrize("name", NAMES)
def test_what_the_check_covers_is_what_the_preset_says(name: str) -> None:
    preset = presets.load(name)
    assert preset.body_authenticated == ("body" in preset.scheme.covers) == (name in BODY_PROVEN)
    # A form of Slack's is read by its content type, one of Twilio's is signed without its borders.
    assert preset.key_authenticated == (preset.body_authenticated and name not in ("slack", "twilio"))


@pytest.mark.parametrize("name", NAMES)
def test_it_does_not_start_without_what_it_needs(name: str) -> None:
    preset = presets.load(name)
    settings = {"secret": "secret", "verify_token": "verify_token", "public_url": "public_url"}
    given: dict[str, Any] = {"secret": [SECRET], "verify_token": VERIFY_TOKEN, "public_url": URL}
    enough = {settings[need]: given[settings[need]] for need in preset.needs}
    assert "secret" in preset.needs
    build("here", preset=preset, **enough)
    for need in preset.needs:
        with pytest.raises(ConfigError, match=need):
            build("here", preset=preset, **{**enough, settings[need]: None or ()})


@pytest.mark.parametrize(("name", "kind"), SAMPLES)
async def test_a_sample_is_taken_once_and_only_from_its_sender(tmp_path: Path, name: str, kind: str) -> None:
    for event in await try_sample(tmp_path, name, kind):
        assert event.key
        assert event.subject
        assert not event.marks


@pytest.mark.parametrize("name", NAMES)
async def test_who_does_not_know_the_secret_is_refused(tmp_path: Path, name: str) -> None:
    async with ground(tmp_path, name) as place:
        kind = next(iter(presets.load(name).samples))
        draft = samples.draft(place.source, kind)
        for secret in (b"another secret", SECRET + b"x", SECRET[:-1]):
            forged = await place.take(place.source.scheme.sign(draft, secret, at=clock.now(), url=URL))
            assert (forged.reply.status, forged.outcome) == (401, "rejected")
        assert await place.events() == []
        assert (await place.take(place.sign(draft))).outcome == "accepted"  # no forgery has used up its key (R8)


@pytest.mark.parametrize("name", NAMES)
async def test_the_proof_never_reaches_the_store(tmp_path: Path, name: str) -> None:
    """S25: where the sender's secret travels with the arrival, it is gone before anything is written."""
    async with ground(tmp_path, name) as place:
        for scheme in _alternatives(place.source.scheme):
            for kind in presets.load(name).samples:
                arrival = scheme.sign(samples.draft(place.source, kind), SECRET, at=clock.now(), url=URL)
                assert (await place.take(arrival)).outcome == "accepted"
        written = place.bytes_on_disk()
        assert SECRET not in written
        assert b"content-type" in written  # the heads of the requests are kept, and were looked at
    assert SECRET not in place.bytes_on_disk()


def _alternatives(scheme: Scheme) -> list[Scheme]:
    if isinstance(scheme, Either):
        return [one for part in scheme.schemes for one in _alternatives(part)]
    return [scheme]


def test_some_senders_do_show_their_secret() -> None:
    """The test above would say nothing if they did not."""
    places = [one.place for name in NAMES for one in _alternatives(presets.load(name).scheme) if isinstance(one, Token)]
    assert {"body:instanceToken", "body:apikey", "header:X-Telegram-Bot-Api-Secret-Token"} <= set(places)
