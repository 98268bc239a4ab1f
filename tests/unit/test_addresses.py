"""Where a call may go: the table entry by entry (S18), what may be allowed (S19), one spelling per address (S20)."""

from __future__ import annotations

import subprocess
import sys
from ipaddress import ip_address, ip_network
from urllib.parse import urlsplit

import pytest

from oncehook.errors import ConfigError
from oncehook.http_client.addresses import TABLE, AddressRefused, Guard, find_denial
from oncehook.http_client.urls import read_url, secret_parts, shown_url, with_path

# -- the table ---------------------------------------------------------------------------------

# Written out a second time, from the IANA registries: the first and last address of each, and what it is.
REGISTRIES = [
    ("0.0.0.0", "0.255.255.255", "this network"),
    ("10.0.0.0", "10.255.255.255", "private"),
    ("100.64.0.0", "100.127.255.255", "shared by a carrier"),
    ("127.0.0.0", "127.255.255.255", "loopback"),
    ("168.63.129.16", "168.63.129.16", "a cloud's own"),
    ("169.254.0.0", "169.254.255.255", "link-local"),
    ("172.16.0.0", "172.31.255.255", "private"),
    ("192.0.0.0", "192.0.0.255", "for protocols"),
    ("192.0.2.0", "192.0.2.255", "documentation"),
    ("192.88.99.0", "192.88.99.255", "a 6to4 relay"),
    ("192.168.0.0", "192.168.255.255", "private"),
    ("198.18.0.0", "198.19.255.255", "for benchmarks"),
    ("198.51.100.0", "198.51.100.255", "documentation"),
    ("203.0.113.0", "203.0.113.255", "documentation"),
    ("224.0.0.0", "239.255.255.255", "multicast"),
    ("240.0.0.0", "255.255.255.254", "reserved"),
    ("255.255.255.255", "255.255.255.255", "broadcast"),
    ("::", "::", "unspecified"),
    ("::1", "::1", "loopback"),
    ("::2", "::ffff:ffff", "IPv4-compatible"),
    ("::7f00:1", "::7f00:1", "IPv4-compatible"),
    ("::ffff:0:0", "::ffff:ffff:ffff", "IPv4-mapped"),
    ("::ffff:8.8.8.8", "::ffff:127.0.0.1", "IPv4-mapped"),
    ("::ffff:0:0:0", "::ffff:0:ffff:ffff", "IPv4-translated"),
    ("64:ff9b::", "64:ff9b::ffff:ffff", "NAT64"),
    ("64:ff9b::127.0.0.1", "64:ff9b::10.0.0.1", "NAT64"),
    ("64:ff9b:1::", "64:ff9b:1:ffff:ffff:ffff:ffff:ffff", "NAT64"),
    ("100::", "100::ffff:ffff:ffff:ffff", "discarded"),
    ("100:0:0:1::", "100:0:0:1:ffff:ffff:ffff:ffff", "a dummy prefix"),
    ("2001::", "2001:0:ffff:ffff:ffff:ffff:ffff:ffff", "Teredo"),
    ("2001:2::", "2001:2:0:ffff:ffff:ffff:ffff:ffff", "for benchmarks"),
    ("2001:1::", "2001:1ff:ffff:ffff:ffff:ffff:ffff:ffff", "for protocols"),
    ("2001:10::", "2001:2f:ffff:ffff:ffff:ffff:ffff:ffff", "for protocols"),
    ("2001:db8::", "2001:db8:ffff:ffff:ffff:ffff:ffff:ffff", "documentation"),
    ("2002::", "2002:ffff:ffff:ffff:ffff:ffff:ffff:ffff", "6to4"),
    ("3ffe::", "3ffe:ffff:ffff:ffff:ffff:ffff:ffff:ffff", "6bone"),
    ("3fff::", "3fff:fff:ffff:ffff:ffff:ffff:ffff:ffff", "documentation"),
    ("5f00::", "5f00:ffff:ffff:ffff:ffff:ffff:ffff:ffff", "segment routing"),
    ("fc00::", "fdff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", "private"),
    ("fd00:ec2::254", "fd00:ec2::254", "private"),
    ("fe80::", "febf:ffff:ffff:ffff:ffff:ffff:ffff:ffff", "link-local"),
    ("fec0::", "feff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", "site-local"),
    ("ff00::", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", "multicast"),
    ("200::", "1fff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", "reserved"),
    ("4000::", "5eff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", "reserved"),
    ("8000::", "fbff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", "reserved"),
]

PUBLIC = [
    "1.0.0.0", "8.8.8.8", "9.255.255.255", "11.0.0.0", "100.63.255.255", "100.128.0.0", "126.255.255.255", "128.0.0.0",
    "168.63.129.15", "168.63.129.17", "169.253.255.255", "169.255.0.0", "172.15.255.255", "172.32.0.0",
    "191.255.255.255", "192.0.1.0", "192.0.3.0", "192.88.98.255", "192.88.100.0", "192.167.255.255", "192.169.0.0",
    "198.17.255.255", "198.20.0.0", "198.51.99.255", "198.51.101.0", "203.0.112.255", "203.0.114.0", "223.255.255.255",
    "2000::1", "2001:200::", "2001:db7:ffff::", "2001:db9::", "2003::", "2606:4700:4700::1111", "2a00:1450::1",
    "3ffd:ffff::", "3fff:1000::",
]  # fmt: skip


@pytest.mark.parametrize(("first", "last", "what"), REGISTRIES)
def test_each_entry_is_refused_from_its_first_to_its_last_address(first: str, last: str, what: str) -> None:
    guard = Guard()
    assert (guard.refuses(first), guard.refuses(last)) == (what, what)
    with pytest.raises(AddressRefused, match="not a public address"):
        guard.check(first)


def test_every_line_of_the_table_is_one_of_those() -> None:
    tested = {denied_line(first) for first, _, _ in REGISTRIES}
    assert tested == {text for text, _ in TABLE}


def denied_line(text: str) -> str:
    address = ip_address(text)
    return next(line for line, _ in TABLE if address in ip_network(line))


@pytest.mark.parametrize("text", PUBLIC)
def test_the_public_internet_begins_where_an_entry_ends(text: str) -> None:
    assert find_denial(ip_address(text)) is None
    Guard().check(text)


@pytest.mark.parametrize("text", ["", "localhost", "1.2.3", "fe80::1%eth0", "::1%lo", "127.0.0.1%x"])
def test_what_is_no_plain_address_is_refused(text: str) -> None:
    assert Guard().refuses(text) is not None


# -- what may be allowed -----------------------------------------------------------------------


def test_a_network_is_allowed_by_name_and_nothing_beside_it() -> None:
    guard = Guard([ip_network("10.1.0.0/16"), ip_network("fd00:1::/32")])
    assert guard.refuses("10.1.255.255") is None
    assert guard.refuses("fd00:1::5") is None
    assert guard.refuses("10.2.0.0") == "private"
    assert guard.refuses("127.0.0.1") == "loopback"
    assert guard.refuses("fd00:2::5") == "private"


def test_everything_is_allowed_only_when_that_is_said() -> None:
    assert Guard(True).refuses("169.254.169.254") is None
    assert Guard(False).refuses("169.254.169.254") == "link-local"
    assert Guard([]).refuses("169.254.169.254") == "link-local"


@pytest.mark.parametrize(
    ("tunnel", "public", "inside"),
    [
        ("64:ff9b::/96", "64:ff9b::8.8.8.8", "64:ff9b::10.0.0.1"),
        ("::ffff:0:0/96", "::ffff:8.8.8.8", "::ffff:169.254.169.254"),
        ("::/96", "::8.8.8.8", "::127.0.0.1"),
        ("::ffff:0:0:0/96", "::ffff:0:808:808", "::ffff:0:7f00:1"),
        ("2002::/16", "2002:808:808::1", "2002:a00:1::1"),
        ("2001::/32", "2001:0:4136:e378:8000:63bf:f7f7:f7f7", "2001:0:4136:e378:8000:63bf:80ff:fffe"),
    ],
)
def test_whoever_allows_a_tunnel_has_not_allowed_what_lies_behind_it(tunnel: str, public: str, inside: str) -> None:
    guard = Guard([ip_network(tunnel)])
    assert guard.refuses(public) is None
    assert guard.refuses(inside) is not None
    assert Guard([ip_network(tunnel), ip_network("0.0.0.0/0")]).refuses(inside) is None


# -- one spelling ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "called"),
    [
        ("http://127.1/", "http://127.0.0.1/"),
        ("http://0x7f000001/", "http://127.0.0.1/"),
        ("http://0X7F.1/", "http://127.0.0.1/"),
        ("http://2130706433/", "http://127.0.0.1/"),
        ("http://0177.0.0.1/", "http://127.0.0.1/"),
        ("http://127.0.0.1./", "http://127.0.0.1/"),
        ("http://１２７.０.０.１/", "http://127.0.0.1/"),
        ("http://127。0。0。1/", "http://127.0.0.1/"),
        ("http://[0:0::1]:8080/", "http://[::1]:8080/"),
        ("http://[::ffff:127.0.0.1]/", "http://[::ffff:7f00:1]/"),
        ("HTTPS://Example.ORG", "https://example.org/"),
        ("https://bücher.example/", "https://xn--bcher-kva.example/"),
        ("https://faß.example/", "https://xn--fa-hia.example/"),
        ("https://example.org/a%2Fb/ä?sig=a%2Bb%2F&x=ö", "https://example.org/a%2Fb/%C3%A4?sig=a%2Bb%2F&x=%C3%B6"),
    ],
)
def test_an_address_is_written_in_one_way_before_it_is_judged(written: str, called: str) -> None:
    assert read_url(written) == called
    assert read_url(called) == called


@pytest.mark.parametrize(
    "written",
    [
        "ftp://example.org/", "file:///etc/passwd", "gopher://example.org/", "example.org/hook", "//example.org/", "",
        "http://", "http:///path", "https://user@example.org/", "https://user:hush-hush@example.org/",
        "https://@example.org/", "http://example.org\\@10.0.0.1/", "http://exa\tmple.org/", "http://example.org/\r\nX:",
        "http://example .org/", "http://example.org/#there", "http://example.org:0/", "http://example.org:99999/",
        "http://%31%32%37.0.0.1/", "http://1.2.3.4.5/", "http://256.1.1.1/", "http://0x/", "http://08.1.1.1/",
        "http://-a.example/", "http://a..b/", "http://[::1/", "http://[fe80::1%25eth0]/", "http://[1.2.3.4]/",
    ],
)  # fmt: skip
def test_what_could_be_read_in_two_ways_is_refused(written: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_url(written)
    assert "hush-hush" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "called"),
    [
        ("bücher.example", "xn--bcher-kva.example"),
        ("faß.example", "xn--fa-hia.example"),
        ("ΒΌΛΟΣ.example", "xn--nxasmq6b.example"),
        ("例え.テスト", "xn--r8jz45g.xn--zckzah"),
    ],
)
def test_names_of_other_letters_need_no_library_of_a_proxy(name: str, called: str) -> None:
    """yarl comes with aiohttp, which only a proxy needs: a plain installation has neither."""
    program = (
        "import sys; sys.modules['yarl'] = sys.modules['aiohttp'] = None\n"
        "from oncehook.http_client.urls import read_url\nprint(read_url(sys.argv[1]))"
    )
    done = subprocess.run([sys.executable, "-c", program, f"https://{name}/"], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (f"https://{called}/\n", "")


@pytest.mark.parametrize("name", ["☃.example", "-ü.example", "ü" * 64 + ".example", "ü..example"])
def test_a_name_that_no_registry_would_take_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="names no usable host"):
        read_url(f"https://{name}/")


@pytest.mark.parametrize("path", ["T0/B0/hush", "/T0/B0/hush", "//T0/B0/hush"])
@pytest.mark.parametrize("url", ["https://hooks.example", "https://hooks.example/"])
def test_a_path_is_appended_and_stays_a_path(url: str, path: str) -> None:
    assert with_path(url, path) == "https://hooks.example/T0/B0/hush"
    assert urlsplit(read_url(with_path(url, "@evil.example/x"))).hostname == "hooks.example"
    assert urlsplit(read_url(with_path(url, ".evil.example/x"))).hostname == "hooks.example"
    assert with_path(f"{url.rstrip('/')}/services/", path) == "https://hooks.example/services/T0/B0/hush"


def test_a_path_cannot_follow_a_query() -> None:
    with pytest.raises(ConfigError, match="cannot follow"):
        with_path("https://hooks.example/?a=1", "hush")


def test_of_a_secret_address_only_the_host_is_shown() -> None:
    url = "https://hooks.example:8443/services/T0/hush?token=hush"
    assert shown_url(url, is_secret=True) == "https://hooks.example:8443/…"
    assert {url, "/services/T0/hush?token=hush", "hush", "services"} <= secret_parts(url)
    assert not any("hooks.example" in part and part != url for part in secret_parts(url))


def test_the_values_of_a_query_are_not_shown() -> None:
    assert shown_url("https://example.org/a?token=hush&plain&b=1") == "https://example.org/a?token=…&…&b=…"
    assert shown_url("https://example.org/a") == "https://example.org/a"
