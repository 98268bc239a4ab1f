"""What the senders' own libraries sign, ours verifies; and the other way round where they can verify."""

from __future__ import annotations

from datetime import UTC, datetime

import jwt
import pytest
from slack_sdk.signature import SignatureVerifier
from standardwebhooks import Webhook
from stripe import WebhookSignature
from twilio.request_validator import RequestValidator  # type: ignore[import-untyped]
from verify_cases import SLACK, STRIPE

from oncehook import clock
from oncehook.errors import SignatureInvalid
from oncehook.model import Arrival
from oncehook.verify import Jwt, StandardWebhooks, Twilio
from oncehook.verify.readers import put_header

BODY = '{"text":"olá 🙂"}'
WHSEC = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


def arrival(*headers: tuple[str, str], body: str = BODY, query: str = "") -> Arrival:
    return Arrival(
        "sdk", [(name.lower().encode(), value.encode()) for name, value in headers], body.encode(), query.encode()
    )


@pytest.mark.parametrize("prefix", ["webhook", "svix"])
def test_standard_webhooks(prefix: str) -> None:
    now = datetime.now(UTC)
    signature = Webhook(WHSEC).sign("msg_1", now, BODY)
    timestamp = str(int(now.timestamp()))
    genuine = arrival((f"{prefix}-id", "msg_1"), (f"{prefix}-timestamp", timestamp), (f"{prefix}-signature", signature))
    verify = StandardWebhooks(prefix=prefix).verifier([WHSEC.encode()])
    verify(genuine)
    genuine.body += b" "
    with pytest.raises(SignatureInvalid):
        verify(genuine)


def test_standard_webhooks_verifies_what_we_sign() -> None:
    signed = StandardWebhooks().sign(arrival(), WHSEC.encode(), at=clock.now())
    headers = {name.decode(): value.decode() for name, value in signed.headers}
    assert Webhook(WHSEC).verify(signed.body, headers) == {"text": "olá 🙂"}


def test_stripe() -> None:
    header = WebhookSignature.generate_signature_header(BODY, "whsec_abc")
    STRIPE.verifier([b"whsec_abc"])(arrival(("Stripe-Signature", header)))
    ours = dict(STRIPE.sign(arrival(), b"whsec_abc", at=clock.now()).headers)[b"stripe-signature"]
    assert WebhookSignature.verify_header(BODY, ours.decode(), "whsec_abc", tolerance=300)


def test_slack() -> None:
    library = SignatureVerifier("secret")
    timestamp = str(int(clock.now()))
    signature = library.generate_signature(timestamp=timestamp, body=BODY)
    assert signature is not None
    SLACK.verifier([b"secret"])(arrival(("X-Slack-Request-Timestamp", timestamp), ("X-Slack-Signature", signature)))
    ours = SLACK.sign(arrival(), b"secret", at=clock.now())
    assert library.is_valid_request(ours.body, {name.decode(): value.decode() for name, value in ours.headers})


SITE = "https://hooks.example.com/in/twilio"
FORM = ("Content-Type", "application/x-www-form-urlencoded")
FIELDS = {"To": "+14158675309", "Body": "olá + & 🙂", "Empty": "", "MessageSid": "SM1"}
FORM_BODY = "To=%2B14158675309&Body=ol%C3%A1+%2B+%26+%F0%9F%99%82&Empty=&MessageSid=SM1"


@pytest.mark.parametrize("algorithm", ["HMAC_SHA1", "HMAC_SHA256"])
@pytest.mark.parametrize("signed_url", [SITE, SITE.replace(".com/", ".com:443/")])
def test_twilio_form(algorithm: str, signed_url: str) -> None:
    signature = RequestValidator("token").compute_signature(signed_url, FIELDS, algorithm)
    named = [("X-Twilio-Webhooks-Signature-Settings", f"key=k1,algorithm={algorithm}")]
    headers = [FORM, ("X-Twilio-Signature", signature), *(named if algorithm != "HMAC_SHA1" else [])]
    verify = Twilio().verifier([b"token"], url=SITE)
    verify(arrival(*headers, body=FORM_BODY))
    with pytest.raises(SignatureInvalid):
        verify(arrival(*headers, body=FORM_BODY.replace("SM1", "SM2")))


@pytest.mark.parametrize("settings", ["key=k,algorithm=HMAC_MD5", "algorithm=none", "algorithm=HMAC_SHA256"])
def test_twilio_settings_choose_between_two_algorithms_only(settings: str) -> None:
    signature = RequestValidator("token").compute_signature(SITE, FIELDS)
    forged = arrival(
        FORM, ("X-Twilio-Signature", signature), ("X-Twilio-Webhooks-Signature-Settings", settings), body=FORM_BODY
    )
    with pytest.raises(SignatureInvalid):
        Twilio().verifier([b"token"], url=SITE)(forged)


def test_twilio_verifies_what_we_sign() -> None:
    library = RequestValidator("token")
    form = Twilio().sign(arrival(FORM, body=FORM_BODY), b"token", at=0, url=SITE)
    assert library.validate(SITE, FIELDS, dict(form.headers)[b"x-twilio-signature"].decode())
    json_body = Twilio().sign(arrival(("Content-Type", "application/json")), b"token", at=0, url=SITE)
    url = f"{SITE}?{json_body.query.decode()}"
    assert library.validate(url, BODY, dict(json_body.headers)[b"x-twilio-signature"].decode())
    Twilio().verifier([b"token"], url=SITE)(json_body)


KEY = "k" * 32


def bearer(token: str) -> Arrival:
    return arrival(("Authorization", f"Bearer {token}"))


def test_jwt() -> None:
    token = jwt.encode({"iat": int(clock.now()), "exp": int(clock.now()) + 600, "app": "evolution"}, KEY, "HS256")
    Jwt(claims={"app": "evolution"}).verifier([KEY.encode()])(bearer(token))
    ours = dict(Jwt().sign(arrival(), KEY.encode(), at=clock.now()).headers)[b"authorization"].decode()
    assert jwt.decode(ours.removeprefix("Bearer "), KEY, ["HS256"])["exp"]


@pytest.mark.parametrize(
    ("payload", "options"),
    [
        ({"exp": 1}, {"algorithm": "HS256"}),
        ({"exp": 4e9, "nbf": 3.9e9}, {"algorithm": "HS256"}),
        ({"exp": 4e9, "iat": 3.9e9}, {"algorithm": "HS256"}),
        ({"sub": "no end"}, {"algorithm": "HS256"}),
        ({"exp": 4e9}, {"algorithm": "HS384"}),
        ({"exp": 4e9}, {"algorithm": "HS512"}),
        ({"exp": 4e9}, {"algorithm": "none"}),
        ({"exp": 4e9}, {"algorithm": "HS256", "headers": {"crit": ["x"], "x": 1}}),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_jwt_that_must_not_pass(payload: dict[str, object], options: dict[str, object]) -> None:
    key = None if options["algorithm"] == "none" else KEY
    token = jwt.encode(payload, key, **options)  # type: ignore[arg-type]
    with pytest.raises(SignatureInvalid):
        Jwt().verifier([KEY.encode()])(bearer(token))


def test_a_jwt_signed_by_us_under_another_algorithms_name_is_refused() -> None:
    """The header says what it likes; only HS256 is ever computed, and only HS256 may be said."""
    import base64
    import hmac
    import json

    for algorithm in ("HS512", "RS256", "none", None):
        parts = [json.dumps(part).encode() for part in ({"alg": algorithm}, {"exp": 4_000_000_000})]
        message = b".".join(base64.urlsafe_b64encode(part).rstrip(b"=") for part in parts)
        signature = base64.urlsafe_b64encode(hmac.digest(KEY.encode(), message, "sha256")).rstrip(b"=")
        forged = arrival()
        put_header(forged, "authorization", b"Bearer " + message + b"." + signature)
        with pytest.raises(SignatureInvalid) as refusal:
            Jwt().verifier([KEY.encode()])(forged)
        assert refusal.value.reason == "malformed"
