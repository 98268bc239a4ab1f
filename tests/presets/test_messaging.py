"""What holds for every messaging preset: its samples are taken, repeats are duplicates, forgeries are not believed."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from oncehook import clock, presets, sending, units
from oncehook.errors import ConfigError
from oncehook.model import Arrival
from oncehook.sources import build
from oncehook.verify import Either, Scheme, Token
from tests.presets.messaging import NAMES, SECRET, URL, VERIFY_TOKEN, Ground, ground

# What providers.md says: how long a key must be remembered, how long the sender retries, how long it waits.
WINDOWS = {
    "whatsapp-cloud": ("8d", "7d", "1s"),
    "messenger": ("3d", "36h", "20s"),
    "360dialog": ("8d", "7d", "1s"),
    "evolution-api": ("1d", "25m", "30s"),
    "evolution-go": ("1d", "2m", None),
    "waha": ("1d", "30s", None),
    "twilio": ("1d", "15s", "15s"),
    "telegram": ("2d", "24h", None),
    "slack": ("1d", "6m", "3s"),
}
SAMPLES = [(name, kind) for name in NAMES for kind in presets.load(name).samples]
BODY_PROVEN = {"whatsapp-cloud", "messenger", "waha", "twilio", "slack"}


def sample(place: Ground, kind: str, secret: bytes = SECRET) -> Arrival:
    """A fresh sample, signed."""
    draft = sending.draft(place.source, kind)
    return place.source.scheme.sign(draft, secret, at=clock.now(), url=URL)


def test_every_messaging_preset_is_there() -> None:
    assert set(NAMES) <= set(presets.names())
    assert set(WINDOWS) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_window_horizon_and_budget(name: str) -> None:
    preset = presets.load(name)
    window, horizon, limit = WINDOWS[name]
    assert preset.name == name
    assert units.seconds(preset.horizon) >= units.seconds(horizon)
    assert units.seconds(preset.keep_keys) >= max(2 * units.seconds(preset.horizon), units.seconds(window))
    if limit is not None:
        assert units.seconds(preset.budget) < units.seconds(limit)


@pytest.mark.parametrize("name", NAMES)
def test_every_claim_has_its_source(name: str) -> None:
    facts = presets.load(name).facts
    assert {"scheme", "key", "horizon", "budget"} - {"budget"} <= set(facts)
    for claim, page in facts.items():
        assert "https://" not in page, claim
        assert re.match(r"[a-z0-9.-]+\.[a-z]+/|unverified", page), (claim, page)


@pytest.mark.parametrize("name", NAMES)
def test_what_the_check_covers_is_what_the_preset_says(name: str) -> None:
    preset = presets.load(name)
    assert preset.body_authenticated == ("body" in preset.scheme.covers) == (name in BODY_PROVEN)
    assert preset.key_authenticated == preset.body_authenticated


@pytest.mark.parametrize("name", NAMES)
def test_it_does_not_start_without_what_it_needs(name: str) -> None:
    preset = presets.load(name)
    given = {"secrets": [SECRET], "verify_token": VERIFY_TOKEN, "public_url": URL}
    absent = {"secret": ("secrets", []), "verify_token": ("verify_token", None), "public_url": ("public_url", None)}
    assert "secret" in preset.needs
    for need in preset.needs:
        setting, nothing = absent[need]
        with pytest.raises(ConfigError, match=need):
            build("here", preset=preset, **{**given, setting: nothing})
    build("here", preset=preset, **{setting: given[setting] for setting, _ in (absent[need] for need in preset.needs)})


@pytest.mark.parametrize(("name", "kind"), SAMPLES)
async def test_a_sample_is_taken_once(tmp_path: Path, name: str, kind: str) -> None:
    async with ground(tmp_path, name) as place:
        arrival = sample(place, kind)
        first = await place.inbox.receive("here", arrival.headers, arrival.body, query=arrival.query)
        again = await place.inbox.receive("here", arrival.headers, arrival.body, query=arrival.query)
        assert (first.reply.status, first.outcome) == (200, "accepted")
        assert (again.reply.status, again.outcome, again.event_ids) == (200, "duplicate", first.event_ids)
        events = await place.events()
        assert len(events) == len(first.event_ids)
        assert all(event.key and not event.marks for event in events)
        if kind == "batch":
            assert len(events) > 1
        else:
            assert [event.type for event in events] == [kind]
            assert events[0].subject


@pytest.mark.parametrize(("name", "kind"), SAMPLES)
async def test_each_sample_is_a_new_event(tmp_path: Path, name: str, kind: str) -> None:
    async with ground(tmp_path, name) as place:
        for _ in range(2):
            arrival = sample(place, kind)
            receipt = await place.inbox.receive("here", arrival.headers, arrival.body, query=arrival.query)
            assert receipt.outcome == "accepted"


@pytest.mark.parametrize("name", NAMES)
async def test_who_does_not_know_the_secret_is_refused(tmp_path: Path, name: str) -> None:
    async with ground(tmp_path, name) as place:
        kind = next(iter(place.source.preset.samples))  # type: ignore[union-attr]
        for secret in (b"another secret", SECRET + b"x", SECRET[:-1]):
            arrival = sample(place, kind, secret)
            receipt = await place.inbox.receive("here", arrival.headers, arrival.body, query=arrival.query)
            assert (receipt.reply.status, receipt.outcome) == (401, "rejected")
        draft = sending.draft(place.source, kind)
        receipt = await place.inbox.receive("here", draft.headers, draft.body, query=draft.query)
        assert receipt.reply.status == 401
        assert await place.events() == []
        genuine = sample(place, kind)  # no forgery has used up a key
        assert (await place.inbox.receive("here", genuine.headers, genuine.body)).outcome == "accepted"


@pytest.mark.parametrize(("name", "kind"), [case for case in SAMPLES if case[0] in BODY_PROVEN])
async def test_one_changed_byte_is_refused(tmp_path: Path, name: str, kind: str) -> None:
    async with ground(tmp_path, name) as place:
        arrival = sample(place, kind)
        changed = bytearray(arrival.body)
        changed[len(changed) // 2] ^= 1
        for body in (bytes(changed), arrival.body + b" "):
            forged = replace(arrival, body=body)
            receipt = await place.inbox.receive("here", forged.headers, forged.body, query=forged.query)
            assert receipt.reply.status == 401
        assert await place.events() == []


@pytest.mark.parametrize("name", NAMES)
async def test_the_proof_never_reaches_the_store(tmp_path: Path, name: str) -> None:
    """S25: where the sender's secret travels with the arrival, it is gone before anything is written."""
    async with ground(tmp_path, name) as place:
        for scheme in _alternatives(place.source.scheme):
            draft = sending.draft(place.source, next(iter(place.source.preset.samples)))  # type: ignore[union-attr]
            arrival = scheme.sign(draft, SECRET, at=clock.now(), url=URL)
            receipt = await place.inbox.receive("here", arrival.headers, arrival.body, query=arrival.query)
            assert receipt.outcome == "accepted"
        written = place.bytes_on_disk()
        assert SECRET not in written
        assert b"content-type" in written  # the heads of the requests were kept, and this looked at them
    assert SECRET not in place.bytes_on_disk()


def _alternatives(scheme: Scheme) -> list[Scheme]:
    if isinstance(scheme, Either):
        return [one for part in scheme.schemes for one in _alternatives(part)]
    return [scheme]


def test_the_ways_in_that_carry_the_secret_itself() -> None:
    """The test above would say nothing if these were not among them."""
    places = [one.place for name in NAMES for one in _alternatives(presets.load(name).scheme) if isinstance(one, Token)]
    assert {"body:instanceToken", "body:apikey", "header:X-Telegram-Bot-Api-Secret-Token"} <= set(places)
