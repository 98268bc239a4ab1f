"""Whatever bytes come in: a verifier returns None or raises SignatureInvalid, and None for what was signed (S2)."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from verify_cases import CASES, Case

from oncehook import clock
from oncehook.errors import SignatureInvalid
from oncehook.model import Arrival
from oncehook.verify import Verifier

REASONS = {"missing", "malformed", "mismatch", "stale", "repeated"}
NOW = clock.now()

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
quick = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])

hexadecimal = st.text("0123456789abcdefABCDEFg", min_size=0, max_size=130).map(str.encode)
base64ish = st.text("ABCxyz019+/=-_.", max_size=130).map(str.encode)
digits = st.one_of(st.integers(-10, 10**18).map(lambda n: str(n).encode()), st.just(str(int(NOW)).encode()))
shaped = st.one_of(
    st.binary(max_size=200),
    st.builds(lambda start, value: start + value,
              st.sampled_from([b"sha256=", b"v0=", b"v1=", b"v1,", b"v1a,", b"Bearer ", b"Basic ", b"JWT ", b"", b" "]),
              st.one_of(hexadecimal, base64ish)),
    st.builds(lambda t, s, v: b"t=%b,v1=%b,ts=%b;h1=%b" % (t, s, t, v), digits, hexadecimal, hexadecimal),
    st.builds(lambda a, b: b"v1,%b v1a,%b" % (a, b), base64ish, base64ish),
    digits,
    st.sampled_from([b"key=x,algorithm=HMAC_SHA256", b"algorithm=,algorithm=", b"algorithm=MD5", b"SHA256withRSA",
                     b"2026-01-01T00:00:00Z", b"0001-01-01T00:00:00+23:59", b"9999-12-31T23:59:59-23:59",
                     b"application/x-www-form-urlencoded", b"a" * 10_000, b"=" * 10_000, b"v1," * 3000]),
)  # fmt: skip
json_bits = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=10)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["signature", "timestamp", "token", "instanceToken", "webhookTimestamp", "x"]), inner
        ),
    ),
    max_leaves=6,
)
bodies = st.one_of(
    st.binary(max_size=300),
    json_bits.map(lambda value: json.dumps(value).encode()),
    st.sampled_from(
        [b"", b"{}", b"[" * 5000, b'{"signature":{"timestamp":1e999}}', b"signature=1&timestamp=2&token=3"]
    ),
)


def names_of(case: Case) -> list[bytes]:
    signed = case.scheme.sign(case.draft(), case.keys().signing, at=NOW, url=case.url)
    names = {name for name, _ in signed.headers} | {b"content-type", b"x-twilio-webhooks-signature-settings"}
    return sorted(names | {name.replace(b"-", b"_") for name in names})


def verifier(case: Case) -> Verifier:
    return case.scheme.verifier(case.keys().secrets, url=case.url)


@every_case
@quick
@given(data=st.data())
def test_forged_arrivals_are_refused_and_nothing_else_happens(case: Case, data: st.DataObject) -> None:
    name = st.one_of(st.sampled_from(names_of(case)), st.binary(max_size=12).map(bytes.lower))
    arrival = Arrival(
        "fuzz",
        data.draw(st.lists(st.tuples(name, shaped), max_size=8)),
        data.draw(bodies),
        query=data.draw(st.one_of(st.just(case.query), shaped, st.just(b"access_token=&bodySHA256=&data.id="))),
        method=data.draw(st.sampled_from(["POST", "GET", "pöst", ""])),
    )
    with pytest.raises(SignatureInvalid) as refusal:
        verifier(case)(arrival)
    assert refusal.value.reason in REASONS


@every_case
@quick
@given(data=st.data())
def test_one_header_replaced_never_raises_anything_else(case: Case, data: st.DataObject) -> None:
    signed = case.scheme.sign(case.draft(), case.keys().signing, at=NOW, url=case.url)
    chosen = data.draw(st.sampled_from([name for name, _ in signed.headers]))
    value = data.draw(shaped)
    headers = [(name, value if name == chosen else old) for name, old in signed.headers]
    arrival = replace(signed, headers=headers, query=data.draw(st.sampled_from([signed.query, b"", b"&=&%zz=%"])))
    with suppress(SignatureInvalid):
        verifier(case)(arrival)


body_covered = pytest.mark.parametrize(
    "case",
    [case for case in CASES if "body" in case.scheme.covers and case.name != "twilio-form"],
    ids=lambda case: case.name,
)


@body_covered
@quick
@given(data=st.data())
def test_no_other_body_passes_with_a_genuine_signature(case: Case, data: st.DataObject) -> None:
    signed = case.scheme.sign(case.draft(), case.keys().signing, at=NOW, url=case.url)
    body = data.draw(
        st.one_of(st.binary(max_size=300), st.binary(min_size=1, max_size=3).map(lambda end: signed.body + end))
    )
    if body == signed.body:
        return
    with pytest.raises(SignatureInvalid):
        verifier(case)(replace(signed, body=body))
