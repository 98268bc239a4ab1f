"""Addresses that events name: what a list of hosts allows, whatever tricks an address is spelt with."""

from __future__ import annotations

from typing import Any

import pytest
from config_cases import loads, refused
from tests.leases import make_lease

from oncehook import Inbox
from oncehook.destinations.event_address import EventAddress, NoAddress
from oncehook.errors import ConfigError
from oncehook.http_client.hosts import AllowedHosts
from oncehook.http_client.urls import read_url
from oncehook.model import Arrival, pack_head

ALLOWED = [
    "hooks.example.org",
    "*.example.net",
    "müller.example",
    "10.0.0.7",
    "[fd00::7]:8443",
    "http://old.example:8080",
]


def read(value: Any, allow: list[str] = ALLOWED) -> str:
    import msgspec

    return read_body(msgspec.json.encode({"callback_url": value}), allow=allow)


def read_body(
    body: bytes, url: str = "{$.callback_url}", *headers: tuple[bytes, bytes], allow: list[str] = ALLOWED
) -> str:
    head = pack_head(Arrival("orders", list(headers), b"", path="/in/orders"))
    return EventAddress(url, allow).read(make_lease(request_head=head, body=body).event)


@pytest.mark.parametrize(
    ("given", "called"),
    [
        ("https://hooks.example.org", "https://hooks.example.org/"),
        ("https://hooks.example.org/a/b?c=d&e", "https://hooks.example.org/a/b?c=d&e"),
        ("HTTPS://HOOKS.Example.ORG/A", "https://hooks.example.org/A"),
        ("https://hooks.example.org:443/a", "https://hooks.example.org:443/a"),
        ("https://hooks.example.org./a.", "https://hooks.example.org/a."),
        ("https://hooks.example.org.:443/a", "https://hooks.example.org:443/a"),
        ("https://hooks。example。org/a", "https://hooks.example.org/a"),
        ("https://ⓗooks.example.org/a", "https://hooks.example.org/a"),
        ("https://a.example.net/", "https://a.example.net/"),
        ("https://a.b.example.net/", "https://a.b.example.net/"),
        ("https://MÜLLER.example/", "https://xn--mller-kva.example/"),
        ("https://10.0.0.7/", "https://10.0.0.7/"),
        ("https://0xa.7/", "https://10.0.0.7/"),
        ("https://[FD00:0::0007]:8443/", "https://[fd00::7]:8443/"),
        ("http://old.example:8080/x", "http://old.example:8080/x"),
        (
            "https://hooks.example.org/?next=https://evil.example/@x",
            "https://hooks.example.org/?next=https://evil.example/@x",
        ),
    ],
)
def test_an_address_of_the_list_is_called_in_its_one_spelling(given: str, called: str) -> None:
    assert read(given) == called


@pytest.mark.parametrize(
    "given",
    [
        "https://evil.example/",
        "https://hooks.example.org.evil.example/",
        "https://evil-hooks.example.org/",
        "https://evilhooks.example.org/",
        "https://example.org/",
        "https://example.net/",
        "https://evilexample.net/",
        "https://hooks.example.org:8443/",
        "https://hooks.example.org:80/",
        "http://hooks.example.org/",
        "http://hooks.example.org:443/",
        "https://old.example:8080/",
        "http://old.example/",
        "https://10.0.0.70/",
        "https://[::ffff:10.0.0.7]/",
        "https://[fd00::7]/",
        "https://2130706433/",
        "https://127.1/",
        "https://169.254.169.254/latest/meta-data/",
        "https://localhost/",
        "https://evil.example/hooks.example.org",
        "https://evil.example?hooks.example.org",
        "https://evil.example?@hooks.example.org/",
        "https://xn--hoks-6na.example.org/",
        "https://hooks.exаmple.org/",  # a Cyrillic letter
    ],
)
def test_an_address_of_another_host_port_or_scheme_is_not(given: str) -> None:
    with pytest.raises(NoAddress) as caught:
        read(given)
    first, second = str(caught.value).split("\n")
    assert first == "the address at $.callback_url is not allowed by allow_hosts", "one cause for all of them"
    assert second.startswith(("https://", "http://"))
    assert second.count("/") == 2, "no more of it than the host"


@pytest.mark.parametrize(
    "given",
    [
        "https://hooks.example.org@evil.example/",
        "https://evil.example@hooks.example.org/",
        "https://a:b@hooks.example.org/",
        "https://@hooks.example.org/",
        "https://hooks.example.org\\@evil.example/",
        "https:\\\\hooks.example.org/",
        "https://hooks.example.org\t/",
        "https://hooks.example.org\r\nHost: evil.example/",
        " https://hooks.example.org/",
        "https://hooks.example.org/ HTTP/1.1",
        "https://hooks.example.org/\u0000",
        "https://hooks.example.org/\u2028",
        "https://hooks.example.org/#@evil.example",
        "https://hooks%2eexample.org/",
        "https://hooks.example.org%00.evil.example/",
        "https://hooks.example.org:0/",
        "https://hooks.example.org:99999/",
        "https://hooks.example.org:٤٤٣/",
        "https://hooks.example.org:443:443/",
        "https://hooks..example.org/",
        "https://.example.net/",
        "https://*.example.net/",
        "https:///hooks.example.org/",
        "https:hooks.example.org",
        "//hooks.example.org/",
        "hooks.example.org",
        "file:///etc/passwd",
        "gopher://hooks.example.org/",
        "javascript:alert(1)",
        "https://[fe80::1%25eth0]/",
        "https://[hooks.example.org]/",
        "{$.callback_url}",
        "https://" + "a" * 3000,
        "https://hooks.example.org/" + "a" * 3000,
        42,
        True,
    ],
)
def test_what_is_no_address_is_a_failure_that_repeats_nothing_of_it(given: object) -> None:
    with pytest.raises(NoAddress) as caught:
        read(given)
    said = str(caught.value)
    assert said.startswith("the address at $.callback_url ")
    assert "example" not in said
    assert "\n" not in said


@pytest.mark.parametrize(
    "body", [b"{}", b'{"callback_url": null}', b'{"callback_url": ""}', b'{"callback_url": ["https://hooks.example.org"]}',
             b'{"callback_url": {}}', b"not json", b"", b"\xff", b"[" * 100_000, b'"https://hooks.example.org"']
)  # fmt: skip
def test_an_event_without_an_address(body: bytes) -> None:
    with pytest.raises(NoAddress, match=r"^the event has no address at \$\.callback_url$"):
        read_body(body)


def test_a_lone_surrogate_is_no_address() -> None:
    with pytest.raises(NoAddress):
        read_body(b'{"callback_url": "https://hooks.example.org/\\ud800"}')


def test_places_besides_the_body() -> None:
    address = b"https://hooks.example.org/a"
    form = (b"content-type", b"application/x-www-form-urlencoded")
    assert (
        read_body(b"response_url=https%3A%2F%2Fhooks.example.org%2Fa", "{form:response_url}", form) == address.decode()
    )
    assert read_body(b"", "{header:X-Callback}", (b"x-callback", address)) == address.decode()
    queried = pack_head(Arrival("orders", [], b"", b"back=https%3A%2F%2Fhooks.example.org%2Fa", path="/in/orders"))
    assert EventAddress("{query:back}", ALLOWED).read(make_lease(request_head=queried).event) == address.decode()
    with pytest.raises(NoAddress, match="header:X-Callback"):
        read_body(b"", "{header:X-Callback}", (b"x-callback", address), (b"x-callback", b"https://evil.example/"))


@pytest.mark.parametrize(
    "entry",
    ["*", "*.", "*.org", "*.*.org", "hooks.*.org", "a*.example.org", "*.10.0.0.7", "https://", "ftp://a.example",
     "a.example/path", "a.example?x", "u@a.example", "a.example:0", "a.example:x", "fd00::7", "a b", "", ".example.org",
     "javascript:x"],
)  # fmt: skip
def test_an_entry_that_is_no_host_is_refused(entry: str) -> None:
    with pytest.raises(ConfigError):
        AllowedHosts([entry])


def test_entries_are_read_in_any_spelling() -> None:
    hosts = AllowedHosts(["HOOKS.Example.org.", "https://b.example:8443"])
    assert hosts.allow(read_url("https://hooks.example.org/")) is not None
    assert hosts.allow(read_url("https://b.example:8443/")) is not None
    assert hosts.allow(read_url("https://b.example/")) is None


# -- settings ------------------------------------------------------------------------------------


def target(more: str = "", url: str = "{$.callback_url}") -> str:
    return f'[destination.back]\nurl = "{url}"\n{more}\n'


def test_the_file_names_place_and_hosts() -> None:
    loaded = loads(target('allow_hosts = ["hooks.example.org", "*.example.net"]'))
    shown = {one.name: one.value for one in loaded.settings()}
    assert shown["destination.back.url"] == "{$.callback_url}"
    assert "hooks.example.org" in str(shown["destination.back.allow_hosts"])


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (target(), "allow_hosts = [\"hooks.example.org\"]"),
        (target("allow_hosts = []"), "must name at least one"),
        (target('allow_hosts = ["*"]'), '"*" is not a host'),
        (target('allow_hosts = ["*.com"]'), "not a domain of somebody's own"),
        (target('allow_hosts = ["a.example"]', "https://a.example/"), "is for an address from the event"),
        (target('allow_hosts = ["a.example"]\npath = { env = "HOME" }'), "path in [destination.back] cannot follow"),
        (target('allow_hosts = ["a.example"]', "{callback_url}"), 'Did you mean "$.callback_url"?'),
        (target('allow_hosts = ["a.example"]', "{$.callback_url"), "not closed"),
        (target('allow_hosts = ["a.example"]', "{literal:https://a.example/}"), "without braces"),
        (target('allow_hosts = ["a.example"]', "https://{$.host}/x"), "only the whole can be"),
        (target('allow_hosts = ["a.example"]', "https://a.example/{$.id}"), "only the whole can be"),
    ],
)  # fmt: skip
def test_a_definition_that_says_too_little_or_too_much_is_refused(text: str, sentence: str) -> None:
    assert sentence in "\n".join(refused(text, {"HOME": "x"}))


def test_a_reference_cannot_be_a_place() -> None:
    said = refused('[destination.back]\nurl = { env = "BACK" }\n', {"BACK": "{$.callback_url}"})
    assert "begins with http" in "\n".join(said)


def test_a_program_is_refused_alike() -> None:
    inbox = Inbox("sqlite:unused.db")
    with pytest.raises(ConfigError, match="allow_hosts"):
        inbox.destination("back", url="{$.callback_url}")
    made = inbox.destination("back", url="{$.callback_url}", allow_hosts=["hooks.example.org"])
    assert made.address == "POST {$.callback_url}"
