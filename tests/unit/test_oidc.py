"""Signing in, against a provider that lies, is slow, huge or gone: over real HTTP, through the guarded client."""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any, cast
from urllib.parse import parse_qs, urlsplit

import pytest
from joserfc.jwk import RSAKey
from starlette.datastructures import QueryParams
from starlette.requests import Request
from tests.openid import CLIENT, SECRET, Liar

from oncehook import clock
from oncehook.logs import FEW
from oncehook.secret import Secret
from oncehook.settings.tables import OidcConfig
from oncehook.web import oidc as module
from oncehook.web.auth import SESSION_SECONDS, TRIES, Access, Identity, Role, TooManyTries
from oncehook.web.oidc import NoRole, Oidc, ProviderUnavailable, SignedIn, SignIn, SignInFailed, SignInUnknown, own_path
from oncehook.web.session import Auth, DashboardSessions


@pytest.fixture
def liar() -> Iterator[Liar]:
    with Liar() as made:
        yield made


@pytest.fixture(autouse=True)
def _clock_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "_skew", clock._skew)


@asynccontextmanager
async def opened(liar: Liar, **changed: Any) -> AsyncIterator[Oidc]:
    settings: dict[str, Any] = {
        "issuer": liar.issuer,
        "client_id": CLIENT,
        "client_secret": Secret.from_env("S", env={"S": SECRET}),
        "public_url": "https://hooks.example/inbox/",
        "roles": {"admin": ("ops",), "operator": ("night",), "viewer": ("staff", "ana@example.org")},
        "allow_private": True,
    }
    made = Oidc(OidcConfig(**settings | changed))
    try:
        yield made
    finally:
        await made.close()


async def come_back(liar: Liar, oidc: Oidc, **changed: str) -> SignedIn:
    """Go there, agree, and come back with what the provider says."""
    sign_in = SignIn.begin("/")
    answer = dict(QueryParams(urlsplit(liar.agree(await oidc.address(sign_in))).query))
    return await oidc.finish(sign_in, QueryParams(answer | changed))


# -- going there and coming back ---------------------------------------------------------------


async def test_somebody_comes_in(liar: Liar) -> None:
    async with opened(liar) as oidc:
        signed_in = await come_back(liar, oidc)
        assert (signed_in.identity, signed_in.subject) == (Identity("ana@example.org", Role.admin), "u-1")
        assert 3500 < signed_in.seconds <= 3600
        await come_back(liar, oidc)
    assert liar.hits == {"/.well-known/openid-configuration": 1, "/keys": 1, "/token": 2}, "documents are kept"


async def test_what_the_provider_is_asked(liar: Liar) -> None:
    liar.described = {"authorization_endpoint": f"{liar.issuer}/authorize?tenant=1"}
    async with opened(liar) as oidc:
        sign_in, other = SignIn.begin("/dead"), SignIn.begin("/dead")
        asked = parse_qs(urlsplit(await oidc.address(sign_in)).query, strict_parsing=True)
        assert asked["tenant"] == ["1"]
        assert asked["redirect_uri"] == ["https://hooks.example/inbox/login/oidc/callback"]
        assert (asked["response_type"], asked["code_challenge_method"]) == (["code"], ["S256"])
        told = " ".join(value for (value,) in asked.values())
        assert sign_in.secret not in told
        assert sign_in.verifier not in told
        mine = {sign_in.state, sign_in.nonce, sign_in.verifier, other.state, other.nonce, other.verifier}
        assert len(mine) == 6
        assert SignIn.read(sign_in.cookie) == sign_in


async def test_the_secret_goes_into_the_form_where_the_provider_wants_it_there(liar: Liar) -> None:
    liar.described = {"token_endpoint_auth_methods_supported": ["client_secret_post"]}
    async with opened(liar) as oidc:
        assert await come_back(liar, oidc)


@pytest.mark.parametrize(
    "changed",
    [{"state": "wrong"}, {"state": ""}, {"state": "ä" * 43}],
    ids=["wrong", "empty", "other letters"],
)
async def test_an_answer_to_another_sign_in_is_not_even_looked_at(liar: Liar, changed: dict[str, str]) -> None:
    async with opened(liar) as oidc:
        with pytest.raises(SignInUnknown):
            await come_back(liar, oidc, **changed)
    assert not liar.hits["/token"]


async def test_an_answer_in_another_browser_is_not_even_looked_at(liar: Liar) -> None:
    async with opened(liar) as oidc:
        sign_in = SignIn.begin("/")
        answer = QueryParams(urlsplit(liar.agree(await oidc.address(sign_in))).query)
        for other in (None, SignIn.begin("/"), SignIn.read("x"), SignIn.read(sign_in.secret[:-1]), SignIn.read("")):
            with pytest.raises(SignInUnknown):
                await oidc.finish(other, answer)
        with pytest.raises(SignInUnknown):
            await oidc.finish(sign_in, QueryParams(f"{answer}&state={sign_in.state}"))
        assert not liar.hits["/token"]
        assert await oidc.finish(sign_in, answer)
        with pytest.raises(SignInFailed):  # the code works once
            await oidc.finish(sign_in, answer)


@pytest.mark.parametrize(
    "changed",
    [
        {"code": ""},
        {"code": "guess"},
        {"code": "x" * 5000},
        {"error": "access_denied"},
        {"iss": "https://evil.example"},
    ],
    ids=["no code", "guessed", "huge", "denied", "mixed up"],
)
async def test_an_answer_that_proves_nothing_is_refused(liar: Liar, changed: dict[str, str]) -> None:
    async with opened(liar) as oidc:
        with pytest.raises(SignInFailed):
            await come_back(liar, oidc, **changed)


async def test_an_issuer_that_is_promised_must_be_there(liar: Liar) -> None:
    liar.described = {"authorization_response_iss_parameter_supported": True}
    async with opened(liar) as oidc:
        with pytest.raises(SignInFailed):
            await come_back(liar, oidc)
        assert await come_back(liar, oidc, iss=liar.issuer)


# -- tokens ------------------------------------------------------------------------------------


def unsigned(header: dict[str, Any], payload: bytes) -> str:
    parts = (json.dumps(header | {"alg": "none"}).encode(), payload, b"")
    return ".".join(base64.urlsafe_b64encode(part).rstrip(b"=").decode() for part in parts)


@pytest.mark.parametrize(
    "lie",
    [
        {"claims": {"iss": "https://evil.example"}},
        {"claims": {"aud": "somebody"}},
        {"claims": {"nonce": "replayed"}},
        {"claims": {"exp": 1}},
        {"claims": {"azp": "somebody"}},
        {"sign": unsigned},
        {"bodies": {"/keys": (200, b'{"keys": []}')}},
    ],
    ids=["issuer", "audience", "nonce", "expired", "azp", "none", "no keys"],
)
async def test_a_token_that_proves_nothing_is_refused(
    liar: Liar, lie: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in lie.items():
        setattr(liar, name, value)
    async with opened(liar) as oidc:
        with pytest.raises(SignInFailed) as caught, caplog.at_level(logging.WARNING):
            await come_back(liar, oidc)
    reason = caplog.records[-1].__dict__["fields"]["reason"]
    assert reason
    assert reason not in f"{caught.value} {caught.value.hint}", "the log says why, the page does not"


async def test_new_keys_are_looked_for_but_not_each_time(liar: Liar) -> None:
    async with opened(liar) as oidc:
        await come_back(liar, oidc)
        liar.key = RSAKey.generate_key(2048, {"kid": "two"})
        clock.forward(module.ROTATION + 1)
        assert await come_back(liar, oidc)
        assert liar.hits["/keys"] == 2
        published = liar.key
        liar.key = RSAKey.generate_key(2048, {"kid": "three"})
        liar.bodies["/keys"] = (200, json.dumps({"keys": [published.as_dict(private=False)]}).encode())
        clock.forward(module.ROTATION + 1)
        for _ in range(5):
            with pytest.raises(SignInFailed):
                await come_back(liar, oidc)
        assert liar.hits["/keys"] == 3


# -- who may come in as what -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("claims", "role"),
    [
        ({"groups": ["staff", "ops"]}, Role.admin),
        ({"groups": "night"}, Role.operator),
        ({"groups": ["staff", 7, None, {"ops": 1}]}, Role.viewer),
        ({"groups": ["OPS", "ops ", "op"]}, None),
        ({"groups": {"ops": True}}, None),
        ({"groups": None}, None),
        ({"groups": "ops staff"}, None),
    ],
)
async def test_the_highest_role_that_is_meant_counts(liar: Liar, claims: dict[str, Any], role: Role | None) -> None:
    liar.claims = claims
    async with opened(liar) as oidc:
        if role is not None:
            assert (await come_back(liar, oidc)).identity.role is role
            return
        with pytest.raises(NoRole) as caught:
            await come_back(liar, oidc)
        assert "ana@example.org" in str(caught.value)
        assert caught.value.status == 403


async def test_a_claim_may_be_deeper(liar: Liar) -> None:
    liar.claims = {"groups": None, "realm": {"roles": ["ops"]}, "https://example.org/roles": ["staff"]}
    async with opened(liar, roles_claim="realm.roles") as oidc:
        assert (await come_back(liar, oidc)).identity.role is Role.admin
    async with opened(liar, roles_claim="https://example.org/roles") as oidc:
        assert (await come_back(liar, oidc)).identity.role is Role.viewer
    async with opened(liar, roles_claim="realm.roles.ops") as oidc:
        with pytest.raises(NoRole):
            await come_back(liar, oidc)


@pytest.mark.parametrize("verified", [False, None, "false", 0, "True"])
async def test_an_email_address_that_nobody_has_verified_counts_for_nothing(liar: Liar, verified: object) -> None:
    liar.claims = {"email_verified": verified}
    async with opened(liar) as oidc:
        assert (await come_back(liar, oidc)).identity.name == "oidc:u-1"
    for changed in ({"roles_claim": "email"}, {"email_domains": ("example.org",)}):
        async with opened(liar, **changed) as oidc:
            with pytest.raises(NoRole):
                await come_back(liar, oidc)


@pytest.mark.parametrize(
    ("email", "lets_in"),
    [
        ("ana@example.org", True),
        ("ana@EXAMPLE.org", True),
        ("ana@evil.example", False),
        ("ana@example.org.evil.example", False),
        ("ana@sub.example.org", False),
        ("ana@evil.example@example.org", False),
        ("ana@evil.example\n@example.org", False),
        ("@example.org", False),
        (["ana@example.org"], False),
    ],
)
async def test_only_domains_that_are_allowed(liar: Liar, email: object, lets_in: bool) -> None:
    liar.claims = {"email": email}
    async with opened(liar, email_domains=("example.org",)) as oidc:
        if lets_in:
            assert (await come_back(liar, oidc)).identity.name == email
        else:
            with pytest.raises(NoRole):
                await come_back(liar, oidc)


async def test_nobody_takes_the_name_of_a_token(liar: Liar) -> None:
    liar.claims = {"sub": "admin", "email": "admin"}
    async with opened(liar) as oidc:
        assert (await come_back(liar, oidc)).identity.name == "oidc:admin"


async def test_a_session_lasts_no_longer_than_any_other(liar: Liar) -> None:
    liar.claims = {"exp": clock.now() + 10 * SESSION_SECONDS}
    async with opened(liar) as oidc:
        assert (await come_back(liar, oidc)).seconds == SESSION_SECONDS


async def test_who_is_let_in_leaves_its_mark(liar: Liar) -> None:
    marks = set()
    changes: list[dict[str, Any]] = [
        {},
        {"roles": {"admin": ("ops",)}},
        {"roles_claim": "x"},
        {"email_domains": ("a.b",)},
        {"client_id": "x"},
    ]
    for changed in changes:
        async with opened(liar, **changed) as oidc:
            marks.add(oidc.mark)
    async with opened(liar, name="Our provider") as oidc:
        marks.add(oidc.mark)
        assert oidc.name == "Our provider"
    assert len(marks) == len(changes), "what it is called changes nothing"


# -- a provider that is not as it should be ----------------------------------------------------

DESCRIBED = "/.well-known/openid-configuration"


@pytest.mark.parametrize(
    "lie",
    [
        {"described": {"x": "x" * 300_000}},
        {"bodies": {DESCRIBED: (200, b"[" * 100_000)}},
        {"bodies": {DESCRIBED: (200, b"<html>")}},
        {"bodies": {DESCRIBED: (200, b'{"x": 1' + b"0" * 5000 + b"}")}},
        {"bodies": {"/keys": (200, b'{"keys": [{"x": 1' + b"0" * 5000 + b"}]}")}},
        {"bodies": {DESCRIBED: (200, b'{"issuer": 1}')}},
        {"bodies": {DESCRIBED: (404, b"{}")}},
        {"bodies": {DESCRIBED: (302, b"{}")}},
        {"bodies": {DESCRIBED: (500, b"")}},
        {"described": {"issuer": "https://evil.example"}},
        {"described": {"token_endpoint": "file:///etc/passwd"}},
        {"described": {"token_endpoint": "http://user:pw@127.0.0.1/"}},
        {"described": {"authorization_endpoint": "javascript:alert(1)"}},
        {"described": {"authorization_endpoint": "//evil.example"}},
        {"described": {"jwks_uri": None}},
        {"described": {"jwks_uri": "http://127.0.0.1:1/keys"}},
        {"bodies": {"/keys": (200, json.dumps({"keys": [{"kty": "RSA"}] * 30_000}).encode())}},
        {"bodies": {"/keys": (200, b'{"keys": [1]}')}},
        {"bodies": {"/token": (200, b'{"access_token": "x"}')}},
        {"bodies": {"/token": (200, json.dumps({"id_token": "x" * 300_000}).encode())}},
        {"bodies": {"/token": (503, b"")}},
        {"bodies": {"/token": (307, b"")}},
    ],
)
async def test_what_cannot_be_used_is_said_to_be_unavailable(liar: Liar, lie: dict[str, Any]) -> None:
    for name, value in lie.items():
        setattr(liar, name, value)
    async with opened(liar) as oidc:
        with pytest.raises(ProviderUnavailable) as caught:
            await come_back(liar, oidc)
        assert caught.value.status == 503
        assert caught.value.retry_after


async def test_a_provider_that_is_down_is_left_alone_for_a_moment(liar: Liar, caplog: pytest.LogCaptureFixture) -> None:
    liar.bodies[DESCRIBED] = (500, b"")
    async with opened(liar) as oidc:
        with caplog.at_level(logging.WARNING):
            for _ in range(50):
                with pytest.raises(ProviderUnavailable):
                    await oidc.address(SignIn.begin("/"))
        assert liar.hits[DESCRIBED] == 1
        assert len(caplog.records) == 1
        liar.bodies.clear()
        clock.forward(module.PAUSE + 1)
        assert await come_back(liar, oidc)


async def test_a_flood_of_codes_is_told_of_now_and_then(liar: Liar, caplog: pytest.LogCaptureFixture) -> None:
    async with opened(liar) as oidc:
        assert await come_back(liar, oidc)
        liar.bodies["/token"] = (500, b"")
        with caplog.at_level(logging.WARNING):
            for _ in range(FEW + 4):
                with pytest.raises(ProviderUnavailable):
                    await come_back(liar, oidc)
        assert len(caplog.records) == FEW


class Numbered:
    async def inbox_number(self) -> int:
        return 7


async def test_a_failed_sign_in_is_throttled_and_reported_like_a_wrong_token(liar: Liar) -> None:
    reported: list[tuple[str, ...]] = []
    async with opened(liar) as oidc:
        access = Access(on_refused=lambda *refusal: reported.append(refusal))
        door = Auth(access, DashboardSessions(cast("Any", Numbered())), oidc=oidc)
        sign_in = SignIn.begin("/")
        request = Request(
            {
                "type": "http",
                "client": ("2001:db8::1", 1),
                "headers": [(b"cookie", f"__Host-oncehook_7_sign_in={sign_in.cookie}".encode())],
                "query_string": f"error=access_denied&state={sign_in.state}".encode(),
            }
        )
        for _ in range(TRIES):
            with pytest.raises(SignInFailed):
                await door.by_oidc(request)
        with pytest.raises(TooManyTries):
            await door.by_oidc(request)
    network = "2001:db8::/64"
    assert reported == [("oidc", network, "wrong")] * TRIES + [("oidc", network, "too many tries")]


async def test_a_private_provider_must_be_allowed_by_name(liar: Liar) -> None:
    async with opened(liar, allow_private=False) as oidc:
        with pytest.raises(ProviderUnavailable):
            await oidc.address(SignIn.begin("/"))
    assert not liar.hits


# -- where to return to ------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/", "/events", "/events?query=status:dead&x=%2F", "/events/evt_1", "/?a=//b"])
def test_a_page_of_ours_is_returned_to(path: str) -> None:
    assert own_path(path) == path
    made = SignIn.begin(path)
    assert SignIn.read(made.cookie) == made


@pytest.mark.parametrize(
    "path",
    [
        "",
        "//evil.example",
        "///evil.example",
        "/\\evil.example",
        "\\\\evil.example",
        "https://evil.example",
        "javascript:alert(1)",
        "/\t/evil.example",
        "/\n/evil.example",
        " /events",
        "/events\r\nSet-Cookie: a=b",
        '/"><script>',
        "/ä",
        "evil.example",
        "/login/oidc",
        "/" + "x" * 2000,
    ],
)
def test_nothing_else_is(path: str) -> None:
    assert own_path(path) == "/"
    forged = f"{'0' * 64}.{base64.urlsafe_b64encode(path.encode()).decode()}"
    read = SignIn.read(forged)
    assert read is not None
    assert read.to == "/"
