"""Categories of failures: one table for what handlers raise, destinations answer and senders meet.

A status or an exception comes in; `transient`, `permanent` or `unknown` goes out, with the seconds that the other side
asks to wait. Errors of libraries are recognised by their attributes and class names, so that no library has to be
imported. `FailureRules` holds one destination's own rules.
"""

from __future__ import annotations

import errno
import inspect
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from subprocess import CalledProcessError
from typing import Any, Final, Literal

from oncehook import clock
from oncehook.errors import ConfigError, GiveUp, InProgress, RetryLater, StoreUnavailable
from oncehook.model import Category
from oncehook.retry import LONGEST, retry_after

log = logging.getLogger("oncehook.worker")

Classify = Callable[[Exception], Category | Literal["transient", "permanent", "unknown"] | None]
"""A user-defined function: the category of an exception, or None to leave it to the table."""

_PASSING: Final = frozenset({408, 425, 429})


@dataclass(slots=True, frozen=True)
class Failure:
    """Category of a failure, and when to try again."""

    category: Category
    retry_after: float | None = None
    """Seconds after which the other side asks for a retry."""


def category_of(status: int) -> Category | None:
    """Return the category of a status; None for success."""
    if 200 <= status < 300:
        return None
    if status in _PASSING or 500 <= status < 600:
        return Category.transient
    return Category.permanent if 300 <= status < 500 else Category.unknown


def check_classify(classify: Classify) -> Classify:
    """Refuse a coroutine function: `classify` is called at the end of an attempt and not awaited."""
    if inspect.iscoroutinefunction(classify):
        raise ConfigError("classify is called and not awaited.", hint="Write it as `def`, and let it only look.")
    return classify


@dataclass(slots=True, frozen=True)
class FailureRules:
    """One destination's own rules for categories; the table decides what they leave open."""

    transient: frozenset[int] = frozenset()
    permanent: frozenset[int] = frozenset()
    classify: Classify | None = None
    shared: Sequence[Classify] = ()
    """Functions of the whole inbox, called after the destination's own."""

    def __post_init__(self) -> None:
        for status in (*self.transient, *self.permanent):
            if isinstance(status, bool) or not isinstance(status, int) or not 300 <= status < 600:
                raise ConfigError(f"{status!r} is no status of a failure; write numbers from 300 to 599.")
        if both := self.transient & self.permanent:
            raise ConfigError(f"{min(both)} cannot be both transient and permanent.")
        if self.classify is not None:
            check_classify(self.classify)

    def of_status(self, status: int) -> Category | None:
        """Return the category of a status by these rules; None for success."""
        return self._find_status(status) or category_of(status)

    def of_error(self, error: BaseException) -> Failure:
        """Return the category of any exception, and when to try again."""
        if isinstance(error, GiveUp | RetryLater):
            return Failure(Category.permanent if isinstance(error, GiveUp) else Category.transient)
        chain = _chain(error)
        after = next((seconds for one in chain if (seconds := _read_retry_after(one)) is not None), None)
        if (category := self._classify(error)) is not None:
            return Failure(category, after)
        if isinstance(error, BaseExceptionGroup):
            return min(map(self.of_error, error.exceptions), key=lambda one: _HOPE.index(one.category))
        return Failure(self._of_chain(chain), after)

    def _find_status(self, status: int | None) -> Category | None:
        if status in self.transient:
            return Category.transient
        return Category.permanent if status in self.permanent else None

    def _classify(self, error: BaseException) -> Category | None:
        if not isinstance(error, Exception):
            return None
        for classify in (self.classify, *self.shared):
            if classify is None:
                continue
            try:
                if (category := classify(error)) is not None:
                    return Category(category)
            # Logged, so that somebody fixes the rule; swallowed, because the attempt has to be settled all the same.
            except Exception:
                log.exception("classify.failed")
        return None

    def _of_chain(self, chain: Sequence[BaseException]) -> Category:
        status = next(filter(None, map(_status, chain)), None)
        found = self._find_status(status) or next(filter(None, map(_own_word, chain)), None)
        if found is None and status is not None:
            found = category_of(status)
        if found is None:
            found = next((category for holds, category in _TABLE if any(map(holds, chain))), None)
        return found or Category.unknown


_HOPE: Final = (Category.transient, Category.unknown, Category.permanent)
"""Of several errors the most hopeful counts: a hopeless one becomes a dead letter after its last attempt anyway."""

_DEEPEST: Final = 16


def _chain(error: BaseException) -> list[BaseException]:
    """Return an error and those behind it: its cause, and what libraries put into `reason`, `orig` and `args`."""
    found: list[BaseException] = []
    left: list[object] = [error]
    while left and len(found) < _DEEPEST:
        one = left.pop(0)
        if isinstance(one, BaseException) and not any(one is other for other in found):
            found.append(one)
            left += (one.__cause__, _get(one, "reason"), _get(one, "orig"), *one.args)
    return found


def _get(thing: object, name: str) -> Any:
    """Return an attribute; None where it is missing or raises."""
    try:
        return getattr(thing, name, None)
    except Exception:  # a library's property that raises
        return None


def _names(error: BaseException) -> Iterator[str]:
    return (kind.__name__ for kind in type(error).__mro__)


# -- what an error says about itself -----------------------------------------------------------

_AWS_PASSING: Final = frozenset({
    "BandwidthLimitExceeded", "EC2ThrottledException", "InternalError", "PriorRequestNotComplete",
    "ProvisionedThroughputExceededException", "RequestLimitExceeded", "RequestThrottled",
    "RequestThrottledException", "RequestTimeout", "RequestTimeoutException", "SlowDown", "ThrottledException",
    "Throttling", "ThrottlingException", "TooManyRequests", "TooManyRequestsException",
    "TransactionInProgressException",
})  # fmt: skip
"""Codes that pass, some of which AWS answers with 400."""

_DJANGO: Final = {
    "django.http.response.Http404": 404,
    "django.core.exceptions.PermissionDenied": 403,
    "django.core.exceptions.BadRequest": 400,
    "django.core.exceptions.SuspiciousOperation": 400,
}
"""Errors without a status that Django turns into answers."""


def _own_word(error: BaseException) -> Category | None:
    """Return the category of an error of ours, or of AWS's error code."""
    category = _get(error, "category")
    if isinstance(category, Category):
        return category
    if isinstance(error, StoreUnavailable | InProgress):
        return Category.transient
    code = _within(_get(error, "response"), "Error", "Code")
    return Category.transient if isinstance(code, str) and code in _AWS_PASSING else None


def _status(error: BaseException) -> int | None:
    """Return the HTTP status that an error carries, if it is a failure."""
    if isinstance(error, CalledProcessError):
        named = [int(number) for found in _STATUS_TEXT.findall(_text(error)) for number in found if number]
        return next((status for status in reversed(named) if 300 <= status < 600), None)
    if not isinstance(error, Exception):
        return None  # SystemExit has a `code`, too
    response = _get(error, "response")
    for status in (
        _within(response, "ResponseMetadata", "HTTPStatusCode"),
        *(_get(response, name) for name in ("status_code", "status")),
        *(_get(error, name) for name in ("status_code", "http_status", "status", "code")),
        *(_DJANGO.get(f"{kind.__module__}.{kind.__qualname__}") for kind in type(error).__mro__),
    ):
        if isinstance(status, int) and not isinstance(status, bool) and 300 <= status < 600:
            return int(status)
    return None


def _read_retry_after(error: BaseException) -> float | None:
    """Return the seconds after which an error, or the response it carries, asks for a retry."""
    after = _get(error, "retry_after")
    if isinstance(after, int | float) and not isinstance(after, bool) and 0 <= after < math.inf:
        return min(float(after), LONGEST)
    response = _get(error, "response")
    for headers in (
        _within(response, "ResponseMetadata", "HTTPHeaders"),
        _get(response, "headers"),
        _get(error, "headers"),
    ):
        for name in ("Retry-After", "retry-after"):
            try:
                value = headers.get(name)
            except Exception:  # an attribute of this name with another meaning
                break
            if value is not None:
                return retry_after(str(value), clock.now_utc())
    return None


def _within(table: object, *names: str) -> Any:
    """Return a value of nested dicts (botocore's responses); None where there is none."""
    for name in names:
        table = table.get(name) if isinstance(table, Mapping) else None
    return table


# -- the table ---------------------------------------------------------------------------------

_NO_ADDRESS: Final = frozenset({
    "InvalidSchema", "InvalidURL", "LocalProtocolError", "LocationParseError", "LocationValueError",
    "MissingSchema", "NonHttpUrlClientError", "UnsupportedProtocol",
})  # fmt: skip
_CERTIFICATE: Final = "SSLCertVerificationError"

_NETWORK: Final = (
    # time
    "Timeout", "TimeoutError", "TimeoutException", "TimeoutExpired", "TimedOut", "TimeLimitExceeded",
    # connections
    "AutoReconnect", "ConnectError", "ConnectionClosed", "ConnectionClosedError", "ConnectionError",
    "ConnectionFailure", "NetworkError", "SSLError", "TransportError", "URLError", "gaierror", "herror",
    # an incomplete response
    "BadStatusLine", "ChunkedEncodingError", "ClientPayloadError", "IncompleteRead", "IncompleteReadError",
    "MaxRetryError", "ProtocolError",
)  # fmt: skip
"""Endings of the names of such errors, in the standard library and elsewhere."""

_NETWORK_NUMBERS: Final = frozenset(
    {
        errno.EADDRNOTAVAIL,
        errno.ECONNABORTED,
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENETDOWN,
        errno.ENETRESET,
        errno.ENETUNREACH,
        errno.ENOTCONN,
        errno.EPIPE,
        errno.ETIMEDOUT,
    }
)

_SQLSTATES: Final = ("08", "40", "53", "55P03", "57014", "57P")
"""Connections, serialization failures and deadlocks, resources, locks, a cancelled statement, a server that stops."""
_MYSQL: Final = frozenset({1040, 1053, 1205, 1213, 2002, 2003, 2006, 2013, 3572})
_SQLITE: Final = frozenset({5, 6})
"""Busy, locked."""

_MISTAKES: Final = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    FileExistsError,
    FileNotFoundError,
    ImportError,
    IsADirectoryError,
    LookupError,
    NameError,
    NotADirectoryError,
    NotImplementedError,
    PermissionError,
    SyntaxError,
    TypeError,
    ValueError,
    CalledProcessError,
)


def _leads_nowhere(error: BaseException) -> bool:
    """Tell whether the URL is invalid, or the host's certificate is."""
    if isinstance(error, CalledProcessError):
        return "certificate_verify_failed" in _text(error) or "certificate verify failed" in _text(error)
    reason = _get(error, "reason")
    if isinstance(reason, str) and ("unknown url type" in reason or "no host given" in reason):
        return True  # urllib's
    return any(name in _NO_ADDRESS or name == _CERTIFICATE for name in _names(error))


def _is_network(error: BaseException) -> bool:
    if isinstance(error, CalledProcessError):
        return any(mark in _text(error) for mark in _MARKS)
    if isinstance(error, OSError) and error.errno in _NETWORK_NUMBERS:
        return True
    return any(name.endswith(_NETWORK) for name in _names(error)) or _is_busy_database(error)


def _is_busy_database(error: BaseException) -> bool:
    state = _get(error, "sqlstate") or _get(error, "pgcode")
    if isinstance(state, str):
        return state.startswith(_SQLSTATES)
    code = _get(error, "sqlite_errorcode")
    if isinstance(code, int):
        return code & 0xFF in _SQLITE
    if "OperationalError" not in _names(error):
        return False
    # psycopg sets no state when there was no connection.
    return type(error).__module__.startswith("psycopg") or (bool(error.args) and error.args[0] in _MYSQL)


def _is_no_json(error: BaseException) -> bool:
    """Tell whether the response was not JSON, such as the error page of a proxy."""
    return any(name in ("JSONDecodeError", "ContentTypeError") for name in _names(error))


_TABLE: Final[Sequence[tuple[Callable[[BaseException], bool], Category]]] = (
    (_leads_nowhere, Category.permanent),
    (_is_network, Category.transient),
    (_is_no_json, Category.unknown),
    (lambda error: isinstance(error, _MISTAKES), Category.permanent),
)
"""For errors without a status. The first row that matches the error, or one behind it, counts."""


# -- the error output of a program -------------------------------------------------------------

_KEPT: Final = 16_384

_STATUS_TEXT: Final = re.compile(
    r"http(?:/[0-9.]{1,3})?(?: (?:error|status|code)){0,2}[ :=]{1,2}([0-9]{3})\b"
    r"|\b([0-9]{3}) (?:server|client) error\b"
    r"|(?:server|client) error '([0-9]{3})\b"
    r"|returned error: ([0-9]{3})\b"
    r"|status[ _]?code[ :=]{1,2}([0-9]{3})\b"
)
"""A status as urllib, requests, httpx and curl write it, and people."""

_MARKS: Final = (
    "bad gateway", "broken pipe", "connection aborted", "connection closed", "connection error",
    "connection refused", "connection reset", "connectionerror", "could not resolve", "could not serialize",
    "deadlock detected", "eai_again", "econnaborted", "econnrefused", "econnreset", "ehostunreach", "enetunreach",
    "enotfound", "eof occurred", "epipe", "etimedout", "failure in name resolution", "host is down",
    "incompleteread", "name or service not known", "network is unreachable", "no route to host", "no such host",
    "nodename nor servname", "remote end closed connection", "server disconnected", "service unavailable",
    "socket hang up", "temporarily unavailable", "timed out", "timeout", "too many requests", "unexpected eof",
)  # fmt: skip


def _text(error: CalledProcessError) -> str:
    """Return the end of what a program wrote to stderr, in lower case."""
    text = error.stderr
    if isinstance(text, bytes):
        text = text[-_KEPT:].decode("utf-8", "replace")
    return text[-_KEPT:].lower() if isinstance(text, str) else ""
