"""How a failure gets its category: one table for what handlers raise, what destinations answer, and what senders meet.

The libraries are real, and so is the server that answers them on loopback; nothing of ours is told who raised what.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import sqlite3
import ssl
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import aiohttp
import botocore.exceptions
import botocore.session
import httpx
import psycopg
import pytest
import redis
import requests
import sqlalchemy
import sqlalchemy.exc
import werkzeug.exceptions
from botocore.config import Config as BotoConfig
from starlette.exceptions import HTTPException
from tests import certificates

from oncehook import GiveUp, InProgress, RetryLater
from oncehook.destinations.base import Result
from oncehook.destinations.handler import failure
from oncehook.errors import Overloaded, StoreUnavailable
from oncehook.http_client import AddressForbidden, Unanswered, Untrusted
from oncehook.model import Category
from oncehook.payload import Unreadable
from oncehook.whatsapp.outcomes import Reason, SendFailed
from oncehook.whatsapp.storage import StorageFailed

TRANSIENT, PERMANENT, UNKNOWN = Category.transient, Category.permanent, Category.unknown
WITHIN: Final = 10


# -- the other end -----------------------------------------------------------------------------


class Answering(BaseHTTPRequestHandler):
    """Answers `/503` with 503; `/html` with 200 and a page, as a proxy does that has nobody behind it."""

    def do_GET(self) -> None:
        page = self.path.endswith("html")
        status = 200 if page else int(self.path.rpartition("/")[2])
        body = b"<html>Bad gateway</html>" if page else b"{}"
        self.send_response(status)
        self.send_header("Content-Type", "text/html" if page else "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Retry-After", "90")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@contextmanager
def serving(tls: ssl.SSLContext | None = None) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"{'http' if tls is None else 'https'}://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with serving() as url:
        yield url


@pytest.fixture(scope="module")
def nobody() -> Iterator[str]:
    """An address where nobody listens, and nobody else will."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


@pytest.fixture
def silent() -> Iterator[str]:
    """Somebody who takes a connection and never says a word."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


# -- clients -----------------------------------------------------------------------------------


def by_urllib(url: str, within: float = WITHIN) -> Any:
    with urllib.request.urlopen(url, timeout=within) as answer:
        return json.load(answer)


def by_requests(url: str, within: float = WITHIN) -> Any:
    answer = requests.get(url, timeout=within)
    answer.raise_for_status()
    return answer.json()


def by_httpx(url: str, within: float = WITHIN) -> Any:
    return httpx.get(url, timeout=within, trust_env=False).raise_for_status().json()


def by_aiohttp(url: str, within: float = WITHIN) -> Any:
    async def ask() -> Any:
        limit = aiohttp.ClientTimeout(total=within)
        async with aiohttp.ClientSession(timeout=limit) as session, session.get(url) as answer:
            answer.raise_for_status()
            return await answer.json()

    return asyncio.run(ask())


CLIENTS: Final = [by_urllib, by_requests, by_httpx, by_aiohttp]
each_client = pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.__name__)


def caught(call: Callable[[], object]) -> Exception:
    with pytest.raises(Exception) as found:  # noqa: PT011 - which one is the library's affair
        call()
    if isinstance(found.value, urllib.error.HTTPError):
        found.value.close()  # it holds the connection
    return found.value


# -- statuses ----------------------------------------------------------------------------------


@each_client
@pytest.mark.parametrize(
    ("status", "category"),
    [
        (400, PERMANENT),
        (401, PERMANENT),
        (404, PERMANENT),
        (409, PERMANENT),
        (410, PERMANENT),
        (422, PERMANENT),
        (408, TRANSIENT),
        (425, TRANSIENT),
        (429, TRANSIENT),
        (500, TRANSIENT),
        (503, TRANSIENT),
    ],
)
def test_an_error_that_carries_a_status_counts_by_it(
    server: str, client: Callable[[str], Any], status: int, category: Category
) -> None:
    result = failure(caught(lambda: client(f"{server}/{status}")))
    assert (result.category, result.retry_after) == (category, 90.0)
    assert result.pause is None, "a handler's own calls pause nobody"


@each_client
def test_nobody_there_and_no_answer_are_transient(client: Callable[..., Any], nobody: str, silent: str) -> None:
    assert failure(caught(lambda: client(f"{nobody}/200"))).category is TRANSIENT
    assert failure(caught(lambda: client(f"{silent}/200", 0.1))).category is TRANSIENT


@each_client
def test_a_name_that_nobody_knows_is_transient(client: Callable[[str], Any]) -> None:
    assert failure(caught(lambda: client("http://nowhere.invalid/"))).category is TRANSIENT


@each_client
def test_a_page_instead_of_json_is_unknown(server: str, client: Callable[[str], Any]) -> None:
    assert failure(caught(lambda: client(f"{server}/html"))).category is UNKNOWN


@each_client
def test_a_certificate_that_does_not_hold_is_permanent(client: Callable[[str], Any], tmp_path: Path) -> None:
    with serving(certificates.served(certificates.make("localhost", tmp_path))) as url:
        assert failure(caught(lambda: client(f"{url}/200"))).category is PERMANENT


@each_client
@pytest.mark.parametrize("url", ["orders", "gopher://example.com/", "http://"])
def test_an_address_that_is_none_is_permanent(client: Callable[[str], Any], url: str) -> None:
    assert failure(caught(lambda: client(url))).category is PERMANENT


def test_aws_by_its_status_and_by_its_own_word_for_slow_down(nobody: str) -> None:
    def said(status: int, code: str, headers: dict[str, str] | None = None) -> Exception:
        metadata = {"HTTPStatusCode": status, "HTTPHeaders": headers or {}}
        return botocore.exceptions.ClientError({"Error": {"Code": code}, "ResponseMetadata": metadata}, "PutObject")  # type: ignore[arg-type]

    assert failure(said(403, "AccessDenied")).category is PERMANENT
    slow = failure(said(503, "SlowDown", {"retry-after": "7"}))
    assert (slow.category, slow.retry_after) == (TRANSIENT, 7.0)
    # DynamoDB and others answer 400 for what passes.
    assert failure(said(400, "ThrottlingException")).category is TRANSIENT
    assert failure(said(400, "ProvisionedThroughputExceededException")).category is TRANSIENT
    assert failure(said(400, "ValidationException")).category is PERMANENT

    keys = {"aws_access_key_id": "a", "aws_secret_access_key": "b", "region_name": "us-east-1"}
    once = BotoConfig(retries={"total_max_attempts": 1}, connect_timeout=5)
    client = botocore.session.Session().create_client("s3", endpoint_url=nobody, config=once, **keys)
    assert failure(caught(client.list_buckets)).category is TRANSIENT


def test_what_web_frameworks_raise() -> None:
    from django.core.exceptions import BadRequest, PermissionDenied, SuspiciousFileOperation
    from django.http import Http404

    for error in (Http404(), PermissionDenied(), BadRequest(), SuspiciousFileOperation()):
        assert failure(error).category is PERMANENT
    assert failure(HTTPException(422)).category is PERMANENT
    assert failure(HTTPException(503, headers={"Retry-After": "3"})).retry_after == 3.0
    assert failure(werkzeug.exceptions.NotFound()).category is PERMANENT
    assert failure(werkzeug.exceptions.ServiceUnavailable()).category is TRANSIENT


class Sdk(Exception):
    """An error as many SDKs make them."""

    def __init__(self, **fields: Any) -> None:
        super().__init__("failed")
        vars(self).update(fields)


class Odd:
    """A response that cannot even be asked."""

    def __repr__(self) -> str:
        return "Odd()"  # a name of a test, the same in every process

    @property
    def status_code(self) -> int:
        raise RuntimeError("not yet read")


@pytest.mark.parametrize(
    ("error", "category"),
    [
        (Sdk(http_status=402), PERMANENT),
        (Sdk(status_code=502), TRANSIENT),
        (Sdk(status="503"), UNKNOWN),
        (Sdk(status=200), UNKNOWN),
        (Sdk(code=190), UNKNOWN),
        (Sdk(code=True, status=None), UNKNOWN),
        (Sdk(response=Odd()), UNKNOWN),
        (Sdk(response={"Error": "none"}), UNKNOWN),
        (Sdk(response={"ResponseMetadata": []}), UNKNOWN),
        (Sdk(status_code=503, headers=17), TRANSIENT),
        (Sdk(status_code=503, headers={"Retry-After": "soon"}), TRANSIENT),
    ],
    ids=str,
)
def test_a_status_is_found_by_shape_and_only_where_it_is_one(error: Sdk, category: Category) -> None:
    assert (failure(error).category, failure(error).retry_after) == (category, None)


# -- databases ---------------------------------------------------------------------------------


def from_postgres(state: str) -> psycopg.Error:
    return psycopg.errors.lookup(state)("failed")


@pytest.mark.parametrize("state", ["40001", "40P01", "55P03", "57P01", "57P03", "57014", "08006", "53300"])
def test_what_passes_in_postgresql_is_transient_however_it_is_wrapped(state: str) -> None:
    from django.db import OperationalError

    error = from_postgres(state)
    assert failure(error).category is TRANSIENT
    assert failure(sqlalchemy.exc.DBAPIError("SELECT 1", {}, error)).category is TRANSIENT
    by_django = OperationalError("failed")
    by_django.__cause__ = error
    assert failure(by_django).category is TRANSIENT


@pytest.mark.parametrize("state", ["23505", "42P01", "22P02"])
def test_other_errors_of_a_database_are_unknown(state: str) -> None:
    assert failure(from_postgres(state)).category is UNKNOWN


def test_databases_that_cannot_be_reached_or_are_busy(tmp_path: Path, nobody: str) -> None:
    port = int(nobody.rpartition(":")[2])
    away = caught(lambda: psycopg.connect(f"host=127.0.0.1 port={port} connect_timeout=5"))
    assert failure(away).category is TRANSIENT
    assert failure(caught(redis.Redis(port=port, socket_connect_timeout=5).ping)).category is TRANSIENT
    engine = sqlalchemy.create_engine(f"postgresql+psycopg://127.0.0.1:{port}/x")
    assert failure(caught(engine.connect)).category is TRANSIENT

    first = sqlite3.connect(tmp_path / "one.db", isolation_level=None)
    second = sqlite3.connect(tmp_path / "one.db", isolation_level=None, timeout=0)
    first.execute("BEGIN IMMEDIATE")
    assert failure(caught(lambda: second.execute("BEGIN IMMEDIATE"))).category is TRANSIENT
    assert failure(caught(lambda: second.execute("SELECT * FROM nowhere"))).category is UNKNOWN
    first.close()
    second.close()


@pytest.mark.parametrize(
    ("number", "category"), [(1213, TRANSIENT), (1205, TRANSIENT), (2006, TRANSIENT), (1054, UNKNOWN)]
)
def test_mysql_by_its_numbers(number: int, category: Category) -> None:
    from django.db import OperationalError

    assert failure(OperationalError(number, "said MySQL")).category is category


# -- what Python itself raises -----------------------------------------------------------------


class PoolTimeout(Exception):
    """As drivers name theirs."""


@pytest.mark.parametrize(
    "error",
    [
        TimeoutError(),
        subprocess.TimeoutExpired("curl", 5),
        PoolTimeout(),
        ConnectionRefusedError(),
        ConnectionResetError(),
        BrokenPipeError(),
        socket.gaierror(socket.EAI_NONAME, "Name or service not known"),
        OSError(101, "Network is unreachable"),
        OSError(113, "No route to host"),
        ssl.SSLEOFError(8, "EOF occurred in violation of protocol"),
        http.client.RemoteDisconnected("Remote end closed connection without response"),
        http.client.IncompleteRead(b"half"),
        asyncio.IncompleteReadError(b"half", 9),
        urllib.error.URLError(TimeoutError("timed out")),
        StoreUnavailable(),
        Overloaded(),
        Unanswered("no answer"),
        StorageFailed("busy", transient=True),
        SendFailed("busy", Reason.rate_limited),
    ],
    ids=repr,
)
def test_the_network_and_time_are_transient(error: Exception) -> None:
    assert failure(error).category is TRANSIENT


@pytest.mark.parametrize(
    "error",
    [
        TypeError("x"),
        AttributeError("x"),
        KeyError("x"),
        IndexError("x"),
        ValueError("x"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
        AssertionError("x"),
        NotImplementedError("x"),
        NameError("x"),
        ImportError("x"),
        ZeroDivisionError("x"),
        FileNotFoundError(2, "No such file or directory"),
        PermissionError(13, "Permission denied"),
        IsADirectoryError(21, "Is a directory"),
        Unreadable("not readable as JSON"),
        ssl.SSLCertVerificationError(1, "certificate verify failed"),
        http.client.InvalidURL("no port"),
        AddressForbidden("a private address"),
        Untrusted("expired"),
        StorageFailed("wrong keys", transient=False),
        SendFailed("gone", Reason.invalid_number),
        GiveUp("no use"),
    ],
    ids=repr,
)
def test_mistakes_are_permanent(error: Exception) -> None:
    assert failure(error).category is PERMANENT


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("x"),
        Exception("x"),
        OSError(28, "No space left on device"),
        MemoryError(),
        RecursionError(),
        SystemExit(404),
        asyncio.CancelledError(),
        json.JSONDecodeError("Expecting value", "<html>", 0),
    ],
    ids=repr,
)
def test_the_rest_is_unknown(error: BaseException) -> None:
    assert failure(error).category is UNKNOWN


def test_what_a_library_or_the_handler_wrapped_counts() -> None:
    def wrapped(outer: Exception, inner: BaseException) -> Exception:
        outer.__cause__ = inner
        return outer

    assert failure(wrapped(RuntimeError("no order"), TimeoutError())).category is TRANSIENT
    assert failure(wrapped(RuntimeError("no order"), KeyError("id"))).category is PERMANENT
    # A status is looked for before anything else, however deep it stands.
    assert failure(wrapped(ValueError("no order"), Sdk(status_code=503))).category is TRANSIENT
    assert failure(wrapped(TimeoutError(), Sdk(status_code=404))).category is PERMANENT
    looped = RuntimeError("a")
    looped.__cause__ = wrapped(RuntimeError("b"), looped)
    assert failure(looped).category is UNKNOWN


def test_a_group_is_as_hopeful_as_its_most_hopeful_error() -> None:
    assert failure(ExceptionGroup("two", [KeyError("id"), ValueError("x")])).category is PERMANENT
    assert failure(ExceptionGroup("two", [KeyError("id"), RuntimeError("x")])).category is UNKNOWN
    busy = failure(ExceptionGroup("two", [KeyError("id"), ExceptionGroup("in", [Sdk(status_code=503, retry_after=7)])]))
    assert (busy.category, busy.retry_after) == (TRANSIENT, 7.0)


def test_an_error_that_says_when_is_believed() -> None:
    assert failure(InProgress(retry_after=30)).retry_after == 30.0
    assert failure(InProgress(retry_after=30)).category is TRANSIENT
    assert failure(SendFailed("busy", Reason.rate_limited, retry_after=9)).retry_after == 9.0
    for odd in (-1, float("nan"), float("inf"), True, "soon"):
        assert failure(Sdk(status_code=429, retry_after=odd)).retry_after is None
    assert failure(RetryLater(after="5m")).wait == 300.0


# -- what a program said -----------------------------------------------------------------------


def ended(stderr: str | bytes | None) -> subprocess.CalledProcessError:
    return subprocess.CalledProcessError(1, ["skill"], stderr=stderr)


SECOND_STORY: Final[list[tuple[Exception, Category]]] = [
    (subprocess.TimeoutExpired(["skill"], 30), TRANSIENT),
    (ended("HTTP 503 Service Unavailable"), TRANSIENT),
    (ended("HTTP 500 Internal Server Error"), TRANSIENT),
    (ended("Connection refused"), TRANSIENT),
    (ended("URLError: <urlopen error timed out>"), TRANSIENT),
    (ended("ConnectionResetError: [Errno 104] Connection reset by peer"), TRANSIENT),
    (ValueError("bad number"), PERMANENT),
    (FileNotFoundError(2, "No such file or directory"), PERMANENT),
    (ended("HTTP 400 Bad Request"), PERMANENT),
    (ended("HTTP 404 Not Found"), PERMANENT),
    (ended("RuntimeError: no such instance"), PERMANENT),
    (ended(""), PERMANENT),
    (ended(None), PERMANENT),
]


@pytest.mark.parametrize(("error", "category"), SECOND_STORY, ids=repr)
def test_the_second_storys_thirteen_cases(error: Exception, category: Category) -> None:
    assert failure(error).category is category


@pytest.mark.parametrize(
    "said",
    [
        "connect: Network is unreachable",
        "No route to host",
        "curl: (6) Could not resolve host: api.example.com",
        "socket.gaierror: [Errno -3] Temporary failure in name resolution",
        "[Errno -2] Name or service not known",
        "http.client.RemoteDisconnected: Remote end closed connection without response",
        "BrokenPipeError: [Errno 32] Broken pipe",
        "curl: (28) Operation timed out after 5000 milliseconds",
        "Error: read ECONNRESET",
        "Error: connect ECONNREFUSED 127.0.0.1:8080",
        "Error: getaddrinfo EAI_AGAIN api.example.com",
        "TimeoutError",
        "requests.exceptions.ReadTimeout: HTTPSConnectionPool: Read timed out.",
        "urllib.error.HTTPError: HTTP Error 503: Service Unavailable",
        "requests.exceptions.HTTPError: 502 Server Error: Bad Gateway for url: http://x/",
        "httpx.HTTPStatusError: Server error '503 Service Unavailable' for url",
        "curl: (22) The requested URL returned error: 503",
        "HTTP/1.1 429 Too Many Requests",
        "status code: 503",
    ],
)
def test_every_mark_of_a_failing_network_in_stderr_is_transient(said: str) -> None:
    assert failure(ended(f"Traceback (most recent call last):\n{said}\n")).category is TRANSIENT
    assert failure(ended(f"{said} \xff".encode("latin-1"))).category is TRANSIENT


@pytest.mark.parametrize(
    "said",
    [
        "urllib.error.HTTPError: HTTP Error 404: Not Found",
        "requests.exceptions.HTTPError: 401 Client Error: Unauthorized for url: http://x/timeout",
        "HTTP 400: the connection timed out",
        "KeyError: 'id'",
        "ssl.SSLCertVerificationError: [SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed (timed out)",
        "order 503 is not there",
    ],
)
def test_other_words_in_stderr_are_permanent(said: str) -> None:
    assert failure(ended(said)).category is PERMANENT


def test_the_last_status_in_stderr_counts() -> None:
    assert failure(ended("HTTP 503, trying again\nHTTP 400 Bad Request")).category is PERMANENT
    assert failure(ended("HTTP 200 for the list\nHTTP 503")).category is TRANSIENT


def test_a_program_that_really_ran(tmp_path: Path) -> None:
    def run() -> Result:
        with pytest.raises(subprocess.CalledProcessError) as found:
            subprocess.run(["sh", "-c", "echo HTTP 503 >&2; exit 3"], check=True, capture_output=True, text=True)
        return failure(found.value)

    assert run().category is TRANSIENT
