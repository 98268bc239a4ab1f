"""Rejected arrivals: what is kept of one, and why it was rejected, for its owner.

`Samples` puts a bounded number of arrivals aside while they are answered, and reads them afterwards: no request takes
longer because of what is kept of it, and a flood costs no more than a few. `diagnose` compares what was kept with the
settings when somebody with the right looks; nothing of it is stored, and no sender learns it (decision 28).
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from oncehook.errors import Encoded, KeyConflict, KeyRequired, TooLarge, TooManyHops
from oncehook.human import nearest, show_size, show_span
from oncehook.model import UNKNOWN_SOURCE, Arrival, Rejection, is_account_id, pack_head, unpack_head
from oncehook.secret import OldSecret
from oncehook.sources import Source
from oncehook.verify import Either, Nothing, Scheme
from oncehook.verify.schemes import ALGORITHMS, Signature, is_public

BODY_KEPT: Final = 1024
"""Bytes of a rejected body that are kept."""
HEAD_KEPT: Final = 8192
MOST_SAMPLES: Final = 64
"""Arrivals whose bytes are kept between two writes of the counts; of the others only the fact."""
MOST_OF_SOURCE: Final = 16
MOST_BYTES: Final = 1 << 20
"""Bytes of bodies that are read for it between two writes, all together."""
LARGEST_READ: Final = 256 << 10
"""Bytes up to which a body is read, to redact it."""

MOST_SECRETS: Final = 8
"""Secrets of other sources that are tried for one arrival."""


class Samples:
    """Rejected arrivals of known sources that wait for their bytes to be masked and redacted."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Rejection, Source, Arrival]] = []
        self._of_source: Counter[str] = Counter()
        self._bytes = 0

    def add(self, rejection: Rejection, source: Source | None, arrival: Arrival) -> None:
        """Put an arrival aside. Reading it comes later, because the time of an answer must say nothing (S8)."""
        if source is None or len(self._waiting) >= MOST_SAMPLES or self._of_source[source.name] >= MOST_OF_SOURCE:
            return
        if self._bytes + rejection.size > MOST_BYTES:
            return
        self._bytes += rejection.size
        self._of_source[source.name] += 1
        self._waiting.append((rejection, source, arrival))

    def take(self) -> None:
        """Give each waiting rejection the bytes that may be kept of it."""
        for rejection, source, arrival in self._waiting:
            rejection.head, rejection.body = keep_bytes(source, arrival)
        self.__init__()  # type: ignore[misc]


def keep_bytes(source: Source, arrival: Arrival) -> tuple[bytes, bytes | None]:
    """Return head and first bytes of an arrival without credentials; no body where it cannot be redacted."""
    head = source.masking(pack_head(arrival, source.masked, source.scheme.masked_query))[:HEAD_KEPT]
    body = arrival.body
    if source.redaction is not None:
        if len(body) > LARGEST_READ or not source.redaction.can_read(body):
            return head, None
        body = source.redaction(body)
    if len(body) > LARGEST_READ:
        body = body[: BODY_KEPT + LARGEST_READ]  # a secret that begins in what is kept ends in here
    return head, source.body_masking(body)[:BODY_KEPT]


# -- why it was rejected -----------------------------------------------------------------------


def read_account(rejection: Rejection, source: Source) -> str | None:
    """Return the account that the address of an arrival names; None where it names none, or that was not kept."""
    if rejection.head is None or not source.has_accounts_by_address:
        return None
    account = read_arrival(rejection).path.rpartition("/")[2]
    return account if is_account_id(account) else None


def diagnose(
    rejection: Rejection,
    sources: Mapping[str, Source],
    *,
    account: Source | None = None,
    tries_secrets: bool = True,
) -> str | None:
    """Return why an arrival was rejected and what to do, as far as it can be told; None where nothing is known.

    `sources` are those that the reader sees: only their names are suggested, and only their secrets are tried.
    `account` is its source as it is at the address of the account that it came to (`read_account`).
    """
    source = sources.get(rejection.source)
    if source is None:
        return _diagnose_unknown(rejection, sources)
    if rejection.reason == UNKNOWN_SOURCE:
        return _diagnose_later(source)
    if account is None and (named := read_account(rejection, source)) is not None:
        return f"The account {named} is not there any more, or disabled: nobody can send to its address."
    source = account or source
    if rejection.code in _BY_CODE:
        return _BY_CODE[rejection.code](rejection, source)
    if rejection.reason in _BY_REASON:
        return _BY_REASON[rejection.reason]
    if rejection.head is None:
        return None
    arrival = read_arrival(rejection)
    scheme = _shown_scheme(source.scheme, arrival)
    match rejection.reason:
        case "missing":
            return _diagnose_missing(scheme, arrival)
        case "stale":
            return _diagnose_stale(rejection, source, scheme, arrival)
        case "malformed":
            return _diagnose_form(scheme, arrival)
        case "repeated":
            return "A header or field of the signature came twice: something between sender and inbox doubles it."
        case "mismatch":
            return _diagnose_mismatch(rejection, source, scheme, arrival, sources if tries_secrets else {})
        case _:
            return None


def read_arrival(rejection: Rejection) -> Arrival:
    """Rebuild the arrival from what was kept of it."""
    method, target, pairs = unpack_head(rejection.head or b"")
    path, _, query = target.partition("?")
    headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in pairs]
    return Arrival(rejection.source, headers, rejection.body or b"", query.encode("latin-1"), method, path)


def _diagnose_unknown(rejection: Rejection, sources: Mapping[str, Source]) -> str:
    names = [source.path for source in sources.values() if source.path == source.name]
    near = nearest(rejection.source, names)
    base = _read_base(rejection)
    hint = f"Did you mean {base}{near}?" if near else "Check the address at the provider."
    return f"No source has the address {base}{rejection.source}. {hint}"


def _read_base(rejection: Rejection) -> str:
    """Return what comes before the source in the address; `…/` where it was not kept: a mounted inbox has any base."""
    path = read_arrival(rejection).path if rejection.head else ""
    before, found, _ = f"{path}/".rpartition(f"/{rejection.source}/")
    return f"{before}/" if found else "…/"


def _diagnose_later(source: Source) -> str:
    """Return why nothing was found at the address of a source that is there now."""
    if source.has_accounts_by_address:
        return "Its address names no account that was there. Check what comes after the source's own address."
    return "This source was not there then, or disabled."


def _shown_scheme(scheme: Scheme, arrival: Arrival) -> Scheme:
    """Return the alternative whose signature the arrival has; the first one where it has none."""
    if not isinstance(scheme, Either):
        return scheme
    return next((one for one in scheme.schemes if one.shows(arrival)), scheme.schemes[0])


def _diagnose_size(rejection: Rejection, source: Source) -> str:
    most = show_size(source.settings.max_body)
    return f"The body is larger than this source takes ({most}). Raise max_body if such bodies are right."


_BY_CODE: Final[Mapping[str, Callable[[Rejection, Source], str]]] = {
    TooLarge.code: _diagnose_size,
    Encoded.code: lambda rejection, source: (
        "The body came compressed (content-encoding), and signatures are over the plain bytes."
        " Turn compression off at the sender or at the proxy in between."
    ),
    KeyRequired.code: lambda rejection, source: (
        'It is genuine, but nothing was found where the key should be, and on_missing_key is "reject".'
    ),
    KeyConflict.code: lambda rejection, source: (
        'It is genuine, but its key came before with another body, and on_conflict is "reject".'
    ),
    TooManyHops.code: lambda rejection, source: (
        "It has gone through too many inboxes (Oncehook-Hops): a destination leads back to this one."
    ),
}
_BY_REASON: Final = {
    "not a direct request from this machine": (
        "This source takes direct requests from this machine only: it has a development secret or verifies nothing."
        " Give it a secret of its own."
    ),
    "address not allowed": "The peer's address is not in ip_allow. Behind a proxy, trusted_proxies must name it.",
    "not a POST": "It was no POST, and this source knows no handshake.",
    "handshake": "The handshake has another token than verify_token, or none.",
    "no secret for this account": "Neither the account nor the source has a secret. Give the account one.",
}


def _diagnose_missing(scheme: Scheme, arrival: Arrival) -> str:
    there = {name.decode("latin-1").lower() for name, _ in arrival.headers}
    absent = [name for name in scheme.needed_headers if name.lower() not in there]
    if not absent:
        return "A part of the signature is missing or empty."
    names = " and ".join(absent)
    lead = f"The header {names} is missing." if len(absent) == 1 else f"The headers {names} are missing."
    others = sorted(name for name in there if "signature" in name or name.endswith("-token"))
    if others:
        return f"{lead} There is {', '.join(others[:3])}: is it another provider's hook, or another version of it?"
    return f"{lead} The sender does not sign, or a proxy in between removes the header."


def _diagnose_stale(rejection: Rejection, source: Source, scheme: Scheme, arrival: Arrival) -> str:
    tolerance = source.settings.tolerance
    allowed = getattr(scheme, "tolerance", None) if tolerance is None else tolerance
    bound = "" if allowed is None or allowed == math.inf else f" (tolerance {show_span(allowed)})"
    signed_at = scheme.signed_at(arrival)
    if signed_at is None:
        return f"The signature is right, but its time is too far from ours{bound}."
    age = math.floor(rejection.at.timestamp() - signed_at)  # what was signed are whole seconds, mostly
    if age < 0:
        return f"The signature is right, but its timestamp is {-age} s in the future{bound}. Check both clocks."
    return (
        f"The signature is right, but its timestamp is {age} s old{bound}."
        " It was held up on the way, sent again as it was, or a clock is wrong."
    )


def _diagnose_form(scheme: Scheme, arrival: Arrival) -> str:
    if not isinstance(scheme, Signature):
        return "The signature does not have the form that this provider's has."
    values = [value for name, value in arrival.headers if name.decode("latin-1").lower() == scheme.header.lower()]
    text = values[0].decode("latin-1").strip() if values else ""
    start, sign, rest = text.partition("=")
    if scheme.fields is None and scheme.prefix and not text.startswith(scheme.prefix):
        given = f"begins with {start + sign!r}" if sign and start.isalnum() and rest else "has no prefix"
        return f"{scheme.header} {given}; {scheme.prefix!r} is expected: another algorithm or version of the signature."
    bare = text.removeprefix(scheme.prefix)
    looks = _looks_like(bare if scheme.fields is None else "")
    wanted = f"{getattr(scheme, 'algorithm', 'signature')} in {scheme.encoding}"
    if looks and looks != wanted:
        return f"{scheme.header} looks like {looks}; {wanted} is expected."
    return f"{scheme.header} does not have the form of {wanted}."


def _looks_like(text: str) -> str:
    sizes = {"sha1": 20, "sha256": 32, "sha384": 48, "sha512": 64}
    for algorithm in ALGORITHMS:
        size = sizes[algorithm]
        if re.fullmatch(f"[0-9a-fA-F]{{{2 * size}}}", text):
            return f"{algorithm} in hex"
        if len(text) == 4 * math.ceil(size / 3) and re.fullmatch(r"[A-Za-z0-9+/]+={0,2}", text):
            return f"{algorithm} in base64"
    return ""


def _diagnose_mismatch(
    rejection: Rejection, source: Source, scheme: Scheme, arrival: Arrival, others: Mapping[str, Source]
) -> str:
    if "body" not in source.scheme.covers and not isinstance(scheme, Signature):
        whose = f"account {source.account}, which has one of its own" if _has_own_secret(source) else "this source"
        return f"The credential is not the one of {whose}. Compare the secret at the provider with the settings."
    length = next((value for name, value in arrival.headers if name == b"content-length"), b"")
    if length.isdigit() and int(length) != rejection.size:
        return (
            f"The body was changed on the way: content-length says {int(length):,} bytes, {rejection.size:,} came."
            " A proxy in between rewrites it; signatures are over the bytes as sent."
        )
    if rejection.body is None or len(rejection.body) != rejection.size:
        return (
            "The signature is not of any secret of this source, or the body was changed on the way."
            f" Only bodies up to {show_size(BODY_KEPT)} can be compared further."
        )
    return (
        _diagnose_secret(source, arrival)
        or _diagnose_body(source, arrival)
        or _diagnose_others(source, arrival, others)
        or "The signature is of no secret known here, or the body was changed on the way."
        " Compare the secret at the provider with the settings."
    )


def _fits(source: Source, arrival: Arrival, secrets: Sequence[bytes]) -> bool:
    """Tell whether an arrival is signed with one of these secrets, whenever that was."""
    if not secrets or isinstance(source.scheme, Nothing):
        return False
    try:
        source.scheme.verifier(secrets, url=source.signed_url, tolerance=math.inf)(arrival)
    except Exception:  # a wrong signature, a secret of another form, or an error in a check of the user's own
        return False
    return True


def _has_own_secret(source: Source) -> bool:
    """Tell whether this is a source at the address of an account that has a secret of its own for it."""
    return source.template is not None and source.secrets != source.template.secrets


def _diagnose_secret(source: Source, arrival: Arrival) -> str | None:
    whose = f" of account {source.account}" if _has_own_secret(source) else ""
    if (old := _find_ended(source, arrival)) is not None:
        name = f"an old secret{whose}" if whose else old.name or "the old secret"
        return f"Signed with {name}, which ended on {old.ends_at:%Y-%m-%d %H:%M} UTC. Update it at the provider."
    if _fits(source, arrival, source.valid_secrets):
        if source.has_accounts_by_address:
            return "Signed with the secret of the source; the account that it was sent to may have one of its own."
        return f"It fits a secret{whose} that is valid now: the settings were changed since."
    if source.template is None or not whose:
        return None
    if _fits(source, arrival, source.template.secrets):
        return (
            f"Signed with the secret of the source, and account {source.account} has one of its own for it, which alone"
            " counts at its address. Give the sender the secret of the account, or take it out of the account."
        )
    return None


def _find_ended(source: Source, arrival: Arrival) -> OldSecret | None:
    """Return the secret that has ended and that an arrival is signed with."""
    for old in source.old_secrets:
        value = old.value.encode() if isinstance(old.value, str) else old.value
        if value not in source.valid_secrets and _fits(source, arrival, [value]):
            return old
    return None


def _diagnose_body(source: Source, arrival: Arrival) -> str | None:
    for how, body in _variants(arrival.body):
        changed = Arrival(arrival.source, arrival.headers, body, arrival.query, arrival.method, arrival.path)
        if body != arrival.body and _fits(source, changed, source.valid_secrets):
            return f"The body was changed on the way: the signature fits it {how}. A proxy in between rewrites it."
    return None


def _variants(body: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield a body as it may have been before something rewrote it."""
    yield "without the line break at its end", body.rstrip(b"\r\n")
    yield "with a line break at its end", body + b"\n"
    yield "with other line breaks", body.replace(b"\r\n", b"\n")
    yield "with other line breaks", body.replace(b"\n", b"\r\n")
    yield "in another character set", body.decode("latin-1").encode()
    try:
        data: Any = json.loads(body)
    except (ValueError, RecursionError):
        return
    for separators in ((",", ":"), (", ", ": ")):
        for is_ascii in (True, False):
            text = json.dumps(data, separators=separators, ensure_ascii=is_ascii)
            yield "before its JSON was written anew", text.encode("utf-8", "replace")


def _diagnose_others(source: Source, arrival: Arrival, others: Mapping[str, Source]) -> str | None:
    if is_public(source.scheme):
        return None
    tried = 0
    for other in others.values():
        if other.name == source.name or is_public(other.scheme) or isinstance(other.scheme, Nothing):
            continue
        for secret in other.valid_secrets:
            tried += 1
            if tried > MOST_SECRETS:
                return None
            if _fits(source, arrival, [secret]):
                return (
                    f"Signed with the secret of the source {other.name}: the provider has the wrong address or secret."
                )
    return None
