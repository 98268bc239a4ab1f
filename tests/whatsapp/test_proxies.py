"""Proxies: how they are written and found, and that calls really go through them, over HTTP and SOCKS5.

The two proxies here are small but real: they open the connection they are asked for and pass bytes both ways.
"""

from __future__ import annotations

import asyncio
import base64
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from ipaddress import ip_network
from pathlib import Path
from typing import Any, Literal

import pytest

from oncehook import Inbox
from oncehook.errors import ConfigError
from oncehook.http_client import AddressForbidden, HttpAnswer, Unanswered, Untrusted
from oncehook.http_client.client import HttpClient
from oncehook.http_client.proxy import proxy_from, read_proxy
from oncehook.model import Category
from oncehook.settings import load
from oncehook.whatsapp import EvolutionApi, EvolutionGo, MetaCloud, Reason, Sender, SendFailed, sender
from tests import certificates
from tests.whatsapp.scripted import Api, answer, cut, hang, read_request

USER, PASSWORD = "web-user", "p@ss:word/canary"
QUOTED = "p%40ss%3Aword%2Fcanary"
OK = answer(200, {"messages": [{"id": "wamid.NEW"}]})
LOOPBACK = [ip_network("127.0.0.0/8")]


# -- the other ends ----------------------------------------------------------------------------


@dataclass
class Relay:
    """A proxy that wants USER and PASSWORD, and knows only one place: every name leads to `port` here."""

    kind: Literal["http", "socks5"]
    target: int
    port: int = 0
    wanted: list[str] = field(default_factory=list)
    """What it was asked for, as `host:port` or as a whole address."""
    refuses: bool = False
    silent: bool = False
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def url(self, user: str = f"{USER}:{QUOTED}@") -> str:
        return f"{self.kind}://{user}127.0.0.1:{self.port}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        with suppress(asyncio.CancelledError, ConnectionError, asyncio.IncompleteReadError):
            if self.silent:
                await asyncio.Event().wait()
            await (self._http if self.kind == "http" else self._socks)(reader, writer)
        writer.transport.abort()

    async def _http(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = await read_request(reader)
        self.wanted.append(asked.path)
        said = asked.headers.get("proxy-authorization", "")
        if said != "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode():
            writer.write(answer(407))
        elif self.refuses:
            writer.write(answer(502))
        elif asked.method == "CONNECT":
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            await self._join(reader, writer)
        else:
            path = "/" + asked.path.split("/", 3)[3]
            lines = [f"{asked.method} {path} HTTP/1.1", *(f"{n}: {v}" for n, v in asked.headers.items())]
            await self._join(reader, writer, "\r\n".join([*lines, "", ""]).encode() + asked.body)

    async def _socks(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        _, count = await reader.readexactly(2)
        offered = await reader.readexactly(count)
        if 2 not in offered:
            writer.write(b"\x05\xff")
            return
        writer.write(b"\x05\x02")
        _, length = await reader.readexactly(2)
        user = await reader.readexactly(length)
        password = await reader.readexactly((await reader.readexactly(1))[0])
        if (user.decode(), password.decode()) != (USER, PASSWORD):
            writer.write(b"\x01\x01")
            return
        writer.write(b"\x01\x00")
        *_, form = await reader.readexactly(4)
        if form == 3:
            host = (await reader.readexactly((await reader.readexactly(1))[0])).decode()
        else:
            host = ".".join(map(str, await reader.readexactly(4)))
        self.wanted.append(f"{host}:{int.from_bytes(await reader.readexactly(2))}")
        writer.write(b"\x05" + (b"\x05" if self.refuses else b"\x00") + b"\x00\x01" + bytes(6))
        if not self.refuses:
            await self._join(reader, writer)

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, first: bytes = b"") -> None:
        inner, out = await asyncio.open_connection("127.0.0.1", self.target)
        out.write(first)
        try:
            await asyncio.gather(_pass(reader, out), _pass(inner, writer))
        finally:
            out.transport.abort()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Relay]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for task in self.tasks:
                task.cancel()
            await asyncio.gather(*self.tasks)


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(65536):
        writer.write(piece)
    writer.close()


@asynccontextmanager
async def behind(
    kind: Literal["http", "socks5"], *says: Any, tls: ssl.SSLContext | None = None, **how: Any
) -> AsyncIterator[tuple[Relay, Api]]:
    options = {} if tls is None else {"ssl": tls}
    async with Api(list(says)).open(**options) as api, Relay(kind, api.port, **how).open() as relay:
        yield relay, api


async def call(
    relay: Relay, url: str = "http://api.example/send", *, proxy: str | None = None, within: float = 60, **rules: Any
) -> HttpAnswer:
    client = HttpClient(proxy=proxy or relay.url(), **rules)
    await client.open()
    try:
        return await client.request("POST", url, {"apikey": "k"}, b"{}", within=within)
    finally:
        await client.close()


BOTH = pytest.mark.parametrize("kind", ["http", "socks5"])


# -- going through -----------------------------------------------------------------------------


@BOTH
async def test_a_call_goes_through_the_proxy_which_looks_the_name_up(kind: Literal["http", "socks5"]) -> None:
    async with behind(kind, OK) as (relay, api):
        assert (await call(relay)).status == 200
        assert relay.wanted == ["http://api.example/send" if kind == "http" else "api.example:80"]
        asked = api.asked[0]
        assert (asked.method, asked.path, asked.headers["host"], asked.body) == ("POST", "/send", "api.example", b"{}")


certificate = certificates.fixture("api.example")


@BOTH
async def test_tls_goes_through_to_the_other_end_and_is_checked_there(
    kind: Literal["http", "socks5"], certificate: certificates.Certificate
) -> None:
    context = certificates.served(certificate)
    async with behind(kind, OK, answer(407), tls=context) as (relay, api):
        assert (await call(relay, "https://api.example/send", ca=certificate[0])).status == 200
        assert relay.wanted == ["api.example:443"], "a tunnel, so the proxy sees nothing of it"
        assert "proxy-authorization" not in api.asked[0].headers
        said = await call(relay, "https://api.example/send", ca=certificate[0])
        assert said.status == 407, "the other end's own word, and not the proxy's"
        with pytest.raises(Untrusted, match=r"the certificate of api\.example is not trusted") as raised:
            await call(relay, "https://api.example/send")
        assert (raised.value.reached, raised.value.category) == (False, Category.permanent)
        with pytest.raises(Untrusted):
            await call(relay, "https://other.example/send", ca=certificate[0])
        assert len(api.asked) == 2


@BOTH
async def test_a_target_written_as_an_address_is_judged_and_the_proxy_is_not(kind: Literal["http", "socks5"]) -> None:
    async with behind(kind, OK) as (relay, api):
        for host in ("127.0.0.1", "10.0.0.1", "169.254.169.254", "[::1]", "[::ffff:10.0.0.1]"):
            with pytest.raises(AddressForbidden) as raised:
                await call(relay, f"http://{host}/send")
            assert not raised.value.reached
        assert not relay.wanted
        assert (await call(relay, "http://127.0.0.1/send", allow_private=LOOPBACK)).status == 200
        assert len(api.asked) == 1


@BOTH
async def test_a_proxy_that_refuses_leaves_nothing_sent(kind: Literal["http", "socks5"]) -> None:
    async with behind(kind, OK, refuses=True) as (relay, api):
        with pytest.raises(Unanswered) as raised:
            await call(relay, "https://api.example/send")
        assert not raised.value.reached
        assert "proxy" in str(raised.value)
        assert not api.asked


@BOTH
@pytest.mark.parametrize("user", ["", "web-user:wrong-canary@"])
@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_wrong_credentials_are_told_and_not_shown(
    kind: Literal["http", "socks5"], user: str, scheme: str
) -> None:
    async with behind(kind, OK) as (relay, api):
        with pytest.raises(Unanswered) as raised:
            await call(relay, f"{scheme}://api.example/send", proxy=relay.url(user))
        assert not raised.value.reached
        assert "proxy" in str(raised.value)
        assert "canary" not in repr(raised.value)
        assert not api.asked


@BOTH
async def test_a_proxy_that_is_down_or_silent_leaves_nothing_sent(kind: Literal["http", "socks5"]) -> None:
    async with behind(kind, OK) as (relay, _):
        pass
    with pytest.raises(Unanswered) as raised:
        await call(relay)
    assert not raised.value.reached
    assert "proxy" in str(raised.value)
    assert "canary" not in repr(raised.value)
    async with behind(kind, OK, silent=True) as (relay, _):
        with pytest.raises(Unanswered, match=r"no answer within 0\.3 s") as late:
            await call(relay, "https://api.example/send", within=0.3)
        assert not late.value.reached


@BOTH
async def test_silence_behind_the_proxy_may_have_been_a_call(kind: Literal["http", "socks5"]) -> None:
    for says in (hang, cut):
        async with behind(kind, says) as (relay, api):
            with pytest.raises(Unanswered) as raised:
                await call(relay)
            assert raised.value.reached
            assert len(api.asked) == 1


@BOTH
async def test_a_sender_goes_through_its_proxy(
    kind: Literal["http", "socks5"], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with behind(kind, OK) as (relay, api):
        async with MetaCloud("token-0123", "1", base_url="http://graph.example", proxy=relay.url()) as sender:
            assert (await sender.send_text("+55 11 99999-0001", "Hello")).message_id == "wamid.NEW"
            assert "canary" not in f"{sender!r}{vars(sender)['address']}"
        monkeypatch.setenv("ONCEHOOK_PROXY_SHOP_1", relay.url())
        async with EvolutionGo("http://go.example", "token-0123", instance="shop-1", proxy="env") as sender:
            await sender.send_text("+55 11 99999-0001", "Hello")
        assert len(relay.wanted) == len(api.asked) == 2
        wrong = relay.url("web-user:wrong-canary@")
        async with MetaCloud("token-0123", "1", base_url="http://graph.example", proxy=wrong) as sender:
            with pytest.raises(SendFailed) as raised:
                await sender.send_text("+55 11 99999-0001", "Hello")
        assert (raised.value.reason, raised.value.unsure) == (Reason.unavailable, False)
        assert "canary" not in repr(raised.value)


async def test_the_environment_is_not_asked_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async with behind("http", OK) as (relay, api):
        for name in ("ONCEHOOK_PROXY", "HTTP_PROXY", "http_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, relay.url())
        async with MetaCloud("token-0123", "1", base_url=api.url, allow_private=True) as sender:
            await sender.send_text("+55 11 99999-0001", "Hello")
        assert not relay.wanted
        assert len(api.asked) == 1


@BOTH
async def test_connections_through_a_proxy_are_kept(kind: Literal["http", "socks5"]) -> None:
    async with behind(kind, OK, OK, tls=None) as (relay, api):
        client = HttpClient(proxy=relay.url())
        await client.open()
        for _ in range(2):
            assert (await client.request("POST", "http://api.example/send", {}, b"{}", within=60)).status == 200
        await client.close()
        assert (len(relay.wanted), len(api.asked)) == (1, 2)


class Liar:
    """A proxy that answers everything with one and the same text."""

    def __init__(self, text: bytes) -> None:
        self.text = text

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(65536)
        writer.write(self.text)
        await writer.drain()
        writer.close()


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("http", b"SSH-2.0-OpenSSH\r\n\r\n"),
        ("http", b"HTTP/1.1 200 OK\r\n\r\nhello"),
        ("http", b"x" * 20_000),
        ("http", b"HTTP/1.1 302 Found\r\nLocation: http://10.0.0.1/\r\n\r\n"),
        ("socks5", b"HTTP/1.1 400 Bad Request\r\n\r\n"),
        ("socks5", b"\x05\x07"),
        ("socks5", b"\x05\xff"),
    ],
)
async def test_a_proxy_that_speaks_nonsense_leaves_nothing_sent(kind: str, text: bytes) -> None:
    server = await asyncio.start_server(Liar(text).serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    client = HttpClient(proxy=f"{kind}://u:p@127.0.0.1:{port}")
    await client.open()
    try:
        with pytest.raises(Unanswered, match="proxy") as raised:
            await client.request("POST", "https://api.example/send", {}, b"{}", within=60)
        assert not raised.value.reached
    finally:
        await client.close()
        server.close()


# -- no other way out --------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["192.0.2.1", "2001:db8::1", "8.8.8.8", "::ffff:8.8.8.8"])
def test_no_test_reaches_the_network(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        with socket.socket(family, kind) as one, pytest.raises(OSError, match="no test reaches the network"):
            one.connect((host, 443))


async def test_no_test_asks_for_a_name_of_the_network() -> None:
    with pytest.raises(socket.gaierror, match="no test reaches the network"):
        await asyncio.get_running_loop().getaddrinfo("api.example", 443)


@pytest.mark.parametrize("make", [MetaCloud, EvolutionApi, EvolutionGo])
async def test_a_sender_reaches_the_network_through_the_proxy_only(
    make: type[Sender], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[type[Sender], dict[str, str]] = {
        MetaCloud: {"token": "token-0123", "phone_number_id": "1"},
        EvolutionApi: {"api_key": "token-0123", "instance": "shop"},
        EvolutionGo: {"token": "token-0123"},
    }
    said = settings[make] | {"base_url": "http://api.example"}
    async with sender(make.api, **said) as without:
        with pytest.raises(SendFailed) as raised:
            await without.send_text("+55 11 99999-0001", "Hello")
        assert (raised.value.reason, raised.value.unsure) == (Reason.unavailable, False)
    async with behind("http", OK) as (relay, api):
        monkeypatch.setenv("WEBSHARE_PROXY_HOST", "127.0.0.1")
        monkeypatch.setenv("WEBSHARE_PROXY_PORT", str(relay.port))
        monkeypatch.setenv("WEBSHARE_PROXY_USERNAME", USER)
        monkeypatch.setenv("WEBSHARE_PROXY_PASSWORD", PASSWORD)
        async with sender(make.api, **said, proxy="env") as through:
            assert (await through.send_text("+55 11 99999-0001", "Hello")).status == 200
        assert [wanted.startswith("http://api.example/") for wanted in relay.wanted] == [True]
        assert len(api.asked) == 1


# -- how a proxy is written --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "address", "credentials"),
    [
        ("http://p.example:8080", "http://p.example:8080", ""),
        ("http://P.Example:8080/", "http://p.example:8080", ""),
        (f"http://{USER}:{QUOTED}@p.example:80", "http://p.example:80", f"{USER}:{PASSWORD}"),
        ("socks5://u@10.0.0.1:1080", "socks5://10.0.0.1:1080", "u:"),
        ("socks5h://[::1]:1080", "socks5://[::1]:1080", ""),
    ],
)
def test_a_proxy_is_read_and_shown_without_credentials(text: str, address: str, credentials: str) -> None:
    proxy = read_proxy(text)
    assert (proxy.address, proxy.credentials) == (address, credentials)
    assert repr(proxy) == f"Proxy({address})"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "canary",
        "p.example:8080",
        "ftp://canary@p.example:8080",
        "https://canary@p.example:8080",
        "http://canary@p.example",
        "http://canary@p.example:0x50",
        "http://canary@p.example:99999",
        "http://canary@:8080",
        "http://canary@p.example:8080/path",
        "http://canary@p.example:8080?x=1",
        "http://canary@p.exa mple:8080",
        "http://canary@p_.-example:8080",
        "http://canary\n@p.example:8080",
    ],
)
def test_a_proxy_that_cannot_be_meant_is_an_error_that_does_not_repeat_it(text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_proxy(text)
    assert "canary" not in f"{raised.value} {raised.value.hint}"


@pytest.mark.parametrize(
    ("environ", "instance", "expected"),
    [
        ({"ONCEHOOK_PROXY": "http://all:1"}, "shop", "http://all:1"),
        ({"ONCEHOOK_PROXY": "http://all:1"}, None, "http://all:1"),
        (
            {"ONCEHOOK_PROXY": "http://all:1", "ONCEHOOK_PROXY_MY_SHOP_1": "socks5://own:2"},
            "my shop-1",
            "socks5://own:2",
        ),
        ({"ONCEHOOK_PROXY": "http://all:1", "ONCEHOOK_PROXY_SHOP": "none"}, "shop", None),
        ({"ONCEHOOK_PROXY": "http://all:1", "ONCEHOOK_PROXY_SHOP": ""}, "shop", "http://all:1"),
        ({"ONCEHOOK_PROXY": "http://all:1", "ONCEHOOK_PROXY_OTHER": "http://other:2"}, "shop", "http://all:1"),
        ({"PROXY_HOST": "p.webshare.io", "PROXY_PORT": "80"}, None, "http://p.webshare.io:80"),
        (
            {
                "PROXY_HOST": "p.webshare.io",
                "PROXY_PORT": "1080",
                "PROXY_USERNAME": USER,
                "PROXY_PASSWORD": PASSWORD,
                "PROXY_PROTOCOL": "SOCKS5",
            },
            "shop",
            f"socks5://{USER}:{QUOTED}@p.webshare.io:1080",
        ),
        ({"PROXY_HOST": "::1", "PROXY_PORT": "80"}, None, "http://[::1]:80"),
        ({"PROXY_HOST": "p.example", "PROXY_PORT": "80", "ONCEHOOK_PROXY": "http://all:1"}, None, "http://all:1"),
        ({"ONCEHOOK_PROXY": "none"}, None, None),
        (
            {
                "WEBSHARE_PROXY_HOST": "p.webshare.io",
                "WEBSHARE_PROXY_PORT": "80",
                "WEBSHARE_PROXY_USERNAME": USER,
                "WEBSHARE_PROXY_PASSWORD": PASSWORD,
            },
            "shop",
            f"http://{USER}:{QUOTED}@p.webshare.io:80",
        ),
        (
            {
                "PROXY_HOST": "p.example",
                "PROXY_PORT": "80",
                "WEBSHARE_PROXY_HOST": "p.webshare.io",
                "WEBSHARE_PROXY_PORT": "80",
            },
            None,
            "http://p.example:80",
        ),
    ],
)
def test_the_environment_names_a_proxy(environ: dict[str, str], instance: str | None, expected: str | None) -> None:
    assert proxy_from(environ, instance) == expected
    if expected is not None:
        read_proxy(expected)


@pytest.mark.parametrize("prefix", ["PROXY", "WEBSHARE_PROXY"])
def test_half_a_proxy_in_the_environment_is_an_error(prefix: str) -> None:
    with pytest.raises(ConfigError, match=f"^{prefix}_HOST is set, and {prefix}_PORT is not"):
        proxy_from({f"{prefix}_HOST": "p.example"}, None)


@pytest.mark.parametrize("environ", [{}, {"ONCEHOOK_PROXY": " "}, {"PROXY_PORT": "80"}, {"HTTP_PROXY": "http://p:1"}])
def test_where_a_proxy_is_asked_for_and_none_is_named_nothing_starts(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="names no proxy") as raised:
        proxy_from(environ, "shop")
    assert "WEBSHARE_PROXY_HOST" in raised.value.hint
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="names no proxy"):
        EvolutionGo("http://go.example", "token-0123", instance="shop", proxy="env")
    monkeypatch.setenv("ONCEHOOK_PROXY_SHOP", "none")
    EvolutionGo("http://go.example", "token-0123", instance="shop", proxy="env")


SETTINGS = """
[destination.answers.whatsapp]
api = "evolution-go"
base_url = "https://go.example"
token = { env = "TOKEN" }
proxy = "env"
"""


def test_a_server_whose_settings_ask_for_a_proxy_does_not_start_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "token-0123")
    (tmp_path / "oncehook.toml").write_text(SETTINGS)
    loaded = load(tmp_path / "oncehook.toml")
    with pytest.raises(ConfigError, match="names no proxy"):
        Inbox(f"sqlite:{tmp_path}/inbox.db").add_settings(loaded)
    monkeypatch.setenv("WEBSHARE_PROXY_HOST", "p.webshare.io")
    monkeypatch.setenv("WEBSHARE_PROXY_PORT", "80")
    Inbox(f"sqlite:{tmp_path}/inbox.db").add_settings(loaded)
