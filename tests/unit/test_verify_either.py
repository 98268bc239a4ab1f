"""Alternatives: which scheme decides, and that a weaker one never rescues a stronger one that failed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from verify_cases import GITLAB, GITLAB_ONLY_SIGNED, JIRA, NOW

from oncehook import clock
from oncehook.errors import ConfigError, SignatureInvalid
from oncehook.model import Arrival
from oncehook.verify import Basic, Ed25519, Either, Hmac, Jwt, PayPal, SecretError, SendGrid, StandardWebhooks
from oncehook.verify.readers import put_header


@pytest.fixture(autouse=True)
def held_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "now", lambda: NOW)


WHSEC = b"whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


def test_gitlab_takes_either_credential() -> None:
    draft = Arrival("gitlab", [], b"{}")
    verify = GITLAB.verifier([WHSEC, b"plain token"])
    verify(GITLAB.sign(draft, WHSEC, at=NOW))
    verify(GITLAB.sign(draft, b"plain token", at=NOW))
    GITLAB.verifier([b"plain token"])(GITLAB.sign(draft, b"plain token", at=NOW))


def test_a_wrong_signature_is_not_rescued_by_a_token_beside_it() -> None:
    verify = GITLAB.verifier([WHSEC, b"plain token"])
    arrival = GITLAB.sign(Arrival("gitlab", [], b"{}"), WHSEC, at=NOW)
    put_header(arrival, "x-gitlab-token", b"plain token")
    verify(arrival)
    with pytest.raises(SignatureInvalid) as refusal:
        verify(replace(arrival, body=b"{} "))
    assert refusal.value.reason == "mismatch"
    for value in (b"", b"v1,", b"v9,AAAA"):
        broken = replace(arrival)
        put_header(broken, "webhook-signature", value)
        with pytest.raises(SignatureInvalid):
            verify(broken)
    twin = replace(arrival, headers=[(name.replace(b"webhook-sig", b"webhook_sig"), v) for name, v in arrival.headers])
    with pytest.raises(SignatureInvalid):
        verify(twin)


def test_a_signature_that_nobody_can_check_is_as_good_as_absent() -> None:
    # GitLab sends both while people migrate; who configured the token only is not shut out
    arrival = GITLAB.sign(Arrival("gitlab", [], b"{}"), WHSEC, at=NOW)
    put_header(arrival, "x-gitlab-token", b"plain token")
    GITLAB.verifier([b"plain token"])(arrival)


def test_every_tries_all_but_refuses_what_is_repeated() -> None:
    hex_form, base64_form = Hmac(header="X-Signature"), Hmac(header="X-Signature", encoding="base64")
    both = Either(hex_form, base64_form, every=True)
    draft = Arrival("s", [], b"{}")
    for scheme in (hex_form, base64_form):
        arrival = scheme.sign(draft, b"s", at=NOW)
        both.verifier([b"s"])(arrival)
        for headers in ([*arrival.headers, (b"x_signature", b"1")], [*arrival.headers, *arrival.headers]):
            with pytest.raises(SignatureInvalid) as refusal:
                both.verifier([b"s"])(replace(arrival, headers=headers))
            assert refusal.value.reason == "repeated"
        with pytest.raises(SignatureInvalid) as refusal:
            both.verifier([b"s"])(replace(arrival, body=b"{} "))
        assert refusal.value.reason == "mismatch"
        # without `every`, the first that shows decides
    with pytest.raises(SignatureInvalid):
        Either(hex_form, base64_form).verifier([b"s"])(base64_form.sign(draft, b"s", at=NOW))


def test_every_does_not_look_for_a_rescue_once_something_is_repeated() -> None:
    first, second = Hmac(header="X-First"), Hmac(header="X-Second")
    both = Either(first, second, every=True)
    arrival = second.sign(first.sign(Arrival("s", [], b"{}"), b"s", at=NOW), b"s", at=NOW)
    both.verifier([b"s"])(arrival)
    with pytest.raises(SignatureInvalid) as refusal:
        both.verifier([b"s"])(replace(arrival, headers=[*arrival.headers, (b"x_first", b"1")]))
    assert refusal.value.reason == "repeated"


def test_alternatives_keep_their_errors() -> None:
    with pytest.raises(ConfigError):
        Either()
    with pytest.raises(ConfigError, match="public URL"):
        Either(Hmac(header="X"), Hmac(header="Y", signed="{url}{body}")).verifier([b"s"])
    with pytest.raises(SecretError):
        Either(Basic(), StandardWebhooks(bare=False)).verifier([b"plain"])
    with pytest.raises(SecretError):
        GITLAB_ONLY_SIGNED.verifier([WHSEC, b"plain"])
    with pytest.raises(SecretError):
        GITLAB_ONLY_SIGNED.sign(Arrival("s", [], b""), b"plain", at=NOW)


def test_jira_hmac_and_jwt() -> None:
    verify = JIRA.verifier([b"s"])
    draft = Arrival("jira", [], b"{}")
    verify(JIRA.sign(draft, b"s", at=NOW))
    verify(Jwt().sign(draft, b"s", at=NOW))
    assert JIRA.covers == frozenset()


def test_a_public_key_is_never_the_secret_of_another_scheme() -> None:
    # A secret is given to every scheme that it fits, and 64 characters of hex fit each of these.
    public, shared = Ed25519(header="X-Ed"), Hmac(header="X-Signature")
    for schemes in (
        (public, shared),
        (shared, public),
        (SendGrid(), shared),
        (Either(public), shared),
        (PayPal(), JIRA),
    ):
        with pytest.raises(ConfigError, match="public key"):
            Either(*schemes, every=True)
    Either(public, Ed25519(header="X-Other"), every=True)
