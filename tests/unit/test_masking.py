"""A source's own secrets are kept nowhere, whatever the bytes around them are (S25); and the body is kept (S11)."""

from __future__ import annotations

import base64
import json
import logging
from pathlib import Path
from urllib.parse import quote, quote_plus

import pytest

from oncehook import Inbox, samples
from oncehook.model import Arrival, EventDetails, EventId
from oncehook.secret import Masking
from oncehook.verify import Basic, Hmac, Nothing, Token

SECRET = 'k3y/"ção" 0f th3 h0use'
TOKEN = "tok_5f0c2b7a9e"
ESCAPED = "".join(f"\\u{ord(c):04X}" for c in TOKEN)
MIXED = TOKEN[:3] + f"\\u{ord(TOKEN[3]):04x}" + TOKEN[4:]

# Of each: the token where its verifier reads it, and something about the body that no parser of ours takes.
UNREADABLE = {
    "too deep": b'{"token":"%t","a":' + b"[" * 100 + b"]" * 100 + b"}",
    "too deep, in front": b'{"a":' + b'{"b":' * 80 + b'"%t"' + b"}" * 80 + b',"token":"%t"}',
    "too many values": b'{"token":"%t","a":[' + b"0," * 260_000 + b"0]}",
    "too many, one of them it": b'{"token":"%t","a":[' + b"0," * 260_000 + b'"%t"]}',
    "a number too large": b'{"token":"%t","a":1e999}',
    "a number too large, nested": b'{"a":{"b":[-1e999]},"token":"%t"}',
    "not UTF-8": b'{"token":"%t","a":"\xff\xfe"}',
    "not UTF-8, in a name": b'{"token":"%t","\xc3\x28":1}',
    "twice, null last": b'{"token":"%t","other":{"token":"%t","token":null}}',
    "twice": b'{"token":"x","token":"%t"}',
    "escaped and too deep": b'{"token":"%e","a":' + b"[" * 100 + b"]" * 100 + b"}",
    "escaped and a number too large": b'{"token":"%m","a":1e999}',
    "escaped and not UTF-8": b'{"token":"%e","a":"\xff"}',
    "escaped name": b'{"\\u0074oken":"%t","a":1e999}',
}
READABLE = {
    "elsewhere": b'{"token":"%t","a":"%t"}',
    "in a longer text": b'{"token":"%t","url":"https://x.example/?k=%t&n=1"}',
    "as a name": b'{"token":"%t","%t":1}',
    "as a name, escaped": b'{"token":"%t","%e":1}',
    "in a list": b'{"token":"%t","a":[["%t"],{"b":["%m"]}]}',
    "as the key": b'{"token":"%t","id":"%t"}',
    "as the key, escaped": b'{"token":"%t","id":"%e"}',
    "as the subject": b'{"token":"%t","about":"for %t"}',
    "as the type": b'{"token":"%t","type":"%t.done"}',
    "JSON in JSON": b'{"token":"%t","a":"{\\"token\\":\\"%t\\"}"}',
    "a form in JSON": b'{"token":"%t","a":"x=1&token=%p"}',
    "with a mark in front": b'{"token":"%t","a":"\\u0000%t"}',
}
BODIES = {**UNREADABLE, **READABLE}


def filled(body: bytes, token: str = TOKEN) -> bytes:
    spelled = {b"%t": token, b"%e": ESCAPED, b"%m": MIXED, b"%p": "".join(f"%{ord(c):02x}" for c in token)}
    for mark, text in spelled.items():
        body = body.replace(mark, text.encode())
    return body


def is_clean(data: bytes, secret: str) -> bool:
    """Tell whether a secret stands in these bytes in no spelling that this test uses."""
    plain = secret.encode()
    percents = "".join(f"%{byte:02x}" for byte in plain).encode()
    escapes = json.dumps(secret)[1:-1].encode()
    return not any(form in data for form in (plain, escapes, ESCAPED.encode(), MIXED.encode(), percents))


async def kept(inbox: Inbox, event_id: str) -> EventDetails:
    event = await inbox.store.get_event(EventId.parse(event_id))
    assert event is not None
    return await inbox.bodies.load(event)


def on_disk(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
async def test_a_token_in_the_body_is_kept_nowhere(tmp_path: Path, body: bytes) -> None:
    inbox = Inbox(f"sqlite:{tmp_path}/a.db")
    inbox.source(
        "go", verify=Token(place="body:token"), secret=[TOKEN, "another-one"], key="$.id", subject="$.about",
        max_body="2MiB",
    )  # fmt: skip
    async with inbox.running():
        receipt = await inbox.receive("go", [(b"content-type", b"application/json")], filled(body))
        assert receipt.outcome == "accepted", receipt.reply
        event = await kept(inbox, receipt.event_ids[0])
        assert is_clean(event.body, TOKEN)
        assert abs(len(event.body) - len(filled(body))) < 200, "the rest of it is kept"
        assert is_clean(on_disk(tmp_path), TOKEN)


POSITIONS = {
    "text": (b'{"a":"%s"}', lambda secret: json.dumps(secret, ensure_ascii=False)[1:-1]),
    "escaped text": (b'{"a":"%s"}', lambda secret: json.dumps(secret)[1:-1]),
    "PHP's slashes": (b'{"a":"%s"}', lambda secret: json.dumps(secret)[1:-1].replace("/", "\\/")),
    "a form": (b"a=1&b=%s&c=2", quote_plus),
    "a query": (b"a=1&b=%s&c=2", quote),
    "no format": (b"\x00\xff %s \xfe", str),
    "alone": (b"%s", str),
    "XML": (b"<a>%s</a>", str),
    "cut off": (b'{"a":"%s', lambda secret: json.dumps(secret)[1:-1]),
}


@pytest.mark.parametrize("where", POSITIONS)
async def test_a_signing_secret_is_kept_nowhere(tmp_path: Path, where: str) -> None:
    """In a body, in a header, in the query; the present one and the one that is rotated out."""
    shape, spell = POSITIONS[where]
    inbox = Inbox(f"sqlite:{tmp_path}/a.db")
    old = "0ld-s3cret-of-last-year"
    source = inbox.source("a", verify=Hmac(header="X-Sign"), secret=[SECRET, old])
    body = b" ".join(shape.replace(b"%s", spell(one).encode()) for one in (SECRET, old))
    async with inbox.running():
        head = [
            (b"x-debug", b"secret " + SECRET.encode()),
            (b"x-other", old.encode()),
            (b"content-type", b"text/plain"),
        ]
        signed = samples.sign(source, Arrival("a", head, body))
        receipt = await inbox.receive("a", signed.headers, body, query=b"k=" + quote(SECRET).encode())
        assert receipt.outcome == "accepted"
        event = await kept(inbox, receipt.event_ids[0])
        for one in (SECRET, old):
            assert spell(one).encode() not in event.body
            assert one.encode() not in event.request_head
            assert one.encode() not in on_disk(tmp_path)
        assert quote(SECRET).encode() not in event.request_head


async def test_a_body_without_secrets_stays_as_it_came(tmp_path: Path) -> None:
    inbox = Inbox(f"sqlite:{tmp_path}/a.db")
    inbox.source("a", verify=Token(place="header:X-Token"), secret=TOKEN)
    body = b'{ "a" : "\\u0074ok_ %74 \\/", "a":1e999 }'
    async with inbox.running():
        receipt = await inbox.receive("a", [(b"x-token", TOKEN.encode())], body)
        assert (await kept(inbox, receipt.event_ids[0])).body == body


async def test_who_wants_the_body_as_it_came_gets_it(tmp_path: Path) -> None:
    inbox = Inbox(f"sqlite:{tmp_path}/a.db")
    inbox.source("a", verify=Token(place="body:token"), secret=TOKEN, redact=[])
    body = filled(b'{"token":"%t"}')
    async with inbox.running():
        receipt = await inbox.receive("a", [(b"x-copy", TOKEN.encode())], body)
        event = await kept(inbox, receipt.event_ids[0])
        assert event.body == body
        assert TOKEN.encode() not in event.request_head


async def test_raw_bytes_of_a_batch_are_masked(tmp_path: Path) -> None:
    inbox = Inbox(f"sqlite:{tmp_path}/a.db")
    inbox.source("a", verify=Token(place="header:X-Token"), secret=TOKEN, split="$.events", key="$.events[0].id")
    body = filled(b'{"events":[{"id":1,"t":"%e"},{"id":2,"t":"%t"}]}')
    async with inbox.running():
        receipt = await inbox.receive("a", [(b"x-token", TOKEN.encode())], body)
        assert len(receipt.event_ids) == 2
        assert is_clean(on_disk(tmp_path), TOKEN)


def test_a_secret_that_is_a_number_leaves_json_json() -> None:
    assert json.loads(Masking.of([b"1234567890"])(b'{"a":1234567890,"b":"1234567890"}')) == {
        "a": 9999999999, "b": "9999999999",
    }  # fmt: skip


def test_a_short_secret_is_left_alone() -> None:
    """It could be any word."""
    assert not Masking.of([b"payment"])
    assert Masking.of([b"payment"])(b"a payment of 10") == b"a payment of 10"


def test_basic_is_masked_in_its_own_spelling(tmp_path: Path) -> None:
    source = Inbox(f"sqlite:{tmp_path}/a.db").source("a", verify=Basic(), secret="user:password")
    assert source.masking(b"x " + base64.b64encode(b"user:password")) == b"x [redacted]"


async def test_a_short_secret_is_warned_of_at_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    inbox = Inbox(f"sqlite:{tmp_path}/a.db")
    inbox.source("weak", verify=Hmac(header="X-Sign"), secret="s3cr3t!")
    inbox.source("strong", verify=Hmac(header="X-Sign"), secret=SECRET)
    inbox.source("none", verify=Nothing())
    with caplog.at_level(logging.WARNING, "oncehook"):
        async with inbox.running():
            pass
    said = [str(vars(record)["fields"]) for record in caplog.records if record.message.startswith("source.secret")]
    assert len(said) == 1
    assert "weak" in said[0]
    assert "s3cr3t!" not in caplog.text + said[0]
