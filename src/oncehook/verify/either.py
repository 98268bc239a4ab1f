"""Alternatives: a source whose sender may prove itself in more than one way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from oncehook.errors import ConfigError, SignatureInvalid
from oncehook.model import Arrival
from oncehook.verify.asymmetric import Ed25519, PayPal, SendGrid
from oncehook.verify.schemes import NONE, Scheme, SecretError, Verifier, usable


@dataclass(frozen=True, slots=True, init=False)
class Either:
    """Several schemes for one source. They are tried in order, strongest first.

    The first whose signature the arrival shows decides, alone: a wrong signature is not rescued by another
    credential beside it. With `every=True` all may be tried and one match is enough, for alternatives that look
    alike from outside. A scheme that reads the body shows in every arrival: put it last.

    A secret may fit some of the schemes only; one that fits none is an error, and a scheme that no secret fits is
    as good as absent.
    """

    schemes: tuple[Scheme, ...]
    every: bool

    def __init__(self, *schemes: Scheme, every: bool = False) -> None:
        if not schemes:
            raise ConfigError("Either needs schemes to choose from.")
        if len({is_public(scheme) for scheme in schemes}) > 1:
            # Every secret is given to every scheme that it fits, and anybody can sign with a public key as the secret.
            raise ConfigError(
                "Schemes with a public key and schemes with a secret cannot be alternatives of one source.",
                hint="Make two sources, one for each.",
            )
        object.__setattr__(self, "schemes", schemes)
        object.__setattr__(self, "every", every)

    @property
    def masked(self) -> frozenset[bytes]:
        return NONE.union(*[scheme.masked for scheme in self.schemes])

    @property
    def masked_query(self) -> frozenset[bytes]:
        return NONE.union(*[scheme.masked_query for scheme in self.schemes])

    @property
    def covers(self) -> frozenset[str]:
        return self.schemes[0].covers.intersection(*[scheme.covers for scheme in self.schemes])

    @property
    def signed_headers(self) -> frozenset[bytes]:
        return self.schemes[0].signed_headers.intersection(*[scheme.signed_headers for scheme in self.schemes])

    def shows(self, arrival: Arrival) -> bool:
        return any(scheme.shows(arrival) for scheme in self.schemes)

    def verifier(self, secrets: Sequence[bytes], *, url: str | None = None, tolerance: float | None = None) -> Verifier:
        fitting: dict[int, list[bytes]] = {}
        for secret in usable(secrets):
            fits = [i for i, scheme in enumerate(self.schemes) if _fits(scheme, secret, url, tolerance)]
            if not fits:
                raise SecretError("A secret fits none of the schemes of this source.")
            for i in fits:
                fitting.setdefault(i, []).append(secret)
        checks = [
            (self.schemes[i].shows, self.schemes[i].verifier(fitting[i], url=url, tolerance=tolerance))
            for i in sorted(fitting)
        ]
        return _first_that_matches(checks) if self.every else _first_that_shows(checks)

    def sign(self, draft: Arrival, secret: bytes, *, at: float, url: str | None = None) -> Arrival:
        for scheme in self.schemes:
            try:
                return scheme.sign(draft, secret, at=at, url=url)
            except SecretError:
                continue
        raise SecretError("The secret fits none of the schemes of this source.")


def is_public(scheme: Scheme) -> bool:
    """Tell whether a scheme is checked with what is no secret: a public key, a certificate."""
    return isinstance(scheme.schemes[0] if isinstance(scheme, Either) else scheme, Ed25519 | SendGrid | PayPal)


def _fits(scheme: Scheme, secret: bytes, url: str | None, tolerance: float | None) -> bool:
    try:
        scheme.verifier([secret], url=url, tolerance=tolerance)
    except SecretError:
        return False
    return True


_Checks = Sequence[tuple[Callable[[Arrival], bool], Verifier]]


def _first_that_shows(checks: _Checks) -> Verifier:
    def verify(arrival: Arrival) -> None:
        for shows, check in checks:
            if shows(arrival):
                return check(arrival)
        raise SignatureInvalid("missing")

    return verify


def _first_that_matches(checks: _Checks) -> Verifier:
    def verify(arrival: Arrival) -> None:
        refusals: list[str] = []
        for shows, check in checks:
            if not shows(arrival):
                continue
            try:
                return check(arrival)
            except SignatureInvalid as refusal:
                if refusal.reason == "repeated":
                    raise
                refusals.append(refusal.reason)
        # what came closest says most: a stale signature was genuine once
        raise SignatureInvalid(
            next((word for word in ("stale", "mismatch") if word in refusals), (refusals or ["missing"])[0])
        )

    return verify
