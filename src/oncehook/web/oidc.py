"""Sign-in with an OpenID provider: the browser is sent there, returns with a code, and gets an `Identity`.

Authorization code flow with PKCE. State, nonce and verifier are derived from one secret that only the browser holds, so
any server of an inbox can finish what another began, and nothing is stored. All calls to the provider use the guarded
client (S17, S20). `Auth` asks this module who signs in and begins the session, as for a password.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import quote, quote_plus, urlencode, urlsplit

import msgspec

from oncehook import clock
from oncehook.errors import BadRequest, ConfigError, ExtraMissing, Forbidden, Refused
from oncehook.http_client import HttpAnswer, Unanswered
from oncehook.http_client.urls import read_url
from oncehook.logs import ration
from oncehook.settings.tables import OidcConfig
from oncehook.verify import same
from oncehook.web.auth import LONGEST_NAME, SESSION_SECONDS, Identity, Role

if TYPE_CHECKING:
    from joserfc.jwk import ECKey, RSAKey
    from starlette.datastructures import QueryParams

    from oncehook.http_client.client import HttpClient

log = logging.getLogger("oncehook.web")

CALLBACK: Final = "/login/oidc/callback"
SIGN_IN_SECONDS: Final = 600
"""Seconds that a browser may take at the provider."""
TIMEOUT: Final = 10.0
LARGEST: Final = 256 * 1024
"""Largest document or answer of the provider in bytes; one that is cut is invalid."""
FRESH: Final = 3600.0
"""Seconds for which the provider's documents are cached."""
ROTATION: Final = 10.0
"""Seconds between two fetches of new keys, so that tokens that fit none do not cause one each."""
PAUSE: Final = 5.0
"""Seconds before a provider that did not answer is asked again, and logged again."""
MOST_AT_ONCE: Final = 16
"""Codes that are exchanged at the same time."""
_LONGEST_CODE: Final = 4096
_LONGEST_PATH: Final = 1000
_OWN_PATH: Final = re.compile(r"/(?:[\w.~!$()*+,;=:@%?&-][\w.~!$()*+,;=:@%?&/-]*)?", re.ASCII)
_EMAIL: Final = re.compile(r"[^\s@]+@[^\s@]+")
_ERROR: Final = re.compile(r"[a-z_]{1,64}")

T = TypeVar("T")


class SignInUnknown(BadRequest):
    """This sign-in was not begun in this browser, or too long ago."""

    hint = "Start again."


class SignInFailed(Refused):
    """The provider's answer does not prove who you are."""

    code = "sign_in_failed"
    status = 401
    hint = "Start again; if that does not help, the log of the server says why."


class NoRole(Forbidden):
    """No role of this inbox is meant for you."""

    code = "no_role"

    def __init__(self, name: str, subject: str, reason: str) -> None:
        super().__init__(
            f"You have signed in as {name}, but no role of this inbox is meant for you.",
            hint="Ask whoever runs it to name your group in roles of [server.oidc], or sign in as somebody else.",
        )
        self.name = name
        self.subject = subject
        self.reason = reason


class ProviderUnavailable(Refused):
    """The sign-in provider does not answer as it should."""

    code = "provider_unavailable"
    status = 503
    retry_after = PAUSE
    hint = "Try again in a moment. Who is signed in stays signed in."


@dataclass(frozen=True, slots=True)
class SignedIn:
    """An identity that the provider has confirmed.

    Its name is a verified email address, or `oidc:` and the provider's own name for the person.
    """

    identity: Identity
    subject: str
    seconds: float
    """Seconds for which the provider's confirmation is valid."""


@dataclass(frozen=True, slots=True)
class SignIn:
    """One sign-in that a browser has begun: its secret, and the page of ours to return to."""

    secret: str
    to: str

    @classmethod
    def begin(cls, to: str) -> SignIn:
        return cls(clock.random_bytes(32).hex(), own_path(to))

    @classmethod
    def read(cls, cookie: str) -> SignIn | None:
        """Read what `cookie` wrote. A forged one cannot lead to another site."""
        secret, _, to = cookie.partition(".")
        if not re.fullmatch(r"[0-9a-f]{64}", secret):
            return None
        try:
            return cls(secret, own_path(base64.urlsafe_b64decode(to.encode()).decode()))
        except ValueError:
            return None

    @property
    def cookie(self) -> str:
        return f"{self.secret}.{base64.urlsafe_b64encode(self.to.encode()).decode()}"

    @property
    def state(self) -> str:
        return self._derive("state")

    @property
    def nonce(self) -> str:
        return self._derive("nonce")

    @property
    def verifier(self) -> str:
        return self._derive("verifier")

    @property
    def challenge(self) -> str:
        """Return the verifier's hash, which the provider gets first (PKCE, S256)."""
        return _base64(hashlib.sha256(self.verifier.encode()).digest())

    def _derive(self, what: str) -> str:
        return _base64(hmac.digest(self.secret.encode(), what.encode(), "sha256"))


class _Metadata(msgspec.Struct, frozen=True):
    """The provider's own description (OpenID Connect Discovery)."""

    issuer: str
    authorization_endpoint: str
    token_endpoint: str
    jwks_uri: str
    token_endpoint_auth_methods_supported: list[str] | None = None
    authorization_response_iss_parameter_supported: bool | None = None


class _KeySet(msgspec.Struct, frozen=True):
    keys: list[dict[str, Any]]


class _Tokens(msgspec.Struct, frozen=True):
    id_token: str


class _Refusal(msgspec.Struct, frozen=True):
    error: str = ""


class Oidc:
    """One OpenID provider, and the roles of its people."""

    def __init__(self, settings: OidcConfig) -> None:
        """Read the secret once. Raises ConfigError when it or the package for it is missing."""
        from oncehook.http_client.client import HttpClient

        check_installed()
        self._settings = settings
        self._secret = settings.client_secret.reveal().decode("utf-8", "surrogateescape")
        self._redirect = settings.public_url.rstrip("/") + CALLBACK
        self._client: HttpClient = HttpClient(allow_private=settings.allow_private)
        self._lock = asyncio.Lock()
        self._metadata: _Metadata | None = None
        self._keys: Sequence[Jwk] = ()
        self._metadata_until = self._keys_until = self._keys_at = self._down_until = 0.0
        self._exchanging = 0

    @property
    def name(self) -> str:
        return self._settings.name or urlsplit(self._settings.issuer).netloc

    @property
    def is_secure(self) -> bool:
        return self._settings.public_url.startswith("https://")

    @property
    def mark(self) -> str:
        """Return a digest of the settings that decide who is admitted: when it changes, sessions that depend on it end
        (S31)."""
        settings = self._settings
        decisive = (
            settings.issuer,
            settings.client_id,
            settings.roles_claim,
            sorted(settings.roles.items()),
            settings.email_domains,
        )
        return hashlib.sha256(msgspec.json.encode(decisive)).hexdigest()

    async def close(self) -> None:
        await self._client.close()

    # -- going there and coming back -----------------------------------------------------------

    async def address(self, sign_in: SignIn) -> str:
        """Return the provider's address for the browser. Raises ProviderUnavailable."""
        endpoint = (await self._fetch_metadata()).authorization_endpoint
        asked = {
            "response_type": "code",
            "client_id": self._settings.client_id,
            "redirect_uri": self._redirect,
            "scope": " ".join(self._settings.scopes),
            "state": sign_in.state,
            "nonce": sign_in.nonce,
            "code_challenge": sign_in.challenge,
            "code_challenge_method": "S256",
        }
        return f"{endpoint}{'&' if '?' in endpoint else '?'}{urlencode(asked, quote_via=quote)}"

    async def finish(self, sign_in: SignIn | None, answer: QueryParams) -> SignedIn:
        """Return who has signed in. Raises SignInUnknown, SignInFailed, NoRole or ProviderUnavailable."""
        if sign_in is None or not same(_only(answer, "state").encode("utf-8", "replace"), sign_in.state.encode()):
            raise SignInUnknown
        metadata = await self._fetch_metadata()
        given = _only(answer, "iss")
        if given != metadata.issuer and (given or metadata.authorization_response_iss_parameter_supported):
            raise self._build_failure("the answer is another issuer's")
        if error := _only(answer, "error"):
            raise self._build_failure(_mask_code(error), f"The provider did not sign you in: {_mask_code(error)}.")
        code = _only(answer, "code")
        if not 0 < len(code) <= _LONGEST_CODE:
            raise self._build_failure("the answer has no code")
        token = await self._exchange(metadata, code, sign_in)
        try:
            return self._identify(await self._verify(metadata, token, sign_in))
        except InvalidToken as error:
            raise self._build_failure(str(error)) from None

    async def _exchange(self, metadata: _Metadata, code: str, sign_in: SignIn) -> str:
        """Return the provider's ID token for a code, which can be used once."""
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": self._redirect,
            "code_verifier": sign_in.verifier,
        }
        headers = {"Content-Type": "application/x-www-form-urlencoded", "Accept": "application/json"}
        # Every provider must support Basic (RFC 6749, 2.3.1), unless it says that it does not.
        methods = metadata.token_endpoint_auth_methods_supported or ["client_secret_basic"]
        if "client_secret_basic" in methods or "client_secret_post" not in methods:
            both = (self._settings.client_id, self._secret)
            pair = ":".join(quote_plus(one, errors="surrogateescape") for one in both)
            headers["Authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
        else:
            form |= {"client_id": self._settings.client_id, "client_secret": self._secret}
        if self._exchanging >= MOST_AT_ONCE:
            raise self._unavailable("too many people sign in at once")
        self._exchanging += 1
        try:
            body = urlencode(form, errors="surrogateescape").encode()
            answer = await self._call("POST", metadata.token_endpoint, headers, body)
        finally:
            self._exchanging -= 1
        if answer.status in (400, 401, 403):
            raise self._build_failure(f"the provider takes neither code nor client: {_refusal(answer)}")
        return self._read(answer, _Tokens).id_token

    async def _verify(self, metadata: _Metadata, token: str, sign_in: SignIn) -> Claims:
        """Check an ID token; where none of the cached keys fits, fetch the keys again and try once more."""
        expected = {
            "issuer": self._settings.issuer,
            "client_id": self._settings.client_id,
            "nonce": sign_in.nonce,
        }
        try:
            return verify(token, await self._fetch_keys(metadata), **expected)
        except UnknownKey:
            return verify(token, await self._fetch_keys(metadata, anew=True), **expected)

    # -- what the provider says of itself ------------------------------------------------------

    async def _fetch_metadata(self) -> _Metadata:
        async with self._lock:
            if self._metadata is None or clock.steady() >= self._metadata_until:
                url = self._settings.issuer.rstrip("/") + "/.well-known/openid-configuration"
                self._metadata = self._check_metadata(await self._document(read_url(url), _Metadata))
                self._metadata_until = clock.steady() + FRESH
            return self._metadata

    def _check_metadata(self, metadata: _Metadata) -> _Metadata:
        """Refuse metadata of another provider, and unsafe addresses in it."""
        if metadata.issuer != self._settings.issuer:
            raise self._down("its description names another issuer; write issuer as the provider does, to the letter")
        schemes = ("https",) if self._settings.issuer.startswith("https://") else ("https", "http")
        names = ("authorization_endpoint", "token_endpoint", "jwks_uri")
        try:
            urls = {name: read_url(getattr(metadata, name)) for name in names}
        except ConfigError:
            urls = {}
        if not urls or any(urlsplit(url).scheme not in schemes for url in urls.values()):
            raise self._down("its description holds an address that cannot be used")
        return msgspec.structs.replace(metadata, **urls)

    async def _fetch_keys(self, metadata: _Metadata, *, anew: bool = False) -> Sequence[Jwk]:
        """Return the provider's keys, at most an hour old; with `anew`, some seconds."""
        async with self._lock:
            now = clock.steady()
            if now >= (self._keys_at + ROTATION if anew else self._keys_until):
                self._keys = (await self._document(metadata.jwks_uri, _KeySet)).keys
                self._keys_at, self._keys_until = clock.steady(), clock.steady() + FRESH
            return self._keys

    async def _document(self, url: str, kind: type[T]) -> T:
        if clock.steady() < self._down_until:
            raise ProviderUnavailable
        try:
            return self._read(await self._call("GET", url, {"Accept": "application/json"}), kind)
        except ProviderUnavailable:
            self._down_until = clock.steady() + PAUSE
            raise

    async def _call(self, method: str, url: str, headers: dict[str, str], body: bytes | None = None) -> HttpAnswer:
        await self._client.open()
        try:
            # A code can be used once, so only the documents are requested again on a closed connection.
            return await self._client.request(method, url, headers, body, within=TIMEOUT, most=LARGEST)
        except Unanswered as error:
            raise self._unavailable(str(error)) from None

    def _read(self, answer: HttpAnswer, kind: type[T]) -> T:
        if answer.status != 200:
            raise self._unavailable(f"it answers {answer.status}")
        try:
            return msgspec.json.decode(answer.body, type=kind)
        except UNREADABLE:
            raise self._unavailable(f"its answer cannot be read, or is larger than {LARGEST} bytes") from None

    # -- who that is, and what they may do -----------------------------------------------------

    def _identify(self, claims: Claims) -> SignedIn:
        settings, subject = self._settings, str(claims["sub"])
        email = _email(claims)
        name = email or f"oidc:{subject}"[:LONGEST_NAME]
        if settings.email_domains and email.rpartition("@")[2].lower() not in settings.email_domains:
            raise NoRole(name, subject, "no verified email address in email_domains")
        values = _values(claims if email else {**claims, "email": None}, settings.roles_claim)
        roles = [Role[role] for role, wanted in settings.roles.items() if values.intersection(wanted)]
        if not roles:
            raise NoRole(name, subject, f"no role for what {settings.roles_claim} says")
        return SignedIn(Identity(name, max(roles)), subject, min(claims["exp"] - clock.now(), SESSION_SECONDS))

    # -- what goes wrong -----------------------------------------------------------------------

    def _build_failure(self, reason: str, message: str = "") -> SignInFailed:
        fields = {"provider": self.name, "reason": reason}
        ration.log(log, logging.WARNING, "oidc.failed", fields, kind=self.name)
        return SignInFailed(message)

    def _unavailable(self, reason: str) -> ProviderUnavailable:
        fields = {"provider": self.name, "reason": reason}
        ration.log(log, logging.WARNING, "oidc.unavailable", fields, kind=self.name)
        return ProviderUnavailable()

    def _down(self, reason: str) -> ProviderUnavailable:
        self._down_until = clock.steady() + PAUSE
        return self._unavailable(reason)


def own_path(text: str) -> str:
    """Return a path of our own; the overview for anything that could lead elsewhere, or in a circle."""
    is_ours = len(text) <= _LONGEST_PATH and _OWN_PATH.fullmatch(text) and not text.startswith("/login")
    return text if is_ours else "/"


def _email(claims: Claims) -> str:
    """Return the verified email address; empty for an unverified one, which anybody could claim."""
    email = claims.get("email")
    if claims.get("email_verified") not in (True, "true") or not isinstance(email, str):
        return ""
    usable = len(email) <= LONGEST_NAME and email.isprintable() and _EMAIL.fullmatch(email)
    return email if usable else ""


def _values(claims: Claims, name: str) -> set[str]:
    """Return the texts of a claim, one or a list; a name with dots may lead into objects."""
    value: Any = claims.get(name)
    if name not in claims:
        value = claims
        for step in name.split("."):
            value = value.get(step) if isinstance(value, dict) else None
    return {one for one in (value if isinstance(value, list) else [value]) if isinstance(one, str)}


def _only(answer: QueryParams, name: str) -> str:
    """Return a parameter that is given once; a repeated one counts as missing."""
    values = answer.getlist(name)
    return values[0] if len(values) == 1 else ""


def _refusal(answer: HttpAnswer) -> str:
    try:
        return _mask_code(msgspec.json.decode(answer.body, type=_Refusal).error)
    except UNREADABLE:
        return f"status {answer.status}"


def _mask_code(error: str) -> str:
    """Return an error code that is safe to log; anything else becomes a fixed text."""
    return error if _ERROR.fullmatch(error) else "an error without a name"


def _base64(value: bytes) -> str:
    return base64.urlsafe_b64encode(value).rstrip(b"=").decode()


Claims = Mapping[str, Any]
Jwk = Mapping[str, Any]

KEY_TYPES: Final = {
    **dict.fromkeys(("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"), "RSA"),
    **dict.fromkeys(("ES256", "ES384", "ES512"), "EC"),
}
"""Algorithms that are accepted, and the type of key that each needs."""
MOST_KEYS: Final = 100
LONGEST: Final = 64 * 1024
CLOCK_SKEW: Final = 300.0
"""Seconds by which the provider's clock may be ahead of ours."""
_RSA_BITS: Final = range(2048, 8193)
"""Smaller keys can be broken; larger ones only cost time."""
_LONGEST_SUBJECT: Final = 255
_LAST_TIME: Final = 1e11
"""Latest time accepted, in seconds since 1970, because JSON allows any number."""


UNREADABLE: Final = (ValueError, RecursionError)
"""Errors of decoding untrusted JSON."""


class InvalidToken(Exception):
    """This ID token proves nothing. The sentence is for the log, never for the visitor."""


class UnknownKey(InvalidToken):
    """No key of the provider fits this token: it may have new ones."""


def check_installed() -> None:
    """Raise ConfigError unless the package that checks signatures is there."""
    try:
        import joserfc  # noqa: F401
    except ImportError:
        raise ExtraMissing("Signing in with OpenID", "oidc") from None


def verify(token: str, keys: Sequence[Jwk], *, issuer: str, client_id: str, nonce: str) -> Claims:
    """Return the claims of a token that this provider made for this client and this sign-in. Raises InvalidToken."""
    claims = _claims(_payload(token, keys))
    if claims.get("iss") != issuer:
        raise InvalidToken("iss is another issuer")
    _check_audience(claims, client_id)
    _check_times(claims)
    given = claims.get("nonce")
    if not isinstance(given, str) or not same(given.encode("utf-8", "replace"), nonce.encode()):
        raise InvalidToken("nonce is not the one of this sign-in")
    subject = claims.get("sub")
    if not isinstance(subject, str) or not 0 < len(subject) <= _LONGEST_SUBJECT or not subject.isprintable():
        raise InvalidToken("sub is missing or cannot be used")
    return claims


# -- the signature -----------------------------------------------------------------------------


def _payload(token: str, keys: Sequence[Jwk]) -> bytes:
    """Return the payload that was signed with one of these keys."""
    from joserfc import jws

    if len(token) > LONGEST:
        raise InvalidToken(f"the token is longer than {LONGEST} characters")
    try:
        header = dict(jws.extract_compact(token.encode("ascii")).headers())
    except Exception as error:  # whatever the library raises here was caused by the token
        raise InvalidToken(f"the token cannot be read: {type(error).__name__}") from None
    algorithm, key_id = header.get("alg"), header.get("kid")
    if not isinstance(algorithm, str) or algorithm not in KEY_TYPES:
        raise InvalidToken("alg is not an accepted algorithm")
    fitting = list(_iter_fitting(keys, algorithm, key_id))
    if not fitting:
        raise UnknownKey("no key of the provider fits this token")
    registry = jws.JWSRegistry(algorithms=[algorithm], strict_check_header=False)
    for key in fitting:
        try:
            return bytes(jws.deserialize_compact(token, key, registry=registry).payload or b"")
        except Exception:  # noqa: S112 - another key may fit; that none did is raised below
            continue
    raise UnknownKey("the signature does not match")


def _iter_fitting(keys: Sequence[Jwk], algorithm: str, key_id: object) -> Iterator[RSAKey | ECKey]:
    """Yield the keys that may have signed with this algorithm and id; unusable ones are skipped."""
    from joserfc.jwk import ECKey, RSAKey

    for jwk in keys[:MOST_KEYS]:
        is_meant = key_id is None or jwk.get("kid") == key_id
        is_signing = jwk.get("use", "sig") == "sig" and jwk.get("alg", algorithm) == algorithm
        if jwk.get("kty") != KEY_TYPES[algorithm] or not is_meant or not is_signing:
            continue
        try:
            if jwk["kty"] == "EC":
                yield ECKey.import_key({name: jwk[name] for name in ("kty", "crv", "x", "y")})
            else:
                key = RSAKey.import_key({name: jwk[name] for name in ("kty", "n", "e")})
                if key.public_key.key_size in _RSA_BITS:
                    yield key
        except Exception:  # noqa: S112 - one broken key must not keep out those who are signed by another
            continue


# -- what it says ------------------------------------------------------------------------------


def _claims(payload: bytes) -> Claims:
    try:
        claims: Claims = msgspec.json.decode(payload, type=dict[str, Any])
    except UNREADABLE:
        raise InvalidToken("the token does not hold an object") from None
    return claims


def _check_audience(claims: Claims, client_id: str) -> None:
    audience = claims.get("aud")
    audiences = audience if isinstance(audience, list) else [audience]
    if client_id not in audiences:
        raise InvalidToken("aud is another client")
    if len(audiences) > 1 and "azp" not in claims:
        raise InvalidToken("aud has several clients, and azp does not say which one it was made for")
    if claims.get("azp", client_id) != client_id:
        raise InvalidToken("azp is another client")


def _check_times(claims: Claims) -> None:
    now = clock.now()
    if _time(claims, "exp") <= now:
        raise InvalidToken("exp has passed")
    if _time(claims, "iat") > now + CLOCK_SKEW:
        raise InvalidToken("iat is in the future")
    if "nbf" in claims and _time(claims, "nbf") > now + CLOCK_SKEW:
        raise InvalidToken("nbf is in the future")


def _time(claims: Claims, name: str) -> float:
    value = claims.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _LAST_TIME:
        raise InvalidToken(f"{name} is missing or no time")
    return float(value)
