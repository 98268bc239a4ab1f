"""Rejected arrivals: what is kept of one, how little a flood costs, and the diagnosis for its owner."""

from __future__ import annotations

import hashlib
import hmac
import json
from datetime import UTC, datetime, timedelta

import pytest

from oncehook import clock
from oncehook.errors import Rejected, SignatureInvalid
from oncehook.ingest import Receiver
from oncehook.model import Arrival, Rejection, unpack_head
from oncehook.observe import Observer
from oncehook.rejections import BODY_KEPT, MOST_OF_SOURCE, MOST_SAMPLES, MOST_SECRETS, Samples, diagnose, keep_bytes
from oncehook.secret import OldSecret
from oncehook.sources import Source, build

SECRET, OTHER = "s3cret-of-partner-0123456789", "s3cret-of-orders-9876543210"
HMAC = {"scheme": "hmac", "header": "X-Signature", "prefix": "sha256=", "algorithm": "sha256", "encoding": "hex"}
PARTNER = build("partner", verify=HMAC, secret=SECRET, key="$.id")
ORDERS = build("orders", verify=HMAC, secret=OTHER, key="$.id")
STRIPE = build("stripe", preset="stripe", secret="whsec_0123456789abcdefghij")
SOURCES = {one.name: one for one in (PARTNER, ORDERS, STRIPE)}
BODY = b'{"id": 1, "name": "Ann"}'


def sign(body: bytes, secret: str = SECRET) -> str:
    return "sha256=" + hmac.digest(secret.encode(), body, "sha256").hex()


def arrival(body: bytes = BODY, source: str = "partner", **headers: str) -> Arrival:
    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Arrival(source, pairs, body, path=f"/in/{source}", peer="192.0.2.1")


def reject(came: Arrival, source: Source | None = PARTNER, at: datetime | None = None) -> Rejection:
    """What is kept of an arrival that the source rejects."""
    with pytest.raises(Rejected) as caught:
        source = Receiver(SOURCES, None, None, None)._admit(source, came)  # type: ignore[arg-type]
    error = caught.value
    reason = error.reason if isinstance(error, SignatureInvalid) else error.code
    kept = Rejection(came.source, at or clock.now_utc(), error.code, reason, came.peer, len(came.body))
    if source is not None:
        kept.head, kept.body = keep_bytes(source, came)
    return kept


def why(came: Arrival, source: Source | None = PARTNER, **about: datetime) -> str:
    return diagnose(reject(came, source, **about), SOURCES) or ""


# -- what is kept ------------------------------------------------------------------------------


def test_head_and_beginning_are_kept_without_credentials() -> None:
    source = build("hook", verify="bearer", secret=SECRET, redact=["$.card"], key="none")
    body = json.dumps({"card": "4111", "seen": SECRET, "rest": "x" * 5000}).encode()
    head, kept = keep_bytes(source, arrival(body, "hook", authorization=f"Bearer {SECRET}x", cookie="a=b", x_note="hi"))
    assert dict(unpack_head(head)[2]) == {"authorization": "[masked]", "cookie": "[masked]", "x-note": "hi"}
    assert kept is not None
    assert len(kept) == BODY_KEPT
    assert b"4111" not in kept
    assert SECRET.encode() not in kept + head


def test_what_cannot_be_redacted_is_not_kept() -> None:
    source = build("hook", verify="bearer", secret=SECRET, redact=["$.card"], key="none")
    assert keep_bytes(source, arrival(b'{"card": "4111"', "hook"))[1] is None
    assert keep_bytes(source, arrival(b'{"a": "%b"}' % (b"x" * 300_000), "hook"))[1] is None
    plain = build("hook", verify="bearer", secret=SECRET, key="none")
    assert keep_bytes(plain, arrival(b'{"card": "4111"', "hook"))[1] == b'{"card": "4111"'


def test_a_secret_at_the_cut_is_masked() -> None:
    body = b"x" * (BODY_KEPT - 5) + SECRET.encode() + b"y" * 300_000
    assert SECRET.encode()[:5] not in (keep_bytes(PARTNER, arrival(body))[1] or b"")


def test_a_flood_keeps_the_bytes_of_a_few() -> None:
    samples = Samples()
    made = [Rejection("x", datetime.now(UTC), "signature_invalid", "mismatch", "", 24) for _ in range(500)]
    sources = [build(f"s{n}", verify=HMAC, secret=SECRET, key="$.id") for n in range(10)]
    for n, one in enumerate(made):
        samples.add(one, sources[n % 10] if n < 200 else sources[0], arrival())
    assert not any(one.head for one in made)  # nothing is read while requests are answered
    samples.take()
    assert sum(one.head is not None for one in made) == MOST_SAMPLES
    samples = Samples()
    more = [Rejection("x", datetime.now(UTC), "signature_invalid", "mismatch", "", 24) for _ in range(100)]
    for one in more:
        samples.add(one, PARTNER, arrival())
    samples.take()
    assert [one.head is not None for one in more] == [True] * MOST_OF_SOURCE + [False] * (100 - MOST_OF_SOURCE)


def test_large_bodies_do_not_add_up() -> None:
    samples = Samples()
    big = arrival(b"x" * 400_000)
    made = [Rejection("x", datetime.now(UTC), "signature_invalid", "mismatch", "", 400_000) for _ in range(5)]
    for one in made:
        samples.add(one, PARTNER, big)
    samples.take()
    assert sum(one.head is not None for one in made) == 2


def test_nothing_is_kept_of_an_unknown_source() -> None:
    observer = Observer("sqlite")
    observer.note_rejection(arrival(source="nobody"), None, SignatureInvalid("unknown source"))
    observer.note_rejection(arrival(), PARTNER, SignatureInvalid("mismatch"))
    [unknown, known] = observer.take_counts()[0]
    assert (unknown.head, unknown.body) == (None, None)
    assert (known.source, known.body) == ("partner", BODY)


# -- the diagnosis -----------------------------------------------------------------------------


def test_an_old_timestamp() -> None:
    at = clock.now_utc()
    signed = STRIPE.scheme.sign(arrival(source="stripe"), STRIPE.signing, at=at.timestamp() - 312)
    said = why(signed, STRIPE, at=at)
    assert "312 s old" in said
    assert "tolerance 5 min" in said
    early = STRIPE.scheme.sign(arrival(source="stripe"), STRIPE.signing, at=at.timestamp() + 900)
    assert "900 s in the future" in why(early, STRIPE, at=at)


def test_an_ended_secret() -> None:
    ended = datetime.now(UTC) - timedelta(days=1)
    old = build("partner", verify=HMAC, secret=[SECRET, OldSecret(OTHER, ended, "OLD_ONE")], key="$.id")
    kept = reject(arrival(x_signature=sign(BODY, OTHER)), old)
    said = diagnose(kept, {"partner": old}) or ""
    assert "Signed with OLD_ONE" in said
    assert f"ended on {ended:%Y-%m-%d}" in said


def test_the_secret_of_another_source() -> None:
    kept = reject(arrival(x_signature=sign(BODY, OTHER)))
    assert "secret of the source orders" in (diagnose(kept, SOURCES) or "")
    # only of sources that the reader sees, and only for a sample
    assert "orders" not in (diagnose(kept, {"partner": PARTNER}) or "")
    assert "orders" not in (diagnose(kept, SOURCES, tries_secrets=False) or "")


def test_at_most_eight_secrets_are_tried() -> None:
    many = {
        f"a{n}": build(f"a{n}", verify=HMAC, secret=f"another-secret-{n:020}", key="$.id") for n in range(MOST_SECRETS)
    }
    kept = reject(arrival(x_signature=sign(BODY, OTHER)))
    assert "orders" not in (diagnose(kept, {"partner": PARTNER, **many, "orders": ORDERS}) or "")
    many.popitem()
    assert "orders" in (diagnose(kept, {"partner": PARTNER, **many, "orders": ORDERS}) or "")


@pytest.mark.parametrize(
    ("sent", "came"),
    [
        (BODY, BODY + b"\n"),
        (BODY + b"\n", BODY),
        (b'{"a":1}\n{"b":2}', b'{"a":1}\r\n{"b":2}'),
        (b'{"id":1,"name":"Ann"}', BODY),
        ('{"id": "ä"}'.encode(), b'{"id":"\\u00e4"}'),
        (b'{"id": "\\u00e4"}', '{"id":"ä"}'.encode()),
    ],
)
def test_a_body_that_was_changed_on_the_way(sent: bytes, came: bytes) -> None:
    assert "changed on the way: the signature fits it" in why(arrival(came, x_signature=sign(sent)))


def test_a_content_length_that_does_not_fit() -> None:
    said = why(arrival(x_signature=sign(b"longer"), content_length="1999"))
    assert "content-length says 1,999 bytes, 24 came" in said


def test_a_missing_header() -> None:
    assert "The header X-Signature is missing. The sender does not sign" in why(arrival())
    assert "There is x-hub-signature-256" in why(arrival(x_hub_signature_256="sha256=00"))
    assert "The header Stripe-Signature is missing" in why(arrival(source="stripe"), STRIPE)


def test_another_algorithm_or_prefix() -> None:
    sha1 = hashlib.sha1(BODY).hexdigest()
    assert "begins with 'sha1='; 'sha256=' is expected" in why(arrival(x_signature=f"sha1={sha1}"))
    assert "has no prefix; 'sha256=' is expected" in why(arrival(x_signature=sha1))
    assert "looks like sha1 in hex; sha256 in hex is expected" in why(arrival(x_signature=f"sha256={sha1}"))
    assert "looks like sha256 in base64" in why(arrival(x_signature="sha256=" + "A" * 43 + "="))


def test_an_unknown_source() -> None:
    said = why(arrival(source="strpe"), None)
    assert said == "No source has the address …/strpe. Did you mean …/stripe?"
    assert "Check the address" in why(arrival(source="zzz"), None)


def test_the_address_of_a_source_that_is_gone_is_that_of_the_request() -> None:
    for path in ("/hooks/partner", "/hooks/partner/42", "/partner/partner"):
        kept = reject(Arrival("partner", [], BODY, path=path, peer="192.0.2.1"))
        said = diagnose(kept, {"partner2": build("partner2", verify="none")}) or ""
        base = path.removesuffix("/42").removesuffix("partner")
        assert said == f"No source has the address {base}partner. Did you mean {base}partner2?"


def test_a_body_that_is_too_long_to_compare() -> None:
    said = why(arrival(b"x" * 5000, x_signature=sign(b"y")))
    assert "Only bodies up to" in said


@pytest.mark.parametrize("source", [PARTNER, STRIPE])
def test_no_diagnosis_repeats_a_secret(source: Source) -> None:
    for came in (arrival(), arrival(x_signature=sign(BODY, OTHER)), arrival(x_signature=sign(BODY + b"\n"))):
        said = why(came, source)
        assert said
        assert not any(secret.decode() in said for one in SOURCES.values() for secret in one.secrets)


def test_a_sender_learns_nothing_of_it() -> None:
    """The answer is the same for each of them: it is made before anything is kept."""
    answers = set()
    for came, source in (
        *((arrival(), PARTNER), (arrival(x_signature=sign(BODY, OTHER)), PARTNER), (arrival(source="nobody"), None)),
        (arrival(x_signature="sha1=00"), PARTNER),
    ):
        with pytest.raises(SignatureInvalid) as caught:
            Receiver(SOURCES, None, None, None)._admit(source, came)  # type: ignore[arg-type]
        answers.add((str(caught.value), caught.value.code, caught.value.status))
    assert len(answers) == 1
