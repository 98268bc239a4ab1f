"""A message as the body of an event: what it may leave out, what it may not, and how it looks in one line."""

from __future__ import annotations

import json

import pytest

from oncehook.whatsapp.messages import (
    Contact,
    InvalidMessage,
    Link,
    Location,
    Media,
    Message,
    Poll,
    Reaction,
    Read,
    Template,
    Text,
    read_message,
    summary,
)

TO = "+55 11 99999-0001"


@pytest.mark.parametrize(
    ("fields", "expected", "line"),
    [
        ({"to": TO, "text": "Hello"}, Text(to=TO, text="Hello"), "Hello"),
        (
            {"to": TO, "kind": "document", "link": "https://a.example/b.pdf", "filename": "b.pdf", "caption": "Here"},
            Media(to=TO, kind="document", link="https://a.example/b.pdf", filename="b.pdf", caption="Here"),
            "[document] b.pdf Here",
        ),
        ({"to": TO, "kind": "audio", "id": "123"}, Media(to=TO, kind="audio", id="123"), "[audio]"),
        ({"to": TO, "name": "reminder"}, Template(to=TO, name="reminder"), "[template reminder en_US]"),
        (
            {"to": TO, "message_id": "wamid.1", "emoji": "👍"},
            Reaction(to=TO, message_id="wamid.1", emoji="👍"),
            "[reaction 👍]",
        ),
        (
            {"to": TO, "message_id": "wamid.1", "emoji": ""},
            Reaction(to=TO, message_id="wamid.1", emoji=""),
            "[reaction taken back]",
        ),
        (
            {"to": TO, "url": "https://a.example", "text": "See"},
            Link(to=TO, url="https://a.example", text="See"),
            "See https://a.example",
        ),
        (
            {"to": TO, "latitude": -23.5, "longitude": 0, "name": "Shop"},
            Location(to=TO, latitude=-23.5, longitude=0, name="Shop"),
            "[location] Shop -23.5, 0",
        ),
        (
            {"to": TO, "name": "Ana", "phone": TO},
            Contact(to=TO, name="Ana", phone=TO),
            "[contact] Ana +55 11 99999-0001",
        ),
        (
            {"to": TO, "question": "When?", "options": ["Today", "Later"]},
            Poll(to=TO, question="When?", options=["Today", "Later"]),
            "[poll] When?",
        ),
        (
            {"to": TO, "text": "Hello", "delay": 900, "mentions": [TO], "mention_all": True},
            Text(to=TO, text="Hello", delay=900, mentions=[TO], mention_all=True),
            "Hello",
        ),
        ({"message_id": "wamid.1"}, Read(message_id="wamid.1"), "[read]"),
        ({"type": "read", "message_id": "wamid.1", "to": TO}, Read(message_id="wamid.1", to=TO), "[read]"),
    ],
)
def test_the_fields_tell_what_it_is(fields: dict[str, object], expected: Message, line: str) -> None:
    assert read_message(json.dumps(fields).encode()) == expected
    assert summary(expected) == line


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "cannot be read"),
        (b"\xff\xfe", "cannot be read"),
        (b'["to"]', "cannot be read"),
        (b"{}", "cannot be read"),
        (b'{"to": "1", "text": 5}', "$.text"),
        (b'{"text": "Hello"}', "`to`"),
        (b'{"to": "1", "type": "fax", "text": "Hello"}', "fax"),
        (b'{"to": "1", "text": " \\n "}', "without words"),
        (b'{"to": "1", "kind": "image"}', "exactly one of link, id and stored"),
        (b'{"to": "1", "kind": "image", "link": "https://a.example/", "id": "2"}', "exactly one of link"),
        (b'{"to": "1", "kind": "image", "link": "file:///etc/passwd"}', "begins with https://"),
        (b'{"to": "1", "kind": "gif", "link": "https://a.example/"}', "$.kind"),
        (b'{"to": "1", "kind": "audio", "id": "2", "caption": "Listen"}', "no caption with audio"),
        (b'{"to": "1", "name": ""}', "needs its name"),
        (b'{"to": "1", "url": "ftp://a.example"}', "begins with https://"),
        (b'{"to": "1", "latitude": 91, "longitude": 0}', "latitude of -90 to 90"),
        (b'{"to": "1", "latitude": 0, "longitude": -181}', "longitude of -180 to 180"),
        (b'{"to": "1", "name": " ", "phone": "1"}', "needs a name"),
        (b'{"to": "1", "name": "A\\nTEL:2", "phone": "1"}', "one line each"),
        (b'{"to": "1", "name": "A", "phone": "1", "organization": "B\\r"}', "one line each"),
        (b'{"to": "1", "question": "", "options": ["a", "b"]}', "needs a question"),
        (b'{"to": "1", "question": "?", "options": ["a"]}', "2 to 12 different options"),
        (b'{"to": "1", "question": "?", "options": ["a", "a"]}', "2 to 12 different options"),
        (b'{"to": "1", "question": "?", "options": ["a", ""]}', "2 to 12 different options"),
        (b'{"to": "1", "question": "?", "options": ["a", "b"], "max_answers": 3}', "max_answers"),
        (b'{"to": "1", "question": "?", "options": ["a", "b"], "max_answers": 0}', "max_answers"),
        (b'{"to": "1", "text": "Hello", "delay": -1}', "cannot be negative"),
        (b'{"message_id": ""}', "message_id is empty"),
    ],
)
def test_what_can_never_be_sent_is_refused_with_the_field_that_is_wrong(body: bytes, why: str) -> None:
    with pytest.raises(InvalidMessage) as raised:
        read_message(body)
    assert why in str(raised.value)
