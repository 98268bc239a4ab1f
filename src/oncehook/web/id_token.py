"""ID tokens: a token and the keys of its provider come in, claims that can be relied on go out.

The key is chosen among the provider's own, whatever the token's header offers, and only for signatures that a public
key can check: neither `none` nor an HMAC keyed with public bytes is ever tried. `oidc` calls it. It needs joserfc
(`oncehook[oidc]`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from oncehook import clock
from oncehook.errors import ConfigError
from oncehook.verify import same

if TYPE_CHECKING:
    from joserfc.jwk import ECKey, RSAKey

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
"""Seconds since 1970; JSON has numbers that are none."""


UNREADABLE: Final = (ValueError, RecursionError)
"""What reading JSON of others may raise."""


class InvalidToken(Exception):
    """This ID token proves nothing. The sentence is for the log, never for the visitor."""


class UnknownKey(InvalidToken):
    """No key of the provider fits this token: it may have new ones."""


def check_installed() -> None:
    """Raise ConfigError unless the package that checks signatures is there."""
    try:
        import joserfc  # noqa: F401
    except ImportError:
        raise ConfigError(
            "Signing in with OpenID needs a package that is not installed.", hint="Run: pip install 'oncehook[oidc]'"
        ) from None


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
    """Return what was signed with one of these keys."""
    from joserfc import jws

    if len(token) > LONGEST:
        raise InvalidToken(f"the token is longer than {LONGEST} characters")
    try:
        header = dict(jws.extract_compact(token.encode("ascii")).headers())
    except Exception as error:  # whatever a library stumbles over here is the sender's doing
        raise InvalidToken(f"the token cannot be read: {type(error).__name__}") from None
    algorithm, key_id = header.get("alg"), header.get("kid")
    if not isinstance(algorithm, str) or algorithm not in KEY_TYPES:
        raise InvalidToken("alg is not an accepted algorithm")
    fitting = list(_fitting(keys, algorithm, key_id))
    if not fitting:
        raise UnknownKey("no key of the provider fits this token")
    registry = jws.JWSRegistry(algorithms=[algorithm], strict_check_header=False)
    for key in fitting:
        try:
            return bytes(jws.deserialize_compact(token, key, registry=registry).payload or b"")
        except Exception:  # noqa: S112 - another key may fit; that none did is told below
            continue
    raise UnknownKey("the signature does not match")


def _fitting(keys: Sequence[Jwk], algorithm: str, key_id: object) -> Iterator[RSAKey | ECKey]:
    """Yield the keys that may have signed with this algorithm under this id; those that are no good are left out."""
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
