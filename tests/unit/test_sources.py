"""A source, compiled from settings and preset: what is believed, what is kept, what is refused at start."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, date, datetime, timedelta
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import BUDGET

from oncehook import clock
from oncehook.errors import ConfigError, SignatureInvalid
from oncehook.inbox import Inbox
from oncehook.model import Arrival, start_ids_anew
from oncehook.rules import DEFAULT_KEY
from oncehook.secret import OldSecret
from oncehook.settings.tables import RetentionConfig
from oncehook.sources import Preset, Reply, Source, Splitter, build, split_at
from oncehook.verify import Basic, Either, Hmac, Nothing, Scheme, StandardWebhooks, Token
from oncehook.web.connection import encode_reply

HMAC = Hmac(header="X-Signature")
PRESET = Preset(
    name="acme", title="Acme", scheme=HMAC, key="$.id", subject="$.object", type="$.kind", on_missing_key="body_hash",
    max_body="4MiB", budget="2s", keep_keys="10d", ignore=("ping",), redact=("$.password",), volatile=("$.try",),
    unavailable=429, needs=("secret", "verify_token"),
)  # fmt: skip


def acme(**settings: Any) -> Source:
    return build("acme", preset=PRESET, secret=[b"s"], verify_token=b"t", **settings)


def arrival(body: bytes = b"{}", **headers: str) -> Arrival:
    return Arrival("s", [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()], body)


# -- no source without a check (S4) ------------------------------------------------------------


def test_verification_must_be_said() -> None:
    with pytest.raises(ConfigError, match="does not say how its arrivals are verified"):
        build("orders")
    build("orders", verify=Nothing()).verifier(arrival())


@pytest.mark.parametrize("secrets", [[], [b""], [b"  "], [b"good", b""]])
@pytest.mark.parametrize("scheme", [HMAC, Token(place="header:X-Token"), StandardWebhooks(), Basic()])
def test_no_secret_no_source(scheme: Scheme, secrets: list[bytes]) -> None:
    with pytest.raises(ConfigError):
        build("orders", verify=scheme, secret=secrets)


@pytest.mark.parametrize("given", [{"secret": [b"s"]}, {"verify_token": b"t"}, {}])
def test_what_a_preset_needs(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"needs (secret|verify_token): "):
        build("acme", preset=PRESET, **given)


def test_a_verifier_of_ones_own_replaces_that_of_the_preset() -> None:
    source = build("acme", preset=PRESET, verify=Token(place="header:X-Token"), secret=[b"t"])
    source.verifier(arrival(x_token="t"))
    with pytest.raises(SignatureInvalid):
        source.verifier(arrival())
    assert source.masked >= {b"x-token"}
    assert source.rules.read(arrival(b'{"id": 1}')).key == ("1",)


# -- settings over preset over defaults --------------------------------------------------------


def test_keys_are_remembered_as_the_retention_says_where_nothing_else_does() -> None:
    said, unsaid, preset = (
        build("a", verify=HMAC, secret=[b"s"], keep_keys="5d"),
        build("b", verify="none"),
        build("c", preset="stripe", secret=b"whsec_0123456789"),
    )
    for source in (said, unsaid, preset):
        source.keep_keys_for(3 * 86400.0)
    assert [one.settings.keep_keys / 86400 for one in (said, unsaid, preset)] == [5, 3, 62]
    assert unsaid.missing_keep == 3 * 86400
    unsaid.keep_keys_for(None)
    assert unsaid.settings.keep_keys == 3 * 86400


def test_defaults() -> None:
    source = build("orders", verify=HMAC, secret=[b"s"])
    assert (source.settings.max_body, BUDGET, source.settings.keep_keys) == (1 << 20, 0.8, 30 * 86400)
    assert (source.on_missing_key, source.settings.on_conflict, source.path) == ("accept", "accept", "orders")
    assert (source.base.unavailable, source.loopback_only) == (503, False)


def test_the_preset_speaks_where_the_settings_do_not() -> None:
    source = acme()
    assert (source.settings.max_body, source.settings.budget, source.settings.keep_keys) == (4 << 20, 2.0, 10 * 86400)
    assert (source.on_missing_key, source.base.unavailable) == ("body_hash", 429)
    read = source.rules.read(arrival(b'{"id": 1, "object": "o", "kind": "k"}'))
    assert (read.key, read.subject, read.type) == (("1",), "o", "k")
    assert source.ignored is not None
    assert source.ignored.match("ping")
    assert not source.ignored.match("pinger")
    assert source.body_hash(b'{"try": 1}') == source.body_hash(b'{"try": 2}')


def test_the_settings_have_the_last_word() -> None:
    source = acme(
        key="$.other", subject="$.s", type="$.t", on_missing_key="reject", max_body=10, budget=9.0, keep_keys=5.0,
        ignore=[], redact=[], volatile=[], on_conflict="reject", path="p4th",
    )  # fmt: skip
    assert (source.settings.max_body, source.settings.budget, source.settings.keep_keys, source.path) == (
        10,
        9.0,
        5.0,
        "p4th",
    )
    assert (source.on_missing_key, source.settings.on_conflict) == ("reject", "reject")
    assert (source.ignored, source.redaction) == (None, None)
    read = source.rules.read(arrival(b'{"id": 1, "other": 2, "s": "o", "t": "k"}'))
    assert (read.key, read.subject, read.type) == (("2",), "o", "k")
    assert source.body_hash(b'{"try": 1}') != source.body_hash(b'{"try": 2}')


def test_no_key_can_be_asked_for() -> None:
    assert acme(key="none").rules.read(arrival(b'{"id": 1}')).key is None


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("accept", ("accept", 60)), ("body_hash", ("body_hash", 60)), ("body_hash:2s", ("body_hash", 2))],
)
def test_what_a_missing_key_means(policy: str, expected: tuple[str, float]) -> None:
    source = build("orders", verify=Nothing(), on_missing_key=policy, keep_keys=60)
    assert (source.on_missing_key, source.missing_keep) == expected


def test_tolerance_can_be_turned_off_by_name() -> None:
    stamped = Hmac(header="X-Signature", signed="{timestamp}.{body}", timestamp="header:X-Time")
    old = stamped.sign(arrival(), b"s", at=1000.0)
    with pytest.raises(SignatureInvalid):
        build("orders", verify=stamped, secret=[b"s"]).verifier(old)
    build("orders", verify=stamped, secret=[b"s"], tolerance="off").verifier(old)
    preset = Preset(name="old", title="Old", scheme=stamped, tolerance="off")
    build("old", preset=preset, secret=[b"s"]).verifier(old)


# -- where a key may stand ---------------------------------------------------------------------


STANDARD = b"whsec_MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIz"


@pytest.mark.parametrize(
    ("scheme", "secrets", "expected"),
    [
        (Nothing(), [], DEFAULT_KEY),
        (Token(place="header:X-Token"), [b"t"], DEFAULT_KEY),
        (Basic(), [b"a:b"], DEFAULT_KEY),
        (HMAC, [b"s"], DEFAULT_KEY[1:]),
        (StandardWebhooks(), [STANDARD], [*DEFAULT_KEY[1:], "header:webhook-id"]),
        (StandardWebhooks(prefix="svix"), [STANDARD], [*DEFAULT_KEY[1:], "header:svix-id"]),
    ],
)
def test_a_header_is_a_key_by_default_where_nothing_better_is_signed(
    scheme: Scheme, secrets: list[bytes], expected: list[str]
) -> None:
    source = build("orders", verify=scheme, secret=secrets or None)  # type: ignore[typeddict-item]
    assert source.places["key"] == expected


# -- what must not be kept (S25) ---------------------------------------------------------------


def test_headers_that_carry_secrets_are_masked() -> None:
    always = {b"authorization", b"proxy-authorization", b"cookie"}
    assert build("a", verify=Nothing()).masked >= always
    assert build("a", verify=Token(place="header:X-Key"), secret=[b"t"]).masked >= {*always, b"x-key"}


@pytest.mark.parametrize(
    "scheme", [Token(place="body:auth.token"), Either(HMAC, Token(place="body:auth.token"))], ids=["token", "either"]
)
def test_a_secret_in_the_body_is_redacted_unless_told_otherwise(scheme: Scheme) -> None:
    body = b'{"auth": {"token": "t", "user": "u"}, "id": 1}'
    source = build("a", verify=scheme, secret=[b"t"])
    assert source.redaction is not None
    assert json.loads(source.redaction(body)) == {"auth": {"token": "[redacted]", "user": "u"}, "id": 1}
    assert build("a", verify=scheme, secret=[b"t"], redact=[]).redaction is None


# -- secrets that end (S6) ---------------------------------------------------------------------


@pytest.fixture
def passing() -> Iterator[None]:
    before = clock._skew
    yield
    clock._skew = before
    start_ids_anew()


@pytest.mark.usefixtures("passing")
def test_an_old_secret_verifies_until_its_end() -> None:
    end = clock.now_utc() + timedelta(hours=1)
    later = clock.now_utc() + timedelta(hours=3)
    source = build(
        "a", verify=HMAC, secret=[OldSecret(b"older secret", until=later), b"new secret", OldSecret("old secret", end)]
    )

    def genuine() -> list[bytes]:
        found = []
        for secret in (b"new secret", b"old secret", b"older secret"):
            with suppress(SignatureInvalid):
                source.verifier(HMAC.sign(Arrival("a", [], b"{}"), secret, at=clock.now()))
                found.append(secret)
        assert set(found) == set(source.valid_secrets)
        return found

    assert genuine() == [b"new secret", b"old secret", b"older secret"]
    assert source.secret_warnings() == []
    clock.forward(3601)
    assert genuine() == [b"new secret", b"older secret"]
    [(warning, _)] = source.secret_warnings()
    assert "is over" in warning
    assert "old secret" not in warning.replace("an old secret", "")
    clock.forward(7200)
    assert genuine() == [b"new secret"]
    assert len(source.secret_warnings()) == 2
    assert source.signing == b"new secret"
    assert source.masking(b"x old secret x older secret") == b"x [redacted] x [redacted]", "over, and still a secret"


def test_a_date_counts_to_its_end() -> None:
    assert OldSecret(b"x", until="2026-12-01").ends_at == datetime(2026, 12, 2, tzinfo=UTC)
    assert OldSecret(b"x", until=date(2026, 12, 1)).ends_at == datetime(2026, 12, 2, tzinfo=UTC)
    assert "hidden" not in repr(OldSecret(b"hidden", until="2026-12-01"))


def test_a_source_whose_every_secret_ends_is_refused() -> None:
    with pytest.raises(ConfigError, match="must name a secret without until"):
        build("a", verify=HMAC, secret=[OldSecret(b"old secret", until="2099-12-01")])
    with pytest.raises(ConfigError, match="must be a date"):
        build("a", verify=HMAC, secret=[b"new secret", OldSecret(b"old secret", until="tomorrow")])


# -- networks ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("peer", "allowed"),
    [("192.0.2.1", True), ("192.0.3.1", False), ("2001:db8::1", True), ("::1", False), ("unknown", False), ("", False)],
)
def test_allowed_networks(peer: str, allowed: bool) -> None:
    networks = [ip_network("192.0.2.0/24"), ip_network("2001:db8::/32")]
    assert build("a", verify=Nothing(), ip_allow=networks).allows(peer) is allowed
    assert build("a", verify=Nothing()).allows(peer)


# -- splitting ---------------------------------------------------------------------------------


def parts(splitter: Splitter, data: Any) -> list[Any]:
    return list(splitter(data, arrival()))


@pytest.mark.parametrize(
    ("path", "data", "expected"),
    [
        ("$", [1, 2], [[1], [2]]),
        ("$[*]", [1], [[1]]),
        ("$", {"a": 1}, [{"a": 1}]),
        ("$.a", {"a": [1, 2], "b": 3}, [{"a": [1], "b": 3}, {"a": [2], "b": 3}]),
        ("$.a[*]", {"a": [1]}, [{"a": [1]}]),
        ("$.a.b", {"a": {"b": [1, 2], "c": 3}}, [{"a": {"b": [1], "c": 3}}, {"a": {"b": [2], "c": 3}}]),
        ("$.a", {"a": []}, []),
        ("$.a", {"a": "text"}, [{"a": "text"}]),
        ("$.a.b", {"a": [1]}, [{"a": [1]}]),
        ("$.a", None, [None]),
    ],
)
def test_each_part_is_the_envelope_with_one_item(path: str, data: Any, expected: list[Any]) -> None:
    before = json.dumps(data)
    assert parts(split_at(path), data) == expected
    assert json.dumps(data) == before


def test_parts_are_made_one_by_one() -> None:
    # All at once, a small body with a large envelope and many items would fill the memory.
    made = split_at("$.a")({"a": [1, 2], "b": 3}, arrival())
    assert iter(made) is made


@pytest.mark.parametrize("path", ["", "events", "$.a[0]", "$..a", "$.a[?@.b]", "$.", "$['a']", "$.a b"])
def test_what_is_not_the_path_of_an_array(path: str) -> None:
    with pytest.raises(ConfigError, match="split takes the path of an array"):
        split_at(path)


def test_a_program_may_give_a_list_of_schemes_as_settings_do(tmp_path: Path) -> None:
    inbox = Inbox(f"sqlite:{tmp_path}/inbox.db")
    verify: list[str | dict[str, object]] = [{"scheme": "hmac", "header": "X-Signature"}, "bearer"]
    source = inbox.source("orders", verify=verify, secret="s", key="$.id")
    assert not source.loopback_only
    source.verifier(arrival(authorization="Bearer s"))
    with pytest.raises(SignatureInvalid):
        source.verifier(arrival(authorization="Bearer t"))
    with pytest.raises(ConfigError, match="needs a secret"):
        inbox.source("others", verify=["bearer", "basic"])


# -- answers -----------------------------------------------------------------------------------


def test_an_answer_without_content_does_not_state_its_length() -> None:
    kind = (b"content-type", b"application/json")
    assert Reply(204).framed_headers == [kind]  # RFC 9110, 8.6
    assert Reply(200, b"{}").framed_headers == [kind, (b"content-length", b"2")]
    head = b"HTTP/1.1 204 No Content\r\ncontent-type: application/json\r\n"
    assert encode_reply(Reply(204), keep_alive=True) == head + b"\r\n"
    assert encode_reply(Reply(204), keep_alive=False) == head + b"connection: close\r\n\r\n"
    assert encode_reply(Reply(200), keep_alive=True).endswith(b"content-length: 0\r\n\r\n")


async def test_an_inbox_applies_its_retention_to_every_source(tmp_path: Path) -> None:
    """To those of the program, and to those that are made while it runs."""
    inbox = Inbox(f"sqlite:{tmp_path / 'inbox.db'}")
    inbox.source("own", verify="none")
    inbox.retention = RetentionConfig(keep_keys=3 * 86400.0)
    async with inbox.running():
        await inbox.define.source("stored", verify="none")
        stored = await inbox.definitions.find_source("stored")
        assert stored is not None
        assert [one.settings.keep_keys for one in (inbox.sources["own"], stored)] == [3 * 86400.0] * 2
