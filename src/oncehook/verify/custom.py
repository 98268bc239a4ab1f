"""A check of one's own, for a sender that no scheme here describes.

A function says whether an arrival is genuine; `Custom` makes a scheme of it, with the same promises as the others: no
secret, no source, and whatever the bytes are, an arrival that is not proven genuine is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from oncehook.errors import ConfigError, SignatureInvalid
from oncehook.model import Arrival
from oncehook.verify import readers
from oncehook.verify.schemes import NONE, UNCOVERED, Verifier, usable

Genuine = Callable[[Arrival, bytes], bool]
"""(arrival, secret) -> True for a genuine one."""
Signer = Callable[[Arrival, bytes], Arrival]
"""(draft, secret) -> the draft as a genuine sender would send it."""

# What reading something absent or odd raises: the arrival's fault. Anything else is ours, and the sender tries again.
_MALFORMED: Final = (LookupError, TypeError, AttributeError, ValueError)


@dataclass(frozen=True, slots=True)
class Custom:
    """The check is called with each of the source's secrets. True, and nothing else, lets the arrival in.

    Compare with `oncehook.verify.same`, so that time tells nothing. `body` says that the check covers the body,
    `headers` names those that carry the secret itself and must not be stored; with a `signer`, `oncehook send` and
    `oncehook.testing` can send samples.
    """

    check: Genuine
    signer: Signer | None = None
    body: bool = False
    headers: tuple[str, ...] = ()

    masked_query: ClassVar[frozenset[bytes]] = NONE
    signed_headers: ClassVar[frozenset[bytes]] = NONE

    def __post_init__(self) -> None:
        if inspect.iscoroutinefunction(self.check):
            raise ConfigError("A check must be a plain function: nothing is awaited before an arrival is verified.")

    @property
    def masked(self) -> frozenset[bytes]:
        return frozenset(readers.header_name(name) for name in self.headers)

    @property
    def covers(self) -> frozenset[str]:
        return frozenset({"body"}) if self.body else UNCOVERED

    def shows(self, arrival: Arrival) -> bool:
        return True

    def verifier(self, secrets: Sequence[bytes], *, url: str | None = None, tolerance: float | None = None) -> Verifier:
        kept, check = usable(secrets), self.check

        def verify(arrival: Arrival) -> None:
            try:
                # All are tried, so that time does not tell which secret it was. A check that forgets to answer
                # has not said True.
                answers = [check(arrival, secret) for secret in kept]
            except _MALFORMED:
                raise SignatureInvalid("malformed") from None
            if not any(answer is True for answer in answers):
                raise SignatureInvalid("mismatch")

        return verify

    def sign(self, draft: Arrival, secret: bytes, *, at: float, url: str | None = None) -> Arrival:
        if self.signer is None:
            raise ConfigError(
                "This source has a check of its own, and nothing that signs for it.",
                hint="Give it verify=Custom(check, signer=…).",
            )
        return self.signer(readers.with_headers(draft), secret)
