"""What holds for every preset there is, whoever wrote it: its samples, its signature, its window, its page.

All of it goes by `presets.names()`, so a new preset is tested by being there.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oncehook import human, presets, samples
from oncehook import settings as configuration
from oncehook.errors import ConfigError, SignatureInvalid
from oncehook.inbox import Inbox
from oncehook.ingest import Receipt
from oncehook.model import Arrival, EventDetails, EventId, Mark
from oncehook.settings.tables import SourceSettings
from oncehook.sources import PLAIN, Preset, Reply, Source, build
from oncehook.verify import DevelopmentKeys, development_keys
from tests.conftest import BUDGET

NAMES = presets.names()
SAMPLES = [(name, kind) for name in NAMES for kind in presets.load(name).samples]
PAGES = Path(__file__).resolve().parents[2] / "docs" / "providers"
URL = "https://hooks.example.com/in/every?tenant=1"

# The fact sheet: how long a key must be remembered at least, and how long the sender waits for an answer; - where it
# does not say.
SHEET = """
whatsapp-cloud     8d   1s
messenger          3d   20s
360dialog          8d   1s
evolution-api      1d   30s
evolution-go       1d   -
waha               1d   -
twilio             1d   15s
telegram           2d   -
slack              1d   3s
discord            1d   3s
stripe             31d  -
paypal             4d   -
square             4d   10s
paddle             4d   5s
mercadopago        5d   5s
shopify            2d   5s
hubspot            2d   5s
acuity             2d   -
calendly           2d   15s
typeform           1d   30s
zoom               1d   3s
sendgrid           2d   -
mailgun            1d   -
github             4d   10s
gitlab             3d   10s
linear             1d   5s
jira               1d   -
n8n                7d   -
standard-webhooks  4d   15s
cloudevents        -    -
generic            7d   -
"""
SPANS = {name: spans for name, *spans in (line.split() for line in SHEET.strip().splitlines())}
UNSIGNED = frozenset({b"paypal-cert-url"})
"""Headers of a signature that it does not cover: this one names a certificate, and the one we hold decides."""


@cache
def keys_of(name: str) -> DevelopmentKeys:
    return development_keys(presets.load(name).scheme)


def given_to(preset: Preset) -> dict[str, Any]:
    """Settings that fit a preset, everything it needs among them."""
    keys = keys_of(preset.name)
    needed = {"verify_token": b"a token", "public_url": URL, "key": "$.id"}
    return {
        "secret": keys.secrets,
        "signing": keys.signing,
        **{need: needed[need] for need in preset.needs if need in needed},
    }


@dataclasses.dataclass
class Running:
    inbox: Inbox
    source: Source
    preset: Preset

    def signed(self, draft: Arrival, *, forge: bool = False) -> Arrival:
        return samples.sign(self.source, draft, url=self.source.settings.public_url, forge=forge)

    def sample(self, kind: str) -> Arrival:
        return self.signed(samples.draft(self.source, kind))

    async def take(self, arrival: Arrival) -> Receipt:
        return await self.inbox.receive(arrival.source, arrival.headers, arrival.body, query=arrival.query)

    async def kept(self, receipt: Receipt) -> list[EventDetails]:
        found = [await self.inbox.store.get_event(EventId.parse(text)) for text in receipt.event_ids]
        assert None not in found
        return [event for event in found if event is not None]

    async def refuses(self, arrival: Arrival) -> bool:
        receipt = await self.take(arrival)
        return (receipt.outcome, receipt.reply.status) == ("rejected", 401)


def opened(folder: Path, name: str) -> Running:
    preset = presets.load(name)
    inbox = Inbox(f"sqlite:{folder}/every.db")
    return Running(inbox, inbox.add(build(name, preset=preset, budget=90.0, **given_to(preset))), preset)


@asynccontextmanager
async def running(folder: Path, name: str) -> AsyncIterator[Running]:
    on = opened(folder, name)
    async with on.inbox.running():
        yield on


def test_all_that_are_wanted_are_there() -> None:
    assert set(NAMES) >= set(SPANS)


# -- genuine and forged ------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "kind"), SAMPLES)
async def test_sample_is_taken_once(tmp_path: Path, name: str, kind: str) -> None:
    async with running(tmp_path, name) as on:
        arrival = on.sample(kind)
        receipt = await on.take(arrival)
        answer = on.source.base.answer
        if answer is None or isinstance(answer, Reply):
            assert receipt.reply.status == (answer.status if answer else on.source.base.accepted)
        assert receipt.outcome == "accepted"
        assert 200 <= receipt.reply.status < 300
        events = await on.kept(receipt)
        if kind == "batch":
            assert len(events) > 1
        else:
            assert [event.type for event in events] == [kind]
            assert on.source.redaction is not None or events[0].body == arrival.body
        assert not any(event.marks & Mark.unparsed for event in events)
        again = await on.take(arrival)
        assert again.reply.status == receipt.reply.status
        if all(event.key for event in events):
            assert (again.outcome, again.event_ids) == ("duplicate", receipt.event_ids)
        else:  # only where the preset says so: without a key nothing can be a duplicate
            assert (on.source.on_missing_key, again.outcome) == ("accept", "accepted")
        assert (await on.take(on.sample(kind))).outcome == "accepted"  # the next one is another event


@pytest.mark.parametrize(("name", "kind"), SAMPLES)
async def test_one_byte_makes_it_a_forgery(tmp_path: Path, name: str, kind: str) -> None:
    async with running(tmp_path, name) as on:
        draft = samples.draft(on.source, kind)
        arrival = on.signed(draft)
        changed = list(_changed_credentials(draft, arrival))
        if on.preset.body_authenticated:
            changed += [replace(arrival, body=body) for body in _changed_bytes(arrival.body)]
        assert changed or arrival.body != draft.body, "nothing in it proves anything"
        for one in [*changed, on.signed(draft, forge=True), draft]:
            assert await on.refuses(one), one
        # and none of them has burnt the key of the real one (R8)
        assert (await on.take(arrival)).outcome == "accepted"


def _changed_bytes(body: bytes) -> Iterator[bytes]:
    for place in (0, len(body) // 2, len(body) - 1):
        yield body[:place] + bytes([body[place] ^ 1]) + body[place + 1 :]
    yield body + b" "
    yield body[:-1]


def _changed_credentials(draft: Arrival, arrival: Arrival) -> Iterator[Arrival]:
    """Every header that signing has put there, with one byte in its middle changed; and the query, if it did that."""
    before = set(draft.headers)
    for place, (header, value) in enumerate(arrival.headers):
        if (header, value) not in before and header not in UNSIGNED:
            middle = len(value) // 2
            other = value[:middle] + bytes([value[middle] ^ 1]) + value[middle + 1 :]
            yield replace(
                arrival, headers=[*arrival.headers[:place], (header, other), *list(arrival.headers)[place + 1 :]]
            )
    if arrival.query != draft.query:
        yield replace(arrival, query=arrival.query[:-1] + bytes([arrival.query[-1] ^ 1]))


@pytest.mark.parametrize("name", NAMES)
def test_what_is_said_to_be_authenticated_is(name: str) -> None:
    preset = presets.load(name)
    if preset.body_authenticated:
        assert "body" in preset.scheme.covers
    else:
        assert not preset.key_authenticated or preset.scheme.signed_headers or "url" in preset.scheme.covers


@pytest.mark.parametrize(("name", "kind"), SAMPLES)
async def test_the_secret_is_not_kept(tmp_path: Path, name: str, kind: str) -> None:
    async with running(tmp_path, name) as on:
        assert (await on.take(on.sample(kind))).outcome == "accepted"
        await on.inbox.store.ping()
        stored = b"".join(path.read_bytes() for path in tmp_path.iterdir() if path.is_file())
        assert on.source.signing not in stored


# -- what it says of itself --------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_window_outlasts_the_horizon_twice(name: str) -> None:
    preset = presets.load(name)
    keep = preset.settings.keep_keys or PLAIN.settings.keep_keys
    assert keep >= 2 * human.seconds(preset.horizon)
    window = SPANS.get(name, "-")[0]
    assert window == "-" or keep >= human.seconds(window)


@pytest.mark.parametrize("name", NAMES)
def test_answer_comes_before_the_sender_gives_up(name: str) -> None:
    limit = SPANS.get(name, "--")[1]
    budget = presets.load(name).settings.budget or BUDGET
    assert budget < human.seconds("10s" if limit == "-" else limit)


@pytest.mark.parametrize("name", NAMES)
def test_every_claim_has_a_source(name: str) -> None:
    preset = presets.load(name)
    claims = {"scheme", "key", "horizon"}
    given = {"handshake": preset.handshake, "split": preset.settings.split, "answer": preset.answer}
    claims |= {name for name, value in given.items() if value is not None}
    assert claims <= set(preset.facts)
    assert set(preset.facts) <= {*vars(preset), *SourceSettings.__annotations__}
    for source in preset.facts.values():
        assert source
        assert "://" not in source
    assert (preset.name, bool(preset.title)) == (name, True)
    assert len(preset.samples) >= 2


@pytest.mark.parametrize("name", NAMES)
def test_needs_are_enforced(tmp_path: Path, name: str) -> None:
    preset = presets.load(name)
    assert "secret" in preset.needs
    fitting = given_to(preset)
    build(name, preset=preset, **fitting)
    for need in preset.needs:
        with pytest.raises(ConfigError, match=f"needs {need}"):
            build(name, preset=preset, **{**fitting, need: None})
    for secrets in ([b""], [b"  "]):
        with pytest.raises(ConfigError):
            build(name, preset=preset, **{**fitting, "secret": secrets})
    (tmp_path / "oncehook.toml").write_text(f'[source.x]\npreset = "{name}"\n')
    with pytest.raises(ConfigError, match="secret"):
        configuration.load(tmp_path / "oncehook.toml", env={})


# -- its page ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    page = (PAGES / f"{name}.md").read_text()
    assert re.findall(r"(?m)^## (.+)$", page) == ["Set it up", "Try it", "What you get", "What can surprise you"]
    monkeypatch.chdir(tmp_path)
    found: dict[str, str | None] = {}
    for block in re.findall(r"(?s)```toml\n(.*?)```", page):
        for file in re.findall(r'file = "([^"]+)"', block):
            (tmp_path / file).write_text("what stands in it")
        (tmp_path / "oncehook.toml").write_text(block)
        env = dict.fromkeys(re.findall(r'env = "([A-Z0-9_]+)"', block), "a secret")
        loaded = configuration.load(tmp_path / "oncehook.toml", env=env)
        assert loaded.warnings == ()
        found |= {source: about.preset for source, about in loaded.config.source.items()}
    assert name in found.values()
    lines = re.findall(r"(?m)^(?:\$ )?oncehook send (\S+) (\S+)(.*)$", page)
    others = set(re.findall(r"`(\S+)`", page.partition("\nOther samples: ")[2].partition(".\n")[0]))
    assert others <= set(presets.load(name).samples)
    shown = {*(kind.removeprefix("--") for _, kind, _ in lines), *others}
    assert shown >= set(presets.load(name).samples), "one is not shown"
    for source, kind, rest in lines:
        assert source == name or found.get(source) == name
        assert kind in {*presets.load(name).samples, "--batch"} or "--file" in rest


# -- whatever the body is ----------------------------------------------------------------------

ODD: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**25), 10**25)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
    | st.sampled_from(["", "0", "id", "\0", "\ud83d\ude00", "a:b", "x" * 700]),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.text(max_size=8), below, max_size=3),
    max_leaves=6,
)


@st.composite
def bodies(draw: st.DrawFn, name: str) -> tuple[str, bytes]:
    """A type, and for its headers a body: the sample's with something odd in it, any JSON, or any bytes."""
    preset = presets.load(name)
    kind = draw(st.sampled_from(list(preset.samples)))
    way = draw(st.integers(0, 5))
    if way == 0:
        return kind, draw(st.binary(max_size=60))
    if way == 1:
        return kind, json.dumps(draw(ODD)).encode()
    text = samples.draft(build(name, preset=preset, **given_to(preset)), kind).body
    try:
        data = json.loads(text)
    except ValueError:
        place = draw(st.integers(0, len(text)))
        return kind, text[:place] + draw(st.binary(max_size=12)) + text[place:]
    for _ in range(draw(st.integers(1, 3))):
        spots = list(_spots(data))
        if spots:
            holder, step = draw(st.sampled_from(spots))
            if draw(st.booleans()):
                holder[step] = draw(ODD)
            else:
                del holder[step]
    return kind, json.dumps(data).encode()


def _spots(data: Any) -> Iterator[tuple[Any, Any]]:
    """Every place in a document where something stands."""
    for step in list(data) if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ():
        yield data, step
        yield from _spots(data[step])


@pytest.mark.parametrize("name", NAMES)
def test_no_genuine_body_is_refused_or_lost(tmp_path: Path, name: str) -> None:
    with asyncio.Runner() as runner:
        on = opened(tmp_path, name)
        runner.run(on.inbox.start())

        @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
        @given(bodies(name))
        def check(drawn: tuple[str, bytes]) -> None:
            runner.run(_is_kept(on, *drawn))

        try:
            check()
        finally:
            runner.run(on.inbox.stop())


async def _is_kept(on: Running, kind: str, body: bytes) -> None:
    try:
        arrival = on.signed(samples.draft(on.source, kind, body=body))
    except (ConfigError, SignatureInvalid):  # the body is part of the proof, and this one cannot be: it is not genuine
        assert await on.refuses(samples.draft(on.source, kind, body=body))
        return
    receipt = await on.take(arrival)
    assert receipt.outcome in ("accepted", "duplicate", "conflict", "ignored", "handshake"), receipt
    assert 200 <= receipt.reply.status < 300
    if receipt.outcome == "ignored":  # there was nothing in it
        assert b"[]" in arrival.body
    elif receipt.outcome != "handshake":
        assert await on.kept(receipt)
